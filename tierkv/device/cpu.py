"""The stand-in for an accelerator on a machine without one: the same seam, done at once."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import Device, Event, Stream
from tierkv.device.bits import check_move, copy_move
from tierkv.device.fold import fold_tensors
from tierkv.device.mapped import available_memory, map_tensor
from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import Move

__all__ = ["CpuDevice"]


class _Done(Event):
    """The event of a stream whose work is done when it is submitted."""

    __slots__ = ()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _AtOnce(Stream):
    """A stream without a queue. It waits for events of other devices by blocking."""

    __slots__ = ()

    def record(self) -> Event:
        return _Done()

    def wait(self, event: Event) -> None:
        if not event.query():
            event.synchronize()


class CpuDevice(Device):
    """CPU memory as a device: every copy runs in the call that submits it, without the GIL.

    It owns every tensor in CPU memory. Large batches take as long as they take: whoever must not
    block for that long submits them from a worker thread.

    Args:
        name: ``"cpu"``.

    Raises:
        BackendError: for any other name.
    """

    kind: ClassVar[str] = "cpu"

    def __init__(self, name: str = "cpu") -> None:
        if name != "cpu":
            raise BackendError(name, "no such device: CPU memory is one device, called 'cpu'")
        self.name = name
        self.stores: Stream = _AtOnce()
        self.loads: Stream = _AtOnce()
        self._current: Stream = _AtOnce()
        self._lock = threading.RLock()  # the collector may run `_forget` inside `allocate`
        self._room: int | None = None  # as the kernel said last, less what was given since

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is in CPU memory."""
        return tensor.device.type == "cpu"

    def current(self) -> Stream:
        """A stream whose work is always done: torch's CPU calls return when they are."""
        return self._current

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Fresh page-aligned memory; None if the machine has not as much left.

        It goes by what :meth:`available` found last: a question to the kernel is a file to read,
        which has no place on a loop.
        """
        with self._lock:
            if self._room is None:
                self.available()
            if nbytes > (self._room or 0):
                return None
            found = map_tensor(nbytes)
            if found is None:
                return None
            self._forget(-nbytes)
        tensor, memory = found
        # the mapping lives as long as any tensor over it
        weakref.finalize(memory, self._forget, nbytes).atexit = False
        return tensor

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self._room = (self._room or 0) + nbytes

    def available(self) -> int:
        """Bytes that the kernel thinks it could give; reads a file of its."""
        with self._lock:
            self._room = available_memory()
            return self._room

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        """Copy now.

        Raises:
            LayoutError: if the sides of a move do not fit; nothing is copied then.
        """
        import torch

        for move in moves:
            check_move(move)
        with torch.inference_mode():
            for move in moves:
                copy_move(move)

    def folds(self, sections: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Compute now; see :meth:`tierkv.abc.Device.folds`."""
        return fold_tensors(sections)

    def pin(self, memory: memoryview) -> bool:
        """Nothing to register: the CPU needs no pinned memory."""
        return False

    def unpin(self, memory: memoryview) -> None:
        """Nothing to undo."""

    async def wait(self, event: Event) -> None:
        """Return at once: everything is done."""

    def close(self) -> None:
        """Nothing to end."""
