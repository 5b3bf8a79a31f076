"""The ``device`` tier: frames in an accelerator's memory, built and read in place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, ClassVar, Final

from tierkv.abc import OK, BackendStats, IoResult, IoStatus, Resident, ResidentBackend
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.frame import PAGE
from tierkv.registry import resolve
from tierkv.units import format_bytes
from tierkv_backends.device.copies import Batch, Traffic
from tierkv_backends.device.frames import Borrowed, Entry, Frames
from tierkv_backends.device.pool import DevicePool, PoolBuffer, pages_of
from tierkv_backends.options import check_options, read_size
from tierkv_backends.results import FULL, MISSING, SHORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import (
        Device,
        DeviceBuffer,
        Event,
        ReadRequest,
        StoredPart,
        Threads,
        WriteItem,
    )
    from tierkv.blocks import PartId
    from tierkv.config import Tier
    from tierkv.frame import Header

__all__ = ["DeviceBackend"]

_log = logging.getLogger("tierkv.backends.device")
_CHUNK: Final = 256 << 20
_SHARES: Final = 8  # a tier is at most full of holes by one chunk in so many
_CLOSE_STEP: Final = 512  # frames forgotten in one turn of the loop
_CLOSE_S: Final = 5.0


class DeviceBackend(ResidentBackend):
    """Frames in the memory of one device, which is shared with the model that runs there.

    Memory is taken in chunks, when frames need it, and goes back as they empty; a chunk that the
    device refuses costs the store in hand and nothing else. ``device`` of the tier names the
    device; left out, it is ``"cuda:0"`` where torch sees a GPU, and else the CPU, whose memory then
    stands in for a device's through the same code (``stats().mode`` tells which).

    Options: ``chunk`` (size; default an eighth of the capacity, at most 256 MiB): most memory
    asked for at once.

    Args:
        tier: Settings; ``path`` does not apply here.
        device: The device itself, instead of the one that the tier names; stays the caller's.

    Raises:
        ConfigError: if an option or the kind of device is unknown, or a setting does not apply.
    """

    kind: ClassVar[str] = "device"
    durable: ClassVar[bool] = False

    def __init__(self, tier: Tier, device: Device | None = None) -> None:
        check_options(tier, ("chunk",))
        self.name = tier.name
        if tier.path is not None:
            raise ConfigError(f"tier {tier.name!r}: path has no meaning for a 'device' tier")
        if tier.device is not None:
            resolve("devices", tier.device.partition(":")[0])  # a wrong name is told at once
        self._wanted = tier.device
        self._given = device
        self._own: Device | None = None
        self._capacity = tier.capacity_bytes // PAGE * PAGE
        default = min(self._capacity // _SHARES, _CHUNK)
        chunk = read_size(tier, "chunk", default)
        self._chunk = min(max(chunk, PAGE), self._capacity)
        self._pool: DevicePool | None = None
        self._threads: Threads | None = None
        self._frames = Frames()
        self._traffic: Traffic | None = None
        self._counts = dict.fromkeys(
            ("batches", "bytes_copied", "bytes_read", "bytes_written", "reads", "writes"), 0
        )

    def __repr__(self) -> str:
        parts, nbytes = len(self._frames), self._frames.live_bytes
        return f"<DeviceBackend {self.name!r}: {parts} parts, {nbytes} bytes>"

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Find the device and see that it has memory; there is never anything stored yet.

        Raises:
            BackendError: if there is no such device, or it has less memory free than one chunk.
        """
        if self._pool is not None:
            raise BackendError(self.name, "it is open already")
        try:
            device, free = await threads.run(self._find_device)
            if free < self._chunk:
                raise BackendError(
                    self.name,
                    f"{device.name} has {free} bytes free and one chunk takes {self._chunk}; free "
                    f"memory there, or lower the capacity or the option 'chunk'",
                )
        except BaseException:
            await self._close_own(threads)
            raise
        if free < self._capacity:
            _log.warning(
                "tier %r: %s has %s free now, less than the capacity of %s: stores are skipped "
                "once it is used up",
                *(self.name, device.name, format_bytes(free), format_bytes(self._capacity)),
            )
        self.device = device
        self._pool = DevicePool(device, self._capacity, self._chunk)
        self._traffic = Traffic(device, self._pool)
        self._threads = threads
        return ()

    def _find_device(self) -> tuple[Device, int]:
        """The device, and the memory that it has left. In a thread: drivers take their time."""
        import torch  # takes a second, the first time

        if self._given is not None:
            return self._given, self._given.available()
        name = self._wanted
        if name is None:
            name = "cuda:0" if torch.cuda.is_available() else "cpu"
            why = "torch sees a GPU" if name != "cpu" else "no GPU here: RAM stands in for one"
            _log.info("tier %r: device %s (%s)", self.name, name, why)
        self._own = found = _make(self.name, name)
        return found, found.available()

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Copy frames to host memory; see :meth:`tierkv.abc.Backend.read`.

        Cancellation: re-raised once the device touches none of the memory any more.
        """
        _, traffic, threads = self._open()
        batch = Batch(self.device, self.device.stores)
        results: list[IoResult] = []
        reading: list[Entry] = []
        total = 0
        for request, target in zip(requests, into, strict=True):
            entry = self._frames.find(request.part, request.generation)
            if entry is None:
                results.append(MISSING)
                continue
            source = entry.buffer.tensor
            stop = request.offset + request.length
            if not (0 <= request.offset <= stop <= len(source) and len(target) == request.length):
                results.append(SHORT)
                continue
            results.append(OK)
            if request.length:
                batch.read(source[request.offset : stop], target)
            reading.append(entry)
            total += request.length
        for entry in reading:
            entry.begin_read()
        try:
            await traffic.carry(batch, threads)
        finally:
            if not batch.stuck:
                for entry in reading:
                    entry.end_read()
        if batch.failure is not None:
            failed = IoResult(IoStatus.ERROR, batch.failure)
            return [failed if r is OK else r for r in results]
        self._count("reads", "bytes_read", len(reading), total)
        return results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Copy frames from host memory; see :meth:`tierkv.abc.Backend.write`.

        Cancellation: re-raised once the device touches none of the memory any more; nothing of
        the batch is stored then.
        """
        _, traffic, threads = self._open()
        batch = Batch(self.device, self.device.loads)
        results: list[IoResult] = []
        fresh: list[tuple[int, StoredPart, PoolBuffer]] = []
        for index, item in enumerate(items):
            stored = item.stored
            result, buffer = self._room_for(item)
            results.append(result)
            if buffer is not None:
                fresh.append((index, stored, buffer))
                batch.write(item, buffer.tensor)
        done = False
        try:
            await traffic.carry(batch, threads)
            done = batch.failure is None
        finally:
            if not done and not batch.stuck:
                for _, _, buffer in fresh:
                    buffer.release()
        if batch.failure is not None:
            for index, _, _ in fresh:
                results[index] = IoResult(IoStatus.ERROR, batch.failure)
            return results
        for (index, stored, buffer), header in zip(fresh, batch.headers, strict=True):
            # overtaken while we copied, or closed
            if self._pool is None or not self._frames.publish(stored, header, buffer):
                buffer.release()
                results[index] = MISSING
        self._count("writes", "bytes_written", len(fresh), sum(s.nbytes for _, s, _ in fresh))
        return results

    def _room_for(self, item: WriteItem) -> tuple[IoResult, PoolBuffer | None]:
        if self._frames.newer(item.stored):
            return MISSING, None
        if item.buffer.nbytes < item.stored.nbytes:
            return SHORT, None
        buffer = self._open()[0].allocate(item.stored.nbytes)
        return (OK, buffer) if buffer is not None else (FULL, None)

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts; see :meth:`tierkv.abc.Backend.delete`."""
        for part, generation in parts:
            self.discard(part, generation)

    async def aclose(self) -> None:
        """Give all memory back once the device is done with it; idempotent.

        Waits for the device, but at most 5 s: whoever still waits for a copy then gets
        ClosedError, and the memory is kept for as long as the process lives.

        Cancellation: re-raised once the device touches none of the memory any more, or was given
        up.
        """
        pool, self._pool = self._pool, None
        traffic, self._traffic = self._traffic, None
        threads, self._threads = self._threads, None
        if pool is None or traffic is None:
            return
        try:
            left = True
            while left:  # step by step: a large tier must not hold up the loop
                left = self._frames.clear(_CLOSE_STEP)
                await asyncio.sleep(0)
            if not await traffic.settle(_CLOSE_S):
                _log.error("tier %r: %s hangs and is given up", self.name, self.device.name)
        finally:
            self._frames.clear(len(self._frames))
            if not pool.given_up:  # a device that hangs does not close either
                await self._close_own(threads)

    async def _close_own(self, threads: Threads | None) -> None:
        device, self._own = self._own, None
        if device is None:
            return
        try:
            if threads is not None:
                with contextlib.suppress(ClosedError):  # no threads any more
                    await threads.run(device.close)  # it waits for its streams
        finally:
            device.close()  # idempotent: does nothing, unless no thread did it

    def allocate(self, nbytes: int) -> DeviceBuffer | None:
        """Return memory for a frame, or None when the device has none of that size now."""
        return self._open()[0].allocate(nbytes)

    def adopt(self, stored: StoredPart, header: Header, buffer: DeviceBuffer) -> bool:
        """Publish a frame that is complete on the device, without a copy.

        See :meth:`tierkv.abc.ResidentBackend.adopt`; ``buffer`` comes from :meth:`allocate`.
        """
        self._open()
        assert isinstance(buffer, PoolBuffer)
        return self._frames.publish(stored, header, buffer)

    def borrow(self, part: PartId, generation: int) -> Resident | None:
        """The frame in place; None if it is not there, or is nothing that has a header."""
        self._open()
        entry = self._frames.find(part, generation)
        if entry is None or entry.header is None:
            return None
        return Resident(entry.header, Borrowed(entry.buffer))

    def touched(self, part: PartId, generation: int, event: Event) -> None:
        """Keep this frame's memory until ``event``, even if the frame is forgotten before."""
        entry = self._frames.find(part, generation)
        if entry is not None:
            entry.touch(event)

    def discard(self, part: PartId, generation: int) -> None:
        """Forget one part; an absent or newer one is left alone."""
        self._frames.discard(part, generation)

    def shrink(self, capacity: int) -> int:
        """Hold at most ``capacity`` bytes: empty chunks go at once, others when they empty.

        A larger capacity than before lets the tier grow again.

        Returns:
            Bytes of the device's memory that are still held.
        """
        pool, _, _ = self._open()
        self._capacity = capacity // PAGE * PAGE
        return pool.resize(capacity)

    def charge(self, nbytes: int) -> int:
        """Bytes that a frame takes: whole 4 KiB pages."""
        return pages_of(nbytes) * PAGE

    def stats(self) -> BackendStats:
        """Snapshot; callable from any thread."""
        pool = self._pool
        details: dict[str, float] = dict(self._counts)
        details["usable_bytes"] = self._capacity
        details["chunks"] = pool.chunks if pool is not None else 0
        details["arena_bytes"] = pool.held if pool is not None else 0
        details["waiting_bytes"] = pool.waiting if pool is not None else 0
        details["allocation_failures"] = pool.failures if pool is not None else 0
        return BackendStats(
            entries=len(self._frames),
            live_bytes=self._frames.live_bytes,
            disk_bytes=0,
            capacity_bytes=self._capacity,
            mode="device" if pool is None else f"device {self.device.name}",
            details=details,
        )

    def _open(self) -> tuple[DevicePool, Traffic, Threads]:
        if self._pool is None or self._traffic is None or self._threads is None:
            raise ClosedError(f"tier {self.name!r} is not open")
        return self._pool, self._traffic, self._threads

    def _count(self, operations: str, volume: str, number: int, total: int) -> None:
        counts = self._counts
        counts["batches"] += 1
        counts["bytes_copied"] += total
        counts[operations] += number
        counts[volume] += total


def _make(tier: str, name: str) -> Device:
    try:
        found: Device = resolve("devices", name.partition(":")[0])(name)
    except BackendError as error:  # it names the device, which is no tier
        raise BackendError(tier, f"device {name!r}: {error}") from error
    return found
