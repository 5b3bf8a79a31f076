"""Streams and events of the simulated accelerator, and their threads."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.abc import Event, Stream
from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.testing.accelerator import SimDevice

__all__ = ["Driven", "SimEvent", "SimStream"]

_PAUSES: Final = 0.1  # share of the pieces before which a copy stops for a moment


class _Work(NamedTuple):
    """One entry of a stream: ``run``, once ``after`` is done."""

    run: Callable[[], object] | None
    after: Event | None = None
    touches: Sequence[tuple[int, int]] = ()  # addresses [low, high) that it reads or writes


class SimEvent(Event):
    """An event of a :class:`SimStream`."""

    __slots__ = ("_done", "_stream")

    def __init__(self, stream: SimStream) -> None:
        self._stream = stream
        self._done = threading.Event()

    def query(self) -> bool:
        """Whether everything before it ran.

        Raises:
            Exception: what the work of this device failed with, if it did.
        """
        if self._done.is_set():
            self._stream.device.check()
            return True
        return False

    def synchronize(self) -> None:
        """Block until everything before it ran; in manual mode, run it.

        Raises:
            Exception: what the work of this device failed with, if it did.
        """
        device = self._stream.device
        device.counters.syncs += 1
        if device.manual:
            device.drive(self)
        self.block()
        device.check()

    def block(self) -> None:
        """Block until it is fired; for threads of streams, where nobody is told of failures."""
        self._done.wait()

    def fire(self) -> None:
        """Be done."""
        self._done.set()


class SimStream(Stream):
    """Work in order, on a thread of its own (or step by step, in manual mode)."""

    def __init__(self, device: SimDevice, name: str, seed: str, delay: float) -> None:
        self.device = device
        self.name = name
        self._rng = random.Random(f"{seed}/{name}")
        self._delay = delay
        self._queue: deque[_Work] = deque()
        self._running: _Work | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ending = False

    def __repr__(self) -> str:
        return f"<SimStream {self.name}: {len(self._queue)} waiting>"

    def record(self) -> Event:
        """Return an event behind everything submitted so far."""
        event = SimEvent(self)
        self.submit(event.fire)
        return event

    def wait(self, event: Event) -> None:
        """Let everything submitted from now on wait for ``event``."""
        self._add(_Work(None, after=event))

    def submit(self, run: Callable[[], object], touches: Sequence[tuple[int, int]] = ()) -> None:
        """Let ``run()`` be part of the stream's work, as a kernel of the model would be."""
        self._add(_Work(run, touches=touches))

    def step(self) -> bool:
        """Manual mode: run the next piece of work; False if there is none, or it has to wait."""
        with self._changed:
            if not self._queue:
                return False
            after = self._queue[0].after
            if after is not None and not after.query():
                return False
            work = self._running = self._queue.popleft()
        self._run(work)
        return True

    def touching(self, low: int, high: int) -> bool:
        """Whether work that has not ended touches addresses ``[low, high)``."""
        with self._changed:
            work = (*self._queue, *([self._running] if self._running else ()))
        return any(a < high and low < b for item in work for a, b in item.touches)

    def pause(self) -> None:
        """Stop for a moment, now and then: copies are not done in one go."""
        if self._delay and self._rng.random() < _PAUSES:
            time.sleep(self._rng.random() * self._delay)

    def end(self) -> None:
        """Run what is left, then end the thread."""
        if self.device.manual:
            self.device.drain()
        with self._changed:
            self._ending = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _add(self, work: _Work) -> None:
        with self._changed:
            if self._ending:
                raise BackendError(self.device.name, f"stream {self.name} was closed")
            self._queue.append(work)
            self._changed.notify()
            if self._thread is None and not self.device.manual:
                name = f"{self.device.name}-{self.name}"
                self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._ending:
                    self._changed.wait()
                if not self._queue:
                    return
                work = self._running = self._queue.popleft()
            if self._delay and work.run is not None:
                time.sleep(self._rng.random() * self._delay)
            self._run(work)
            del work  # an idle thread must not keep the tensors of its last copy

    def _run(self, work: _Work) -> None:
        try:
            if isinstance(work.after, SimEvent):
                work.after.block()
            elif work.after is not None:
                work.after.synchronize()
            if work.run is not None:
                work.run()
        except Exception as error:  # noqa: BLE001 - as a real device: the next query tells
            self.device.failed = error
        finally:
            with self._changed:
                self._running = None


class Driven(ABC):
    """Manual mode of a simulated device: its work runs when it is told to."""

    name: str

    def step(self) -> bool:
        """Run the next piece of work of one stream; False if none can go on."""
        return any(stream.step() for stream in self._streams())

    def drain(self) -> None:
        """Run everything that can run."""
        while self.step():
            pass

    def drive(self, event: SimEvent) -> None:
        """Run work until ``event`` is done.

        Raises:
            BackendError: if it cannot be: every stream waits for something.
        """
        while not event.query():
            if not self.step():
                raise BackendError(self.name, "the event can never be done: all streams wait")

    @abstractmethod
    def _streams(self) -> list[SimStream]: ...
