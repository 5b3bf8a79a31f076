"""A simulated accelerator: wrong use of streams, events and memory gives wrong bytes here.

Its memory is CPU memory. What a real device does late is done late: work runs on a thread per
stream after a random delay, a copy reads its source when it runs, piece by piece, and memory that
a pool takes back is spoiled at once. Tests that pass on many seeds order their copies rightly;
what the simulation cannot show is speed, and what a real driver does beside the rules.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from tierkv.abc import Device
from tierkv.device.bits import copy_move
from tierkv.device.fold import fold_tensors
from tierkv.device.mapped import map_tensor
from tierkv.device.plan import Plan, plan
from tierkv.device.polling import poll
from tierkv.errors import BackendError
from tierkv.testing.streams import Driven, SimEvent, SimStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from tierkv.abc import Event, Move, Stream

__all__ = ["POISON", "Counters", "SimDevice", "own"]

POISON: Final = 0xDD
"""What freed memory is filled with, and what fresh memory holds."""


@dataclass(slots=True)
class Counters:
    """What a device was asked to do.

    Attributes:
        submissions: Calls of ``copy``.
        moves: Moves in them.
        merged: Runs that were joined to their neighbour.
        stored_bytes: Bytes of copies on ``stores``.
        loaded_bytes: Bytes of copies on ``loads``.
        folded: Sections folded.
        allocations: Calls of ``allocate``, failed ones too.
        syncs: Calls that blocked a thread until an event was done.
        hazards: Pieces of memory that were given back while submitted work still touched them.
    """

    submissions: int = 0
    moves: int = 0
    merged: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    folded: int = 0
    allocations: int = 0
    syncs: int = 0
    hazards: int = 0


class SimDevice(Driven, Device):
    """See the module.

    Args:
        name: ``"sim:SEED"``; the seed decides the delays.
        delay: Longest delay before a piece of work, in seconds.
        capacity: Bytes of its memory.
        manual: Nothing runs until :meth:`step`, :meth:`drain` or a blocking wait drives it.

    Attributes:
        counters: What it was asked to do.
        compute: The stream of the model, that :meth:`current` returns in every thread.
        failed: What its work failed with, or None.

    Raises:
        BackendError: if the name has no seed.
    """

    kind: ClassVar[str] = "sim"

    def __init__(
        self,
        name: str = "sim:0",
        *,
        delay: float = 5e-4,
        capacity: int = 1 << 30,
        manual: bool = False,
    ) -> None:
        kind, _, seed = name.partition(":")
        if kind != self.kind or not seed:
            raise BackendError(name, "a simulated device is called 'sim:SEED', e.g. 'sim:0'")
        self.name = name
        self.manual = manual
        self.capacity = capacity
        self.counters = Counters()
        self.failed: Exception | None = None
        self.stores: Stream = SimStream(self, "stores", seed, delay)
        self.loads: Stream = SimStream(self, "loads", seed, delay)
        self.compute = SimStream(self, "compute", seed, delay)
        self._lock = threading.RLock()  # the collector may run `_forget` inside `allocate`
        self._used = 0
        self._failing: Callable[[int, int], bool] | None = None
        self._closed = False

    # ------------------------------------------------------------------ memory

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is in CPU memory: the caller's tensors are taken for the device's."""
        return tensor.device.type == "cpu"

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Fresh memory, full of :data:`POISON`; None if there is none, or made to fail."""
        with self._lock:
            number = self.counters.allocations
            self.counters.allocations += 1
            if self._failing is not None and self._failing(number, nbytes):
                return None
            if self._used + nbytes > self.capacity:
                return None
            self._used += nbytes
        found = map_tensor(nbytes)
        if found is None:
            self._forget(nbytes)
            return None
        tensor, memory = found
        tensor.fill_(POISON)
        # the mapping lives as long as any tensor over it
        weakref.finalize(memory, self._forget, nbytes).atexit = False
        return tensor

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self._used -= nbytes

    def available(self) -> int:
        """Bytes that are left."""
        return self.capacity - self._used

    def freed(self, memory: torch.Tensor) -> None:
        """Spoil the bytes; count a hazard if submitted work still touches them."""
        low = memory.data_ptr()
        high = low + memory.numel() * memory.element_size()
        if any(stream.touching(low, high) for stream in self._streams()):
            self.counters.hazards += 1
        memory.view(-1).fill_(POISON)

    @contextmanager
    def fail_allocations(self, when: Callable[[int, int], bool] | None = None) -> Iterator[None]:
        """Let allocations fail inside the block.

        Args:
            when: Called with the number of the allocation (from 0, since the device was made) and
                its bytes; whether it fails. None: all of them do.
        """
        self._failing = when or (lambda number, nbytes: True)
        try:
            yield
        finally:
            self._failing = None

    # ------------------------------------------------------------------ work

    def current(self) -> Stream:
        """The model's stream, :attr:`compute`."""
        return self.compute

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        """Submit copies; they read and write when they run, piece by piece.

        Raises:
            LayoutError: if the sides of a move do not fit; nothing is submitted then.
        """
        work = self.planned(moves)
        self.counters.submissions += 1
        self.counters.moves += len(moves)
        self.counters.merged += work.merged
        if stream is self.stores:
            self.counters.stored_bytes += work.nbytes
        elif stream is self.loads:
            self.counters.loaded_bytes += work.nbytes
        on = own(self, stream)
        touches = [span for move in moves for tensor in move for span in _span(tensor)]
        on.submit(partial(_carry_out, work, tuple(moves), on), touches)

    def planned(self, moves: Sequence[Move]) -> Plan:
        """How it does a batch."""
        return plan(moves)

    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Submit checksums; the result is full of :data:`POISON` until they ran."""
        import torch

        self.counters.folded += len(sections)
        out = torch.full((len(sections) * 16,), POISON, dtype=torch.uint8)
        numbers = out.view(torch.int64).view(-1, 2)
        kept = list(sections)

        def compute() -> None:
            with torch.inference_mode():
                numbers.copy_(fold_tensors(kept))

        touches = [span for section in kept for span in _span(section)]
        own(self, stream).submit(compute, touches)
        return numbers

    def pin(self, memory: memoryview) -> bool:
        """Pretend to register it."""
        return True

    def unpin(self, memory: memoryview) -> None:
        """Nothing to undo."""

    async def wait(self, event: Event) -> None:
        """Poll; in manual mode, run what the event waits for."""
        if self.manual and isinstance(event, SimEvent):
            await asyncio.sleep(0)  # as any wait, it lets others go on
            self.drive(event)
        await poll(event.query)

    def check(self) -> None:
        """Raise what the device's work failed with, if it did."""
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        """Run what is left, end the threads."""
        if not self._closed:
            self._closed = True
            for stream in self._streams():
                stream.end()

    def _streams(self) -> list[SimStream]:
        return [self.compute, own(self, self.stores), own(self, self.loads)]


def own(device: SimDevice, stream: Stream) -> SimStream:
    """The stream, if it is one of a simulated device.

    Raises:
        BackendError: if it is not.
    """
    if not isinstance(stream, SimStream):
        raise BackendError(device.name, f"{stream!r} is no stream of this device")
    return stream


def _carry_out(work: Plan, kept: tuple[Move, ...], stream: SimStream) -> None:
    """Copy now; ``kept`` is what the plan points into."""
    import torch

    with torch.inference_mode():
        for run in (*work.small, *work.bulk):
            stream.pause()
            target, source = run.tensors()
            target.copy_(source)
        for move in work.strided:
            stream.pause()
            copy_move(move)


def _span(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Addresses from the first to behind the last byte of a tensor; none if it is empty."""
    if not tensor.numel():
        return []
    low = tensor.data_ptr()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    last = sum(step * (size - 1) for step, size in pairs)
    return [(low, low + (last + 1) * tensor.element_size())]
