"""Host memory that is registered with CUDA: which it is, and where its pieces end.

torch's own pinned allocator rounds each block up to a power of two (its issue 95823: 20.4 GiB asked
for became 32 GiB pinned); registering an arena costs exactly its size. Registering is slow, so the
engine does it chunk by chunk, and copies work meanwhile. A copy must not cross the border of two
registrations, though, even where they touch (CUDA calls it an invalid value): hence
:meth:`Pinned.cut`. A registration is the whole process's, whichever device made it, and so is the
list of them.
"""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tierkv.device.capture import Beside
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tierkv.device.plan import Run

__all__ = ["Pinned"]

_log = logging.getLogger(__name__)

_PORTABLE: Final = 1  # cudaHostRegisterPortable: registered for every device
_REGISTERED: Final = 712  # cudaErrorHostMemoryAlreadyRegistered


class _Registered:
    """What this process registered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users: dict[tuple[int, int], int] = {}  # devices by [low, high)
        self.spans: list[tuple[int, int]] = []  # sorted; replaced, never changed: to read it
        # takes no lock

    def add(self, span: tuple[int, int]) -> None:
        self.users[span] = self.users.get(span, 0) + 1
        self.spans = sorted(self.users)

    def drop(self, span: tuple[int, int]) -> bool:
        """Whether that was the last user."""
        self.users[span] -= 1
        if self.users[span]:
            return False
        del self.users[span]
        self.spans = sorted(self.users)
        return True


_registered: weakref.WeakKeyDictionary[Any, _Registered] = weakref.WeakKeyDictionary()


class Pinned:
    """Host memory that one device registered. Thread-safe.

    Args:
        cuda: ``torch.cuda``, or what stands in for it.
        index: Number of the device.
        memory: Where the device's tensors are.
    """

    def __init__(self, cuda: Any, index: int, memory: torch.device) -> None:
        self._cuda, self._index, self._memory = cuda, index, memory
        self._all = _registered.setdefault(cuda, _Registered())
        self._mine: set[tuple[int, int]] = set()
        self._warned = False

    def register(self, memory: memoryview) -> bool:
        """Register; False (and one warning) if CUDA refuses."""
        span = _span(memory)
        with self._all.lock:
            if span in self._mine:
                return True
            code = 0 if span in self._all.users else self._call("cudaHostRegister", span)
            if code == 0:
                self._mine.add(span)
                self._all.add(span)
                return True
        if code == _REGISTERED:  # by somebody else, who undoes it
            return True
        if not self._warned:
            self._warned = True
            _log.warning(
                "cuda:%d refuses to pin %d bytes of host memory (error %d): copies will be slower; "
                "look at `ulimit -l` and at the memory limit of the container",
                *(self._index, span[1] - span[0], code),
            )
        return False

    def unregister(self, memory: memoryview) -> None:
        """Undo :meth:`register`; what it did not register is left alone."""
        self._remove(_span(memory))

    def close(self) -> None:
        """Unregister everything."""
        for span in list(self._mine):
            self._remove(span)

    def _remove(self, span: tuple[int, int]) -> None:
        with self._all.lock:
            if span not in self._mine:
                return
            self._mine.discard(span)
            if self._all.drop(span):
                self._call("cudaHostUnregister", span)

    def _call(self, name: str, span: tuple[int, int]) -> int:
        """Error of a call of the runtime; -1 if the device failed before."""
        low, high = span
        more = (high - low, _PORTABLE) if name == "cudaHostRegister" else ()
        try:
            with Beside(), self._cuda.device(self._index):
                code = int(getattr(self._cuda.cudart(), name)(low, *more))
                if code:
                    self._swallow_error()
        except RuntimeError:
            return -1
        return code

    def _swallow_error(self) -> None:
        # the runtime remembers the error, and torch would raise it at some innocent call later
        import torch

        with suppress(RuntimeError):
            torch.zeros(1, device=self._memory)

    def cut(self, run: Run, host: int) -> Iterator[tuple[Run, bool]]:
        """Cut a copy where registrations begin and end.

        Args:
            run: The copy.
            host: Address of its host side (its target or its source).

        Yields:
            (piece of the copy, whether its host side is registered).
        """
        spans = self._all.spans
        at, end = host, host + run.nbytes
        index = max(bisect.bisect_right(spans, (at, 1 << 64)) - 1, 0)
        while at < end:
            while index < len(spans) and spans[index][1] <= at:
                index += 1
            low, high = spans[index] if index < len(spans) else (end, end)
            inside = low <= at
            stop = min(end, high if inside else low)
            skip = at - host
            yield (
                run._replace(target=run.target + skip, source=run.source + skip, nbytes=stop - at),
                inside,
            )
            at = stop


def _span(memory: memoryview) -> tuple[int, int]:
    address = over(memory, "uint8", (memory.nbytes,)).data_ptr()
    return address, address + memory.nbytes
