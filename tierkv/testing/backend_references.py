"""The shortest sound backends: they pass the suites, and mutants derive from them.

Their methods do what :mod:`tierkv.abc` says, nothing more.
"""
# ruff: noqa: D102

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import OK, Backend, BackendStats, IoResult, IoStatus, MemoryBackend, StoredPart
from tierkv.buffers import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv.abc import Buffer, ReadRequest, Threads, WriteItem
    from tierkv.blocks import PartId

__all__ = ["DictBackend", "SlabBackend"]

_PAGE = 4096
_Entry = tuple[StoredPart, bytes]  # the part and its padded contents


class DictBackend(Backend):
    """Frames in a dictionary that outlives the instance: the medium is its root's name."""

    kind: ClassVar[str] = "dict"
    durable: ClassVar[bool] = True
    media: ClassVar[dict[str, dict[PartId, _Entry]]] = {}

    def __init__(self, root: Path, capacity: int) -> None:
        self.name = "dict"
        self.capacity = capacity
        self.root = str(root)
        self.entries: dict[PartId, _Entry] = {}
        self.threads: Threads | None = None

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        self.threads = threads
        self.entries = dict(self.media.get(self.root, {}))
        return [stored for stored, _ in self.entries.values()]

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        assert self.threads is not None
        return await self.threads.run(self.copy_out, requests, into)

    def copy_out(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        return [self.read_one(*pair) for pair in zip(requests, into, strict=True)]

    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        entry = self.find(request.part, request.generation)
        if entry is None:
            return IoResult(IoStatus.MISSING)
        source = entry[1]
        if request.offset + request.length > len(source):
            return IoResult(IoStatus.SHORT)
        target[:] = source[request.offset : request.offset + request.length]
        return OK

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        return [self.write_one(item) for item in items]

    def write_one(self, item: WriteItem) -> IoResult:
        stored = item.stored
        old = self.entries.get(stored.part)
        if old is not None and old[0].generation > stored.generation:
            return IoResult(IoStatus.MISSING)
        freed = 0 if old is None else self.charge(old[0].nbytes)
        if self.live() - freed + self.charge(stored.nbytes) > self.capacity:
            return IoResult(IoStatus.FULL)
        self.entries[stored.part] = (stored, self.keep(item))
        return OK

    def keep(self, item: WriteItem) -> bytes:
        return bytes(item.buffer.memory).ljust(self.charge(item.stored.nbytes), b"\0")

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        for part, generation in parts:
            if self.find(part, generation) is not None:
                del self.entries[part]

    async def flush(self) -> None:
        self.media[self.root] = dict(self.entries)

    async def aclose(self) -> None:
        if self.threads is not None:
            await self.flush()
        self.threads = None

    def charge(self, nbytes: int) -> int:
        return -(-nbytes // _PAGE) * _PAGE

    def stats(self) -> BackendStats:
        return BackendStats(len(self.entries), self.live(), 0, self.capacity, "memory")

    def live(self) -> int:
        return sum(self.charge(stored.nbytes) for stored, _ in self.entries.values())

    def find(self, part: PartId, generation: int) -> _Entry | None:
        entry = self.entries.get(part)
        return entry if entry is not None and entry[0].generation == generation else None


class _Lent:
    def __init__(self, buffer: Buffer) -> None:
        self.nbytes, self.memory, self.padded = buffer.nbytes, buffer.memory, buffer.padded

    def release(self) -> None:
        """Nothing is given back: it was lent."""


class SlabBackend(MemoryBackend):
    """Frames in an arena."""

    kind: ClassVar[str] = "slab"

    def __init__(self, root: Path, capacity: int) -> None:
        self.name = "slab"
        self.arena = Arena(capacity)
        self.entries: dict[PartId, tuple[StoredPart, Buffer]] = {}

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        return ()

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        results = []
        for request, target in zip(requests, into, strict=True):
            lent = self.borrow(request.part, request.generation)
            stop = request.offset + request.length
            if lent is None or stop > len(lent.padded):
                status = IoStatus.MISSING if lent is None else IoStatus.SHORT
                results.append(IoResult(status))
                continue
            target[:] = lent.padded[request.offset : stop]
            results.append(OK)
        return results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        results = []
        for stored, source in items:
            buffer = self.allocate(stored.nbytes)
            if buffer is None:
                results.append(IoResult(IoStatus.FULL))
                continue
            buffer.memory[:] = source.memory
            good = self.adopt(stored, buffer)
            results.append(OK if good else IoResult(IoStatus.MISSING))
            if not good:
                buffer.release()
        return results

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        for part, generation in parts:
            self.discard(part, generation)

    async def aclose(self) -> None:
        self.entries.clear()

    def charge(self, nbytes: int) -> int:
        return self.arena.charge(nbytes)

    def stats(self) -> BackendStats:
        used = self.arena.used
        return BackendStats(len(self.entries), used, 0, self.arena.capacity, "memory")

    def allocate(self, nbytes: int) -> Buffer | None:
        return self.arena.allocate(nbytes)

    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        old = self.entries.get(stored.part)
        if old is not None and old[0].generation > stored.generation:
            return False
        self.entries[stored.part] = (stored, buffer)
        if old is not None:
            old[1].release()
        return True

    def borrow(self, part: PartId, generation: int) -> Buffer | None:
        entry = self.entries.get(part)
        if entry is None or entry[0].generation != generation:
            return None
        return _Lent(entry[1])

    def discard(self, part: PartId, generation: int) -> None:
        if self.borrow(part, generation) is not None:
            self.entries.pop(part)[1].release()
