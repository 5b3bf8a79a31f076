"""Faults for any backend: slow, gated, failing, short, corrupting, hanging.

``inject(backend, fault, ...)`` returns a backend that behaves as the given one until a fault
says otherwise; faults act in the order given. A memory tier stays a memory tier, and one in a
device's memory stays that: a ``read`` fault also acts on ``borrow``, a ``write`` fault on
``allocate``. Faults can be switched at run time by their ``active`` attribute::

    gate = Gated("read")
    backend = inject(HostBackend(tier), gate)
"""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import IoResult, IoStatus, MemoryBackend, ResidentBackend
from tierkv.errors import BackendError
from tierkv.testing.faulty import Faulty, FaultyMemory
from tierkv.testing.faulty_resident import FaultyResident

if TYPE_CHECKING:
    from tierkv.abc import Backend, Threads

__all__ = [
    "Corrupting",
    "Failing",
    "Fault",
    "Faulty",
    "FaultyMemory",
    "FaultyResident",
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

    waits: ClassVar[bool] = False
    """Whether all it does is to wait, which has no meaning in a synchronous call."""

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

    waits: ClassVar[bool] = True

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

    waits: ClassVar[bool] = True

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

    waits: ClassVar[bool] = True

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


def inject(backend: Backend, *faults: Fault) -> Faulty:
    """Wrap a backend so that the faults act on its calls."""
    if isinstance(backend, MemoryBackend):
        return FaultyMemory(backend, faults)
    if isinstance(backend, ResidentBackend):
        return FaultyResident(backend, faults)
    return Faulty(backend, faults)
