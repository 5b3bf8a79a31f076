"""CUDA streams and events, as the seam has them.

After a fault (an illegal access of any kernel of the process, say) every call of CUDA fails. The
engine must come through that with misses. So nothing here raises what is not expected: an event
that could not be recorded says so when it is asked, and everything else is a BackendError.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tierkv.abc import Event, Stream
from tierkv.device.capture import Beside
from tierkv.device.polling import Poller
from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["CudaEvent", "CudaStream", "Events"]

_POOLED: Final = 1024  # events that are kept for reuse


class Events:
    """The events of one device, used again and again. Thread-safe.

    Args:
        name: Of the device.
        make: Makes a ``torch.cuda.Event``.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._make = make
        self._pool: deque[Any] = deque(maxlen=_POOLED)

    def take(self) -> Any:
        """An event that nobody else has."""
        try:
            return self._pool.popleft()
        except IndexError:
            return self._make()

    def give(self, raw: Any) -> None:
        """Take one back."""
        self._pool.append(raw)


class CudaEvent(Event):
    """An event of a :class:`CudaStream`.

    Streams run in order, so that a later event of the stream that is done tells for this one.

    Args:
        stream: Its stream.
        raw: The event of torch; None if it could not be recorded.
        number: Counted by the stream, from 1.
        failure: Why it could not be recorded.
    """

    __slots__ = ("_failure", "_raw", "number", "stream")

    def __init__(self, stream: CudaStream, raw: Any, number: int, failure: str = "") -> None:
        self.stream = stream
        self.number = number
        self._raw = raw
        self._failure = failure

    @property
    def raw(self) -> Any:
        """The event of torch.

        Raises:
            BackendError: if it could not be recorded.
        """
        if self._raw is None:
            raise BackendError(self.stream.name, self._failure)
        return self._raw

    def query(self) -> bool:
        """Whether everything before it is done.

        Raises:
            BackendError: if the device failed: nobody knows then what was done.
        """
        raw = self.raw
        if self.number <= self.stream.done:
            return True
        try:
            with Beside():
                done = bool(raw.query())
        except RuntimeError as error:
            raise BackendError(self.stream.name, _failed(error)) from error
        if done:
            self.stream.reached(self.number)
        return done

    def synchronize(self) -> None:
        """Block, without the GIL, until everything before it is done.

        Raises:
            BackendError: if the device failed.
        """
        raw = self.raw
        if self.number <= self.stream.done:
            return
        try:
            with Beside():
                raw.synchronize()
        except RuntimeError as error:
            raise BackendError(self.stream.name, _failed(error)) from error
        self.stream.reached(self.number)

    def __del__(self) -> None:
        # A wait that was submitted keeps the state that it was given: the event can be recorded
        # again even before it is done, once nobody can ask for this one any more.
        if self._raw is not None:
            self.stream.events.give(self._raw)


class CudaStream(Stream):
    """A CUDA stream of torch.

    Args:
        raw: The ``torch.cuda.Stream``.
        events: Of its device.
        progress: Called when an event was found done: what it protected can be let go.
        refuses: Why it can take no work and no events now, if so.

    Attributes:
        raw: The stream of torch.
        events: See above.
        done: Number of the last event that is known to be done.
        turn: Whoever submits work that passes through scratch memory holds it: such work must not
            mix with another thread's.
        scratch: Scratch memory on the device, once it was needed. As the stream's work runs in
            order, so does the use of it.
    """

    def __init__(
        self,
        raw: Any,
        events: Events,
        progress: Callable[[], None] | None = None,
        refuses: str = "",
    ) -> None:
        self.raw = raw
        self.events = events
        self.done = 0
        self.turn = threading.Lock()
        self.scratch: torch.Tensor | None = None
        self._progress = progress
        self._refuses = refuses
        self._lock = threading.Lock()
        self._number = 0
        self._pollers: dict[int, Poller] = {}

    def __repr__(self) -> str:
        return f"<CudaStream {self.raw!r}: {self._number - self.done} events pending>"

    @property
    def name(self) -> str:
        """Name of the device."""
        return self.events.name

    def check(self) -> None:
        """Raise BackendError if it can take no work."""
        if self._refuses:
            raise BackendError(self.name, self._refuses)

    def record(self) -> CudaEvent:
        """Return an event behind everything submitted so far; it tells if that was impossible."""
        if self._refuses:
            return CudaEvent(self, None, 0, self._refuses)
        with self._lock:  # numbers in the order of the stream
            try:
                raw = self.events.take()
                with Beside():
                    raw.record(self.raw)
            except RuntimeError as error:
                return CudaEvent(self, None, 0, _failed(error))
            self._number += 1
            return CudaEvent(self, raw, self._number)

    def wait(self, event: Event) -> None:
        """Let everything submitted from now on wait for ``event``.

        For an event of another kind of device this call blocks: they share no queue.

        Raises:
            BackendError: if the device failed, or the event could not be recorded.
        """
        if not isinstance(event, CudaEvent):
            event.synchronize()
        elif not event.query():
            try:
                with Beside():
                    self.raw.wait_event(event.raw)
            except RuntimeError as error:
                raise BackendError(self.name, _failed(error)) from error

    def reached(self, number: int) -> None:
        """The event of this number is done, and with it all before."""
        # no lock: two threads may leave the smaller number here, and then somebody asks once more
        self.done = max(self.done, number)
        if self._progress is not None:
            self._progress()

    async def until(self, event: CudaEvent) -> None:
        """Wait for one of its events; see :class:`~tierkv.device.polling.Poller`."""
        if event.query():
            return
        loop = asyncio.get_running_loop()
        poller = self._pollers.get(id(loop))
        if poller is None:
            for key, other in list(self._pollers.items()):
                if other.loop.is_closed():  # it ended while somebody waited
                    self._pollers.pop(key, None)
            poller = self._pollers[id(loop)] = Poller(loop)
        try:
            await poller.wait(event.number, event.query)
        finally:
            if poller.idle:  # loops come and go
                self._pollers.pop(id(loop), None)


def _failed(error: Exception) -> str:
    return f"the device failed: {error}"
