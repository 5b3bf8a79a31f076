"""Accelerators: their memory, and copies that run on their streams while Python goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Device", "Event", "Move", "Stream"]


class Move(NamedTuple):
    """One copy: ``target`` gets the bits of ``source``.

    Both have the same shape and element size; any strides. One side may be in host memory.
    """

    target: torch.Tensor
    source: torch.Tensor


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def query(self) -> bool:
        """Whether everything before it is done. Never blocks, never raises for pending work.

        Raises:
            BackendError: if the device failed before that, or the event could not be recorded:
                nobody knows what was done, and the device touches nothing any more.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread, without the GIL, until everything before it is done.

        Raises:
            BackendError: as :meth:`query`.
        """


class Stream(ABC):
    """Work that runs in order on a device. Callable from any thread."""

    @abstractmethod
    def record(self) -> Event:
        """Return an event behind everything submitted so far.

        A device that failed raises nothing here: the event tells it to whoever asks.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let everything submitted from now on wait for ``event``; blocks nobody.

        Raises:
            BackendError: if the device or the event failed.
        """


class Device(ABC):
    """One accelerator (or what stands in for it). One plug-in, made with its name.

    *Order.* Work on one stream runs in order; between streams only events order. A copy reads its
    source when it runs, not when it is submitted: neither side may be freed, reused or written
    before an event behind the copy is done.

    *Threads.* Every call may come from any thread and returns at once, except
    :meth:`Event.synchronize`. Batches of several threads on one stream do not mix.

    *Faults.* A device that broke (all of CUDA does with one illegal access of any kernel) costs
    loads and stores their result, and nobody a crash: every call is then a BackendError, or None or
    False where that means "no"; ``record``, ``current`` and ``close`` never raise.

    Args:
        name: As in a tier's ``device``, e.g. ``"cuda:0"``, ``"cpu"``.

    Raises:
        BackendError: if there is no such device here (then it says what there is).
    """

    kind: ClassVar[str]
    """What stands before the colon of its name."""

    name: str
    stores: Stream
    """Device to host, and gathers out of the caller's memory."""
    loads: Stream
    """Host to device, and scatters into the caller's memory."""

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in this device's memory."""

    @abstractmethod
    def current(self) -> Stream:
        """The stream on which the calling thread's own work runs (the model's), for use now."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Fresh device memory, uint8 ``[nbytes]``, aligned to 4 KiB; None if there is none."""

    def freed(self, memory: torch.Tensor) -> None:  # noqa: B027 - for devices that check it
        """Hear that a pool may give this piece of :meth:`allocate`'s memory to others from now on.

        Pools call it the moment they take memory back: once the event that protected it is done,
        or at once if none was named. A device that checks its users spoils the bytes here.
        """

    @abstractmethod
    def available(self) -> int:
        """Bytes that :meth:`allocate` could give now.

        Raises:
            BackendError: if the device failed.
        """

    @abstractmethod
    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        """Submit one batch of copies; neighbours are merged, small pieces gathered.

        Bits are kept (NaN payloads included). The tensors are kept alive until the copies ran.
        Moves of one batch must not depend on each other.

        Raises:
            LayoutError: if the sides of a move differ in shape or element size; nothing of the
                batch is then submitted.
            BackendError: if the device failed, or lacks memory; some of the batch may be under way.
        """

    @abstractmethod
    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Submit the checksums of sections (contiguous uint8, a multiple of 64 bytes each).

        Returns:
            Host tensor, int64 ``[len(sections), 2]``, valid once an event behind it is done: the
            numbers of :func:`tierkv.device.fold`.

        Raises:
            BackendError: as :meth:`copy`.
        """

    @abstractmethod
    def pin(self, memory: memoryview) -> bool:
        """Register host memory for fast copies; blocks for long, so use a thread and chunks.

        False if the device refuses (copies then work all the same, only slower).
        """

    @abstractmethod
    def unpin(self, memory: memoryview) -> None:
        """Undo :meth:`pin`, with exactly the same memory. Idempotent."""

    @abstractmethod
    async def wait(self, event: Event) -> None:
        """Wait for an event without blocking the loop (polling with back-off, or a thread).

        Raises:
            BackendError: as :meth:`Event.query`.

        Cancellation: ends the wait, not the work: whoever owns the memory still has to wait.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for all work of the engine's streams and let them go. Idempotent, never raises."""
