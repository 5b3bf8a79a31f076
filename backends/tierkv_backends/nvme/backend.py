"""The asynchronous face of the ``nvme`` tier."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from tierkv.abc import Backend, BackendStats
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv_backends.nvme.gds import Unavailable, load
from tierkv_backends.nvme.shards import Hops, split
from tierkv_backends.nvme.space import reserve_bytes
from tierkv_backends.nvme.store import Settings, Store
from tierkv_backends.nvme.transfer import PAGE
from tierkv_backends.nvme.writing import WriteJob
from tierkv_backends.options import check_choice, check_disk, check_options, read_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import (
        Device,
        DirectIo,
        IoResult,
        ReadRequest,
        StoredPart,
        Threads,
        WriteItem,
    )
    from tierkv.blocks import PartId
    from tierkv.config import Tier
    from tierkv_backends.nvme.direct import DeviceFiles

__all__ = ["NvmeBackend"]

_log = logging.getLogger("tierkv.nvme")
_MIN_CAPACITY: Final = 192 << 10
_INLINE: Final = 64 << 10
_QUICK_ITEMS: Final = 64  # finding room for one takes microseconds; more are no work for the loop
_CLOSE_S: Final = 5.0
_MODES: Final = ("auto", "buffered", "direct", "gds")
_GDS: Final = ("auto", "off")


class NvmeBackend(Backend):
    """Frames in preallocated segment files under one root directory of a local file system.

    Options: ``segment`` (size of a segment file of a new root; default a 1/8 of the capacity, at
    most 64 MiB, at least 1/256 of the capacity), ``io`` (``"auto"``: O_DIRECT where the file
    system takes it; ``"direct"``: or refuse to open; ``"gds"``: and kvikio as well;
    ``"buffered"``: through the page cache) and ``gds`` (``"auto"``: device memory is reached
    through kvikio where it works; ``"off"``: never).

    Whatever :meth:`flush` acknowledged survives a crash of the machine; what was merely written
    survives the end of the process. Everything under the root, as ``du`` counts it, stays within
    the capacity; ``stats().details["usable_bytes"]`` is what frames can count on.

    One batch takes one worker hop, and one system call for each run of adjacent extents. A large
    one is split, to keep the medium busy: a hop for each shard (``details["shards"]``), and one
    more for a write that has to let the files grow.

    Args:
        tier: Settings; ``path`` is required.

    Raises:
        ConfigError: if the path is missing, the capacity too small, or an option is unknown or
            malformed.
    """

    kind: ClassVar[str] = "nvme"
    durable: ClassVar[bool] = True

    def __init__(self, tier: Tier) -> None:
        check_options(tier, ("gds", "io", "segment"))
        root, capacity = check_disk(tier, _MIN_CAPACITY), tier.capacity_bytes
        mode = check_choice(tier, "io", _MODES)
        gds = check_choice(tier, "gds", _GDS)
        if mode == "gds" and gds == "off":
            raise ConfigError(f"tier {tier.name!r}: io = 'gds' and gds = 'off' exclude each other")
        default = max(min(64 << 20, capacity // 8), capacity // 256)
        segment = read_size(tier, "segment", default) // PAGE
        if not 1 <= segment < 2**32:
            raise ConfigError(f"tier {tier.name!r}: a segment has at least {PAGE} bytes")
        self.name = tier.name
        step = min(max(capacity // 128, 16 << 10), 256 << 10) // PAGE * PAGE
        self._settings = Settings(tier.name, root, capacity, segment, mode, step)
        self._gds = mode == "gds" or (gds == "auto" and mode != "buffered")
        self._devices: DeviceFiles | None = None
        self._store: Store | None = None
        self._hops: Hops | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "closed" if self._store is None else f"{len(self._store.catalog)} parts"
        return f"<NvmeBackend {self.name!r} at {self._settings.path!r}: {state}>"

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Take the root, recover its index and return every part in it.

        Raises:
            RootLockedError: if another engine owns the root.
            BackendError: if the directory is not a root of this version, or cannot be used; it is
                never changed or removed then.
        """
        if self._store is not None:
            raise BackendError(self.name, "it is open already")
        made: list[Store] = []
        try:
            parts, devices = await threads.run(self._open_store, made)
        except BaseException:
            if made:  # cancelled while the thread opened it: nobody else could give it up
                made[0].close()
            raise
        (store,) = made
        self._store, self._hops, self._devices = store, Hops(threads), devices
        self._pid = os.getpid()
        if store.refused:
            _log.warning(
                "tier %r: the file system of %r refuses O_DIRECT; reads and writes go through the "
                "page cache",
                self.name,
                self._settings.path,
            )
        return parts

    def direct(self, device: Device) -> DirectIo | None:
        """The direct way to a device's memory; see :class:`tierkv.abc.DirectBackend`.

        Raises:
            ClosedError: if the tier is not open.
            BackendError: if it was opened before this process was forked.
        """
        self._open()
        return None if self._devices is None else self._devices.way(device, self._open)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Read byte ranges of frames; see :meth:`tierkv.abc.Backend.read`.

        Not before the worker thread is done with the buffers does this return or raise.
        """
        store, hops = self._open()
        plan = store.plan(requests, into)
        try:
            small = plan.nbytes <= _INLINE
            if plan.pieces and not (small and store.read_cached(plan)):
                shards = split(plan.pieces, hops.depth(plan.nbytes))
                await hops.spread(store.read_shard, [(plan, shard) for shard in shards])
            store.count_read(plan)
        finally:
            store.let_go(plan.held)
        return plan.results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Write frames; see :meth:`tierkv.abc.Backend.write`.

        A cancelled call whose threads were under way may have stored its frames.
        """
        if not items:
            return []
        store, hops = self._open()
        job = WriteJob(len(items))
        try:
            depth = hops.depth(sum(item.stored.nbytes for item in items))
            if depth == 1:
                await hops.run(store.write, items, job)
            else:
                await self._write_shards(store, hops, items, job, depth)
        finally:
            store.writer.abandon(job)
        return job.outcome()

    async def _write_shards(
        self, store: Store, hops: Hops, items: Sequence[WriteItem], job: WriteJob, depth: int
    ) -> None:
        quick = len(items) <= _QUICK_ITEMS and store.begin(items, job, grow=False)
        if not quick:
            await hops.run(partial(store.begin, grow=True), items, job)
        shards = split(store.pieces(items, job), depth)
        job.shards = len(shards)
        if shards:
            await hops.spread(store.write_shard, [(job, shard) for shard in shards])
        else:  # nothing got room
            store.add(batches=1)

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts; see :meth:`tierkv.abc.Backend.delete`."""
        if parts:
            store, hops = self._open()
            await hops.run(store.delete, parts)

    async def flush(self) -> None:
        """Sync the data, then the journal.

        Raises:
            BackendError: if the medium refuses; a tier whose sync failed once stays failed until
                it is opened again, because nobody can tell any more what reached the medium.
        """
        store, hops = self._open()
        try:
            await hops.run(store.flush)
        except OSError as error:
            message = f"cannot sync {self._settings.path!r}: {error}"
            raise BackendError(self.name, message) from error

    async def aclose(self) -> None:
        """Sync, close all files and give the root up. Idempotent.

        Waits for batches under way, but at most 5 s: files that a hanging thread may still write
        to then stay open, and the root taken, until the medium lets it go.

        Cancellation: re-raised within these 5 s; the files are closed all the same.
        """
        store, self._store = self._store, None
        hops, self._hops = self._hops, None
        devices, self._devices = self._devices, None
        if store is None or hops is None or os.getpid() != self._pid:
            return
        try:
            if not await hops.settle(_CLOSE_S):
                _log.error("tier %r: batches hang in the medium and are given up", self.name)
            elif devices is None or not devices.reaper.in_flight:
                await hops.run(_finish, self.name, store, devices)
        except ClosedError:  # the threads are gone already
            _finish(self.name, store, devices)
        finally:
            close = partial(hops.afterwards, partial(_close, store, devices))
            if devices is not None:
                devices.reaper.give_up(close)
            else:
                close()

    def charge(self, nbytes: int) -> int:
        """Bytes that a frame takes: whole 4 KiB pages."""
        return max(1, -(-nbytes // PAGE)) * PAGE

    def stats(self) -> BackendStats:
        """Snapshot; reads no file, callable from any thread."""
        store = self._store
        capacity = self._settings.capacity
        details: dict[str, float] = {"usable_bytes": capacity - reserve_bytes(capacity)}
        if store is None:
            return BackendStats(0, 0, 0, capacity, "closed", details)
        details.update(store.counts)
        details["checkpoints"] = store.catalog.checkpoints
        details["journal_bytes"] = store.catalog.journal_bytes
        details["segments"] = len(store.segments)
        details["buffered_bytes"] = (
            0 if store.direct else store.counts["bytes_read"] + store.counts["bytes_written"]
        )
        if self._hops is not None:
            details["hops"] = self._hops.hops
            details["shards"] = self._hops.shards
        mode = "o_direct" if store.direct else "buffered"
        devices = self._devices
        if devices is not None and (devices.active or self._settings.io == "gds"):
            mode += f"+{devices.kvikio.mode}"
        return BackendStats(
            entries=len(store.catalog),
            live_bytes=store.catalog.live_bytes,
            disk_bytes=store.disk_bytes,
            capacity_bytes=capacity,
            mode=mode,
            details=details,
        )

    def _open(self) -> tuple[Store, Hops]:
        if self._store is None or self._hops is None:
            raise ClosedError(f"tier {self.name!r} is not open")
        if os.getpid() != self._pid:
            raise BackendError(
                self.name, "it was opened by the parent process; open an engine after the fork"
            )
        return self._store, self._hops

    def _open_store(self, made: list[Store]) -> tuple[list[StoredPart], DeviceFiles | None]:
        store = Store(self._settings)
        made.append(store)
        devices, way = self._open_devices(store)
        _log.info(
            "tier %r at %r: files %s, device memory %s",
            self.name,
            self._settings.path,
            "by O_DIRECT" if store.direct else "through the page cache",
            way,
        )
        return store.catalog.parts(), devices

    def _open_devices(self, store: Store) -> tuple[DeviceFiles | None, str]:
        """Set kvikio up where it is wanted; say for people how device memory is reached."""
        if not self._gds:
            return None, "through host memory"
        try:
            kvikio = load()
            from tierkv_backends.nvme.direct import DeviceFiles  # loads torch

            devices = DeviceFiles(store, kvikio, self.name)
        except Unavailable as error:
            if self._settings.io == "gds":
                raise BackendError(self.name, f"io = 'gds', but {error}") from error
            return None, f"through host memory: {error}"
        return devices, f"by kvikio {kvikio.version}, mode {kvikio.mode}"


def _finish(tier: str, store: Store, devices: DeviceFiles | None) -> None:
    """Sync and close. Blocks."""
    try:
        store.flush()
    except OSError as error:
        _log.error("tier %r: cannot sync while closing: %s", tier, error)
    _close(store, devices)


def _close(store: Store, devices: DeviceFiles | None) -> None:
    """Close all files, when no thread uses them. Idempotent."""
    if devices is not None:
        devices.close()
    store.close()
