"""Backends that behave as the ones they wrap until a fault says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import Backend, IoResult, IoStatus, MemoryBackend
from tierkv.abc.direct import DirectBackend
from tierkv.testing.faulty_direct import FaultyDirect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import (
        BackendStats,
        Buffer,
        Device,
        ReadRequest,
        StoredPart,
        Threads,
        WriteItem,
    )
    from tierkv.abc.direct import DirectIo
    from tierkv.blocks import PartId
    from tierkv.testing.faults import Fault

__all__ = ["Faulty", "FaultyMemory"]


class Faulty(Backend):
    """A backend with faults; see :func:`tierkv.testing.faults.inject`.

    Attributes:
        inner: The sound backend.
        calls: (operation, batch size) of every call so far, in order.
    """

    kind: ClassVar[str] = "faulty"

    def __init__(self, inner: Backend, faults: Sequence[Fault]) -> None:
        self.inner = inner
        self.name = inner.name
        self.faults = list(faults)
        self.calls: list[tuple[str, int]] = []
        self._threads: Threads | None = None

    @property
    def durable(self) -> bool:  # type: ignore[override] # a wrapper is what it wraps
        """As of the wrapped backend."""
        return self.inner.durable

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """Whether other processes use the medium."""
        return self.inner.shared

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Open the wrapped backend."""
        self._threads = threads
        await self._enter("open", 1)
        return await self.inner.open(threads)

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Read, and spoil what was read."""
        acting, refused = await self._enter("read", len(requests))
        if refused is not None:
            return [refused] * len(requests)
        results = await self.inner.read(requests, into)
        for fault in acting:
            for item, result in enumerate(results):
                if result.status is IoStatus.OK:
                    status = fault.spoil(into[item])
                    results[item] = result if status is IoStatus.OK else IoResult(status)
        return results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Write."""
        _, refused = await self._enter("write", len(items))
        return [refused] * len(items) if refused is not None else await self.inner.write(items)

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Delete."""
        await self._enter("delete", len(parts))
        await self.inner.delete(parts)

    async def flush(self) -> None:
        """Flush."""
        await self._enter("flush", 1)
        await self.inner.flush()

    async def aclose(self) -> None:
        """Close the wrapped backend, even if a fault raises."""
        try:
            await self._enter("aclose", 1)
        finally:
            await self.inner.aclose()

    def charge(self, nbytes: int) -> int:
        """As of the wrapped backend."""
        return self.inner.charge(nbytes)

    def longest(self, charged: int) -> int:
        """As of the wrapped backend."""
        return self.inner.longest(charged)

    def direct(self, device: Device) -> DirectIo | None:
        """The wrapped backend's direct way to a device's memory, if it has one, with the faults."""
        way = self.inner.direct(device) if isinstance(self.inner, DirectBackend) else None
        return None if way is None else FaultyDirect(way, device, self._enter)

    def stats(self) -> BackendStats:
        """As of the wrapped backend."""
        return self.inner.stats()

    async def _enter(self, operation: str, size: int) -> tuple[list[Fault], IoResult | None]:
        self.calls.append((operation, size))
        acting = [fault for fault in self.faults if fault.due(operation)]
        for fault in acting:
            await fault.before(operation, self._threads)
            refused = fault.refuse(operation)
            if refused is not None:
                return acting, refused
        return acting, None

    def _at_once(self, operation: str) -> list[Fault]:
        """Faults that act on a synchronous call; those that only wait are not used up by it."""
        return [f for f in self.faults if not f.waits and f.due(operation)]


class FaultyMemory(Faulty, MemoryBackend):
    """A memory tier with faults; see :func:`tierkv.testing.faults.inject`."""

    def __init__(self, inner: MemoryBackend, faults: Sequence[Fault]) -> None:
        super().__init__(inner, faults)
        self._memory = inner

    def allocate(self, nbytes: int) -> Buffer | None:
        """Memory, unless a ``write`` fault blocks it."""
        acting = self._at_once("write")
        blocked = any(fault.blocks_memory for fault in acting)
        return None if blocked else self._memory.allocate(nbytes)

    @property
    def whole(self) -> memoryview | None:
        """As of the wrapped backend, if it says so."""
        found: memoryview | None = self._memory.whole
        return found

    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        """Publish."""
        return self._memory.adopt(stored, buffer)

    def borrow(self, part: PartId, generation: int) -> Buffer | None:
        """The frame in place, spoilt in place by ``read`` faults."""
        acting = self._at_once("read")
        if any(fault.blocks_memory for fault in acting):
            return None
        buffer = self._memory.borrow(part, generation)
        if buffer is not None:
            for fault in acting:
                fault.spoil(buffer.memory)
        return buffer

    def discard(self, part: PartId, generation: int) -> None:
        """Forget."""
        self._memory.discard(part, generation)
