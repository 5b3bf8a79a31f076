"""The ``host`` tier: frames in RAM, built and read in place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from tierkv.abc import OK, BackendStats, IoResult, MemoryBackend
from tierkv.buffers import Arena
from tierkv.errors import BackendError, CapacityError, ClosedError
from tierkv.frame import PAGE
from tierkv_backends.options import check_options, read_size
from tierkv_backends.results import FULL, MISSING, SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierkv.abc import Buffer, ReadRequest, StoredPart, Threads, WriteItem
    from tierkv.blocks import PartId
    from tierkv.config import Tier

__all__ = ["HostBackend"]

_INLINE: Final = 512 << 10  # a copy below this costs less than the way to a thread and back
_CLOSE_STEP: Final = 512


class _Entry:
    """One published frame; ``readers`` keeps its memory while a copy out of it runs."""

    __slots__ = ("buffer", "charge", "dead", "generation", "readers")

    def __init__(self, stored: StoredPart, buffer: Buffer) -> None:
        self.generation = stored.generation
        self.charge = Arena.charge(stored.nbytes)
        self.buffer = buffer
        self.readers = 0
        self.dead = False

    def retire(self) -> None:
        self.dead = True
        if self.readers == 0:
            self.buffer.release()

    def end_read(self) -> None:
        self.readers -= 1
        if self.dead and self.readers == 0:
            self.buffer.release()


class _Borrowed:
    """A frame in place: the backend goes on owning the memory."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def memory(self) -> memoryview:
        return self._buffer.memory

    @property
    def padded(self) -> memoryview:
        return self._buffer.padded

    def release(self) -> None:
        """Do nothing: the frame stays where it is."""


def _overtaken(entries: Mapping[PartId, _Entry], stored: StoredPart) -> bool:
    """Whether a newer generation of a part is there."""
    entry = entries.get(stored.part)
    return entry is not None and entry.generation > stored.generation


def _copy(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    # np.copyto releases the GIL for large pieces; a memoryview assignment would not
    for source, target in pairs:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class HostBackend(MemoryBackend):
    """Frames in one arena of this process.

    Options: ``touch`` (size, default 64 MiB): memory made real while opening; see :meth:`warm`.

    Batches below 512 KiB are copied on the spot, larger ones in one worker hop.

    Args:
        tier: Settings; ``path`` and ``device`` do not apply here.

    Raises:
        ConfigError: if an option is unknown or malformed.
    """

    kind: ClassVar[str] = "host"
    durable: ClassVar[bool] = False

    def __init__(self, tier: Tier) -> None:
        check_options(tier, ("touch",))
        self.name = tier.name
        self._capacity = tier.capacity_bytes
        self._touch = read_size(tier, "touch", 64 << 20)
        self._arena: Arena | None = None
        self._threads: Threads | None = None
        self._entries: dict[PartId, _Entry] = {}
        self._live = 0
        self._counts = dict.fromkeys(
            ("batches", "bytes_copied", "bytes_read", "bytes_written", "reads", "writes"), 0
        )

    def __repr__(self) -> str:
        return f"<HostBackend {self.name!r}: {len(self._entries)} parts, {self._live} bytes>"

    @property
    def whole(self) -> memoryview | None:
        """All of the arena, while the tier is open."""
        return None if self._arena is None else self._arena.whole

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Map the arena and make its first part real; there is never anything stored yet.

        Raises:
            BackendError: if the memory cannot be mapped, or it is open already.
        """
        if self._arena is not None:
            raise BackendError(self.name, "it is open already")
        try:
            arena = Arena(self._capacity)
        except CapacityError as error:
            raise BackendError(self.name, f"{error}; lower its capacity") from error
        await threads.run(arena.touch, min(self._touch, self._capacity))
        self._arena, self._threads = arena, threads
        return ()

    def warm(self, nbytes: int) -> int:
        """Make ``nbytes`` further bytes of the arena real memory; blocks, so use a worker thread.

        Returns:
            Bytes done; 0 once everything is.
        """
        return self._open().touch(nbytes)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Copy frames out; see :meth:`tierkv.abc.Backend.read`."""
        self._open()
        results, pairs, reading, total = [], [], [], 0
        for request, target in zip(requests, into, strict=True):
            entry = self._find(request.part, request.generation)
            if entry is None:
                results.append(MISSING)
                continue
            source = entry.buffer.padded
            stop = request.offset + request.length
            sane = 0 <= request.offset <= stop <= len(source) and len(target) == request.length
            if not sane:
                results.append(SHORT)
                continue
            results.append(OK)
            pairs.append((source[request.offset : stop], target))
            reading.append(entry)
            total += request.length
        for entry in reading:
            entry.readers += 1
        try:
            await self._copy(pairs, total)
        finally:
            for entry in reading:
                entry.end_read()
        self._count("reads", "bytes_read", len(pairs), total)
        return results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Copy frames in; see :meth:`tierkv.abc.Backend.write`."""
        self._open()
        results: list[IoResult] = []
        fresh: list[tuple[int, StoredPart, Buffer]] = []
        pairs, total, published = [], 0, False
        for index, (stored, source) in enumerate(items):
            if _overtaken(self._entries, stored):
                results.append(MISSING)
                continue
            if source.nbytes < stored.nbytes:
                results.append(SHORT)
                continue
            buffer = self.allocate(stored.nbytes)
            if buffer is None:
                results.append(FULL)
                continue
            results.append(OK)
            fresh.append((index, stored, buffer))
            pairs.append((source.memory[: stored.nbytes], buffer.memory))
            total += stored.nbytes
        try:
            await self._copy(pairs, total)
            published = True
        finally:
            for index, stored, buffer in fresh:
                if not published:
                    buffer.release()
                elif not self.adopt(stored, buffer):  # overtaken while we copied
                    buffer.release()
                    results[index] = MISSING
        self._count("writes", "bytes_written", len(pairs), total)
        return results

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts; see :meth:`tierkv.abc.Backend.delete`."""
        for part, generation in parts:
            self.discard(part, generation)

    async def aclose(self) -> None:
        """Give all memory back; idempotent."""
        while self._entries:
            # page by page into the free list: a large tier must not hold up the loop
            for _ in range(min(_CLOSE_STEP, len(self._entries))):
                self._entries.popitem()[1].retire()
            await asyncio.sleep(0)
        self._live = 0
        self._arena = self._threads = None

    def allocate(self, nbytes: int) -> Buffer | None:
        """Return memory for a frame, or None when no room of that size is free now."""
        return self._open().allocate(nbytes)

    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        """Publish a filled buffer without a copy; see :meth:`tierkv.abc.MemoryBackend.adopt`."""
        self._open()
        if _overtaken(self._entries, stored):
            return False
        old = self._entries.get(stored.part)
        if old is not None:
            self._live -= old.charge
            old.retire()
        entry = self._entries[stored.part] = _Entry(stored, buffer)
        self._live += entry.charge
        return True

    def borrow(self, part: PartId, generation: int) -> Buffer | None:
        """The frame in place, or None; see :meth:`tierkv.abc.MemoryBackend.borrow`."""
        entry = self._entries.get(part)
        if entry is not None and entry.generation == generation:
            return _Borrowed(entry.buffer)
        self._open()
        return None

    def look(self, part: PartId, generation: int) -> memoryview | None:
        """Its bytes in place, or None; see :meth:`tierkv.abc.MemoryBackend.look`."""
        entry = self._entries.get(part)
        if entry is not None and entry.generation == generation:
            return entry.buffer.memory
        self._open()
        return None

    def discard(self, part: PartId, generation: int) -> None:
        """Forget one part; an absent or newer one is left alone."""
        entry = self._find(part, generation)
        if entry is not None:
            del self._entries[part]
            self._live -= entry.charge
            entry.retire()

    def charge(self, nbytes: int) -> int:
        """Bytes that a frame takes: whole 4 KiB pages."""
        return Arena.charge(nbytes)

    def stats(self) -> BackendStats:
        """Snapshot; callable from any thread."""
        arena = self._arena
        details: dict[str, float] = dict(self._counts)
        details["arena_bytes"] = arena.used if arena is not None else 0
        details["usable_bytes"] = self._capacity // PAGE * PAGE
        return BackendStats(
            entries=len(self._entries),
            live_bytes=self._live,
            disk_bytes=0,
            capacity_bytes=self._capacity,
            mode="memory",
            details=details,
        )

    def _open(self) -> Arena:
        if self._arena is None:
            raise ClosedError(f"tier {self.name!r} is not open")
        return self._arena

    def _find(self, part: PartId, generation: int) -> _Entry | None:
        entry = self._entries.get(part)
        return entry if entry is not None and entry.generation == generation else None

    async def _copy(self, pairs: Sequence[tuple[memoryview, memoryview]], total: int) -> None:
        if total < _INLINE or self._threads is None:
            _copy(pairs)
        else:
            await self._threads.run(_copy, pairs)

    def _count(self, operations: str, volume: str, number: int, total: int) -> None:
        counts = self._counts
        counts["batches"] += 1
        counts["bytes_copied"] += total
        counts[operations] += number
        counts[volume] += total
