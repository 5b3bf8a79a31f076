"""A bench for backends: parts with recognisable contents, and memory to move them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tierkv.abc import OK, IoStatus, ReadRequest, StoredPart, WriteItem
from tierkv.blocks import BlockKey, PartId, part_id
from tierkv.buffers import Arena
from tierkv.workers import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tierkv.abc import Backend, Buffer, IoResult

__all__ = ["BackendBench", "Bench", "Content", "contents", "name_part", "part"]


def name_part(number: int, group: int = 0) -> PartId:
    """Name of the ``number``-th part."""
    return part_id(BlockKey(hashlib.sha256(b"part %d" % number).digest()), group)


def part(number: int, nbytes: int, generation: int = 1, **fields: Any) -> StoredPart:
    """The ``number``-th part, with plausible relations to others."""
    parent = BlockKey(hashlib.sha256(b"part %d" % (number - 1)).digest()) if number else None
    values: dict[str, Any] = {
        "part": name_part(number),
        "generation": generation,
        "parent": parent,
        "root": BlockKey(hashlib.sha256(b"root").digest()),
        "nbytes": nbytes,
        "tenant": "acme",
    }
    return StoredPart(**(values | fields))


class Content(bytes):
    """Bytes that show their length and a checksum: pytest's diff of long ones takes minutes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} bytes, {hashlib.sha256(self).hexdigest()[:8]}>"


def contents(stored: StoredPart) -> bytes:
    """The bytes that a test puts into this publication of a part: no two are alike."""
    seed = int.from_bytes(hashlib.sha256(stored.part + b"%d" % stored.generation).digest(), "big")
    return Content(np.random.default_rng(seed).bytes(stored.nbytes))


class Bench:
    """An open backend with memory to read and write from."""

    def __init__(self, backend: Backend, workers: Workers, found: Sequence[StoredPart]) -> None:
        self.backend = backend
        self.workers = workers
        self.found = found
        self.arena = Arena(16 << 20)

    def item(self, stored: StoredPart) -> WriteItem:
        """A filled buffer to write; whoever takes it need not release it."""
        buffer = self.arena.allocate(stored.nbytes)
        assert buffer is not None, "the test wants more memory than it has"
        buffer.memory[:] = contents(stored)
        return WriteItem(stored, buffer)

    async def write(self, *parts: StoredPart) -> list[IoResult]:
        """Write a batch and reuse its memory at once, as the engine does."""
        items = [self.item(stored) for stored in parts]
        results = await self.backend.write(items)
        for item in items:
            item.buffer.memory[:] = b"\xee" * item.stored.nbytes
            item.buffer.release()
        return results

    async def read(self, *parts: StoredPart) -> list[bytes | IoStatus]:
        """Read whole frames: their bytes, or why not."""
        requests = [ReadRequest(p.part, p.generation, 0, p.nbytes) for p in parts]
        buffers = [self._buffer(p.nbytes) for p in parts]
        results = await self.backend.read(requests, [b.memory for b in buffers])
        assert len(results) == len(parts)
        seen: list[bytes | IoStatus] = [
            Content(buffer.memory) if result == OK else result.status
            for result, buffer in zip(results, buffers, strict=True)
        ]
        for buffer in buffers:
            buffer.release()
        return seen

    def _buffer(self, nbytes: int) -> Buffer:
        buffer = self.arena.allocate(nbytes)
        assert buffer is not None, "the test wants more memory than it has"
        return buffer


class BackendBench(ABC):
    """How a suite gets its backend."""

    capacity: ClassVar[int] = 4 << 20
    """Capacity that :meth:`make` is asked for."""

    @abstractmethod
    def make(self, root: Path, capacity: int) -> Backend:
        """Return a new backend, not opened; the same root again means the same medium."""

    @asynccontextmanager
    async def opened(self, root: Path, capacity: int | None = None) -> AsyncIterator[Bench]:
        """An open backend; closed at the end."""
        workers = Workers(threads=2)
        await workers.start()
        try:
            backend = self.make(root, capacity or self.capacity)
            found = await backend.open(workers)
            try:
                yield Bench(backend, workers, found)
            finally:
                await backend.aclose()
        finally:
            await workers.aclose()
