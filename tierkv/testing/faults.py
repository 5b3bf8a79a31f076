"""Faults for any backend: slow, gated, failing, short, corrupting, hanging.

``inject(backend, fault, ...)`` returns a backend that behaves as the given one until a fault
says otherwise; faults act in the order given. A memory tier stays a memory tier: a ``read`` fault
also acts on ``borrow``, a ``write`` fault on ``allocate``. Faults can be switched at run time by
their ``active`` attribute::

    gate = Gated("read")
    backend = inject(HostBackend(tier), gate)
"""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import Backend, IoResult, IoStatus, MemoryBackend
from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import BackendStats, Buffer, ReadRequest, StoredPart, Threads, WriteItem
    from tierkv.blocks import PartId

__all__ = [
    "Corrupting",
    "Failing",
    "Fault",
    "Faulty",
    "FaultyMemory",
    "Gated",
    "Hanging",
    "Short",
    "Slow",
    "inject",
]

_OPERATIONS = frozenset({"open", "read", "write", "delete", "flush", "aclose"})


class Fault:
    """Base of all faults: does nothing.

    Args:
        operations: Names of backend calls that it acts on (``"read"``, ``"write"``, ...).
        times: How many calls it acts on; None for all.

    Raises:
        ValueError: if an operation is unknown.

    Attributes:
        active: Switch it off and on here.
        seen: Calls that it acted on.
    """

    def __init__(self, *operations: str, times: int | None = None) -> None:
        unknown = set(operations) - _OPERATIONS
        if unknown or not operations:
            raise ValueError(f"a fault acts on some of {sorted(_OPERATIONS)}, not on {operations}")
        self.operations = frozenset(operations)
        self.times = times
        self.active = True
        self.seen = 0

    def due(self, operation: str) -> bool:
        """Whether it acts on this call; counts it if so."""
        if not self.active or operation not in self.operations:
            return False
        if self.times is not None and self.seen >= self.times:
            return False
        self.seen += 1
        return True

    async def before(self, operation: str, threads: Threads | None) -> None:
        """Act before a call reaches the medium."""

    def refuse(self, operation: str) -> IoResult | None:
        """Result for every item of a call that never reaches the medium, or None."""
        return None

    def spoil(self, memory: memoryview) -> IoStatus:
        """Damage what was read into ``memory`` and return the status to report."""
        return IoStatus.OK

    @property
    def blocks_memory(self) -> bool:
        """Whether ``borrow`` and ``allocate`` of a memory tier find nothing."""
        return False


class Slow(Fault):
    """Every call takes ``seconds`` longer; it can be cancelled meanwhile."""

    def __init__(self, seconds: float, *operations: str, times: int | None = None) -> None:
        super().__init__(*operations, times=times)
        self.seconds = seconds

    async def before(self, operation: str, threads: Threads | None) -> None:
        """Sleep."""
        await asyncio.sleep(self.seconds)


class Gated(Fault):
    """Calls wait at a gate until :meth:`open_gate`; it can be cancelled meanwhile.

    Attributes:
        waiting: Calls that wait now.
    """

    def __init__(self, *operations: str, times: int | None = None) -> None:
        super().__init__(*operations, times=times)
        self.waiting = 0
        self._gate = asyncio.Event()
        self._arrival = asyncio.Event()

    def open_gate(self) -> None:
        """Let everybody through from now on."""
        self._gate.set()

    def close_gate(self) -> None:
        """Stop everybody who comes from now on."""
        self._gate.clear()

    async def arrived(self, count: int = 1) -> None:
        """Wait until ``count`` calls have come to the gate in all."""
        while self.seen < count:
            self._arrival.clear()
            await self._arrival.wait()

    async def before(self, operation: str, threads: Threads | None) -> None:
        """Wait at the gate."""
        self._arrival.set()
        self.waiting += 1
        try:
            await self._gate.wait()
        finally:
            self.waiting -= 1


class Hanging(Fault):
    """Calls block a worker thread until :meth:`release`: no cancellation gets them out."""

    def __init__(self, *operations: str, times: int | None = None) -> None:
        super().__init__(*operations, times=times)
        self._released = threading.Event()
        self._entered = threading.Event()

    def release(self) -> None:
        """Let every thread go on."""
        self._released.set()

    @property
    def entered(self) -> bool:
        """Whether a thread hangs, or hung."""
        return self._entered.is_set()

    async def before(self, operation: str, threads: Threads | None) -> None:
        """Hang in a thread.

        Raises:
            RuntimeError: if the backend has no threads yet (``open`` hangs in the given ones).
        """
        if threads is None:
            raise RuntimeError(f"{operation!r} cannot hang before the backend was opened")
        await threads.run(self._hang)

    def _hang(self) -> None:
        self._entered.set()
        self._released.wait()


class Failing(Fault):
    """Calls fail without reaching the medium.

    ``read`` and ``write`` report ``status`` for each item; the other calls raise BackendError.
    """

    def __init__(
        self,
        *operations: str,
        times: int | None = None,
        status: IoStatus = IoStatus.ERROR,
        code: int = errno.EIO,
    ) -> None:
        super().__init__(*operations, times=times)
        self.status = status
        self.error = OSError(code, "injected fault")

    def refuse(self, operation: str) -> IoResult | None:
        """The failure.

        Raises:
            BackendError: for calls that have no result per item.
        """
        if operation in ("read", "write"):
            return IoResult(self.status, self.error if self.status is IoStatus.ERROR else None)
        raise BackendError("injected", f"{operation} fails") from self.error

    @property
    def blocks_memory(self) -> bool:
        """A failing memory tier finds nothing and has no room."""
        return True


class Short(Fault):
    """Reads come back SHORT with garbage in the second half of the buffer."""

    def __init__(self, *, times: int | None = None) -> None:
        super().__init__("read", times=times)

    def spoil(self, memory: memoryview) -> IoStatus:
        """Fill the second half."""
        half = len(memory) // 2
        memory[half:] = b"\xdb" * (len(memory) - half)
        return IoStatus.SHORT


class Corrupting(Fault):
    """Reads are reported OK with one bit flipped.

    Args:
        where: Which byte of each buffer, as a share of its length in [0, 1).
        times: How many calls it acts on; None for all.
    """

    def __init__(self, where: float = 0.75, *, times: int | None = None) -> None:
        super().__init__("read", times=times)
        self.where = where

    def spoil(self, memory: memoryview) -> IoStatus:
        """Flip one bit."""
        if len(memory):
            memory[int(len(memory) * self.where)] ^= 0x10
        return IoStatus.OK


class Faulty(Backend):
    """A backend with faults; see :func:`inject`.

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


class FaultyMemory(Faulty, MemoryBackend):
    """A memory tier with faults; see :func:`inject`."""

    def __init__(self, inner: MemoryBackend, faults: Sequence[Fault]) -> None:
        super().__init__(inner, faults)
        self._memory = inner

    def allocate(self, nbytes: int) -> Buffer | None:
        """Memory, unless a ``write`` fault blocks it."""
        acting = self._synchronous("write")
        blocked = any(fault.blocks_memory for fault in acting)
        return None if blocked else self._memory.allocate(nbytes)

    def adopt(self, stored: StoredPart, buffer: Buffer) -> bool:
        """Publish."""
        return self._memory.adopt(stored, buffer)

    def borrow(self, part: PartId, generation: int) -> Buffer | None:
        """The frame in place, spoilt in place by ``read`` faults."""
        acting = self._synchronous("read")
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

    def _synchronous(self, operation: str) -> list[Fault]:
        # what only waits has no meaning in a synchronous call and must not be used up by it
        still = (Slow, Gated, Hanging)
        return [f for f in self.faults if not isinstance(f, still) and f.due(operation)]


def inject(backend: Backend, *faults: Fault) -> Faulty:
    """Wrap a backend so that the faults act on its calls."""
    if isinstance(backend, MemoryBackend):
        return FaultyMemory(backend, faults)
    return Faulty(backend, faults)
