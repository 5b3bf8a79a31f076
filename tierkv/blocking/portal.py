"""The engine on a loop in a thread of its own, and the way in for other threads.

anyio's blocking portal makes two trips to the loop per call (one to start the task, one for the
result) and leaves the work running when the waiting thread is interrupted. :class:`EngineLoop`
makes one trip, and an interrupted call is cancelled and has ended before the caller gets its
memory back.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from tierkv.errors import ClosedError, TierKVError
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tierkv.engine import CloseReport, Engine

__all__ = ["EngineLoop"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.blocking")
_NOT_OPEN = "the manager is not open: use it inside its 'with'"
_FORKED = "this process was forked after the manager was opened: open a manager of its own here"
_ABSORB_S = 5.0  # an interrupted call is at a cancellable await, or copies one slice
_MARGIN_S = 5.0


class _Call(Generic[_T]):
    """One call from a foreign thread: runs on the loop, while a lock holds the caller."""

    __slots__ = (
        *("_args", "_done", "_error", "_fn", "_gate", "_interrupted", "_result", "_task"),
        "context",
    )

    def __init__(self, fn: Callable[..., Awaitable[_T]], args: tuple[Any, ...]) -> None:
        self.context = contextvars.copy_context()
        self._fn = fn
        self._args = args
        self._done = False
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None
        self._interrupted = False
        self._gate = threading.Lock()  # a third of the cost of a concurrent Future
        self._gate.acquire()

    async def run(self) -> None:
        """Do the work. Whatever it raises goes to the caller.

        Not even a cancellation is raised here: it would take all other calls of the group along.
        """
        self._task = asyncio.current_task()
        if self._interrupted:
            self.end(None, ClosedError("interrupted before it began"))
            return
        try:
            result = await self._fn(*self._args)
        except asyncio.CancelledError:
            self.end(None, ClosedError("cancelled: the manager is closed, or was interrupted"))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.end(None, error)
        else:
            self.end(result, None)

    def end(self, result: _T | None, error: BaseException | None) -> None:
        """Let the caller go. Idempotent; in the loop's thread."""
        if not self._done:
            self._done = True
            self._result, self._error = result, error
            self._gate.release()

    def cancel(self) -> None:
        """Cancel the work, begun or not; on the loop."""
        self._interrupted = True
        if self._task is not None:
            self._task.cancel()

    def wait(self, within: float = -1) -> bool:
        """Hold this thread until the work has ended, for at most ``within`` seconds."""
        return self._gate.acquire(timeout=within)

    def result(self) -> _T:
        """What the work returned, or raise what it raised; after :meth:`wait`."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: no cycle, no tensors kept alive
        return self._result  # type: ignore[return-value]


class EngineLoop:
    """Runs an engine on a loop in a daemon thread and carries calls to it. Thread-safe.

    The thread refers to this object, never to the manager: a manager that is forgotten can be
    collected, and says so.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = engine.config.name
        self._pid = os.getpid()
        # guards only the flags and the hand-over; reentrant, because a finalizer may run inside
        self._guard = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Signal | None = None
        self._calls: asyncio.TaskGroup | None = None
        self._pending: set[_Call[Any]] = set()
        self._inbox: list[_Call[Any]] = []
        self._accepting = False
        self._stopping = False
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._report: CloseReport | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open() else "closed" if self._thread else "new"
        return f"<EngineLoop {self._name}: {state}, {len(self._pending)} calls>"

    @property
    def engine(self) -> Engine:
        """The engine; its methods belong to :meth:`call`.

        Raises:
            ClosedError: if it is not open.
        """
        if not self.is_open():
            raise self._closed()
        return self._engine

    def is_open(self) -> bool:
        """Whether calls are taken, in this process."""
        return self._accepting and self._pid == os.getpid()

    def _closed(self) -> ClosedError:
        return ClosedError(_FORKED if self._pid != os.getpid() else _NOT_OPEN)

    # ------------------------------------------------------------------ life

    def open(self) -> None:
        """Start the loop and the engine.

        Raises:
            ClosedError: if it was opened before.
            ConfigError: if a setting cannot be honoured.
            BackendError: if a tier cannot be used. No thread is left behind.
        """
        with self._guard:
            if self._thread is not None:
                raise ClosedError("a manager is opened once; make a new one")
            self._pid = os.getpid()
            # a daemon: a script that forgets close() must still end
            self._thread = threading.Thread(
                target=self._main, name=f"{self._name}-loop", daemon=True
            )
            self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # interrupted: nobody will close what is being opened
            self.stop_soon()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            self._thread.join()
            try:
                raise failure
            finally:
                del failure
        atexit.register(self._forgotten)

    def _main(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - raised by open(), or logged
            if self._ready.is_set():
                _log.exception("%s: the loop of the manager ended", self._name)
            self._failure = error
        finally:
            with self._guard:
                self._accepting, self._stopping = False, True
                left = list(self._pending)
            for call in left:
                call.end(None, ClosedError("the loop of the manager ended"))
            atexit.unregister(self._forgotten)
            self._ready.set()

    async def _serve(self) -> None:
        engine, stop = self._engine, Signal()
        with self._guard:
            self._loop, self._stop = asyncio.get_running_loop(), stop
            if self._stopping:
                return
        try:
            await engine.start()
        except BaseException:
            await engine.aclose()
            raise
        try:
            async with asyncio.TaskGroup() as calls:
                with self._guard:
                    self._calls = calls
                    self._accepting = not self._stopping
                self._ready.set()
                await stop.wait()
                self._report = await engine.aclose()  # calls under way may end well meanwhile
                for call in list(self._pending):
                    call.cancel()
        finally:
            await engine.aclose()  # for a loop that dies; else it was done above

    def close(self) -> CloseReport | None:
        """Close the engine and end the thread. Idempotent, from any number of threads.

        Bounded: after about ``close_timeout`` for each thing that hangs, the thread is given up.

        Returns:
            What was not written; None if it was never open, belongs to another process, or hangs.

        Raises:
            TierKVError: if called on the engine's own loop.
        """
        if self._thread is None or self._pid != os.getpid():
            return None
        self._refuse_inside()
        self.stop_soon()
        config = self._engine.config
        self._thread.join(float(config.close_timeout) * (len(config.tiers) + 3) + _MARGIN_S)
        if self._thread.is_alive():
            _log.error("%s: closing hangs; its thread is given up", self._name)
        return self._report

    def stop_soon(self) -> None:
        """Take no more calls and begin to close, without waiting."""
        with self._guard:
            self._accepting, self._stopping = False, True
            if self._loop is not None and self._stop is not None:
                # calls handed over before this are begun before it: none is lost
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._stop.set)

    def _forgotten(self) -> None:
        # the interpreter exits; worker threads are gone already, so nothing more can be written
        if self.is_open():
            self._accepting = False
            text = f"manager {self._name!r} was never closed: what was queued is not written"
            _log.warning("%s", text)
            warnings.warn(text, ResourceWarning, stacklevel=1)

    # ------------------------------------------------------------------ calls

    def call(self, fn: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run ``await fn(*args)`` on the loop, in the caller's context, and wait for the result.

        Interruption: a KeyboardInterrupt cancels the work, waits for its end (at most one slice
        of a copy; a second interrupt does not wait), and is raised again.

        Raises:
            ClosedError: if it is not open, or is closed meanwhile.
            TierKVError: if called on the engine's own loop, which would wait for itself.
        """
        self._refuse_inside()
        if self._pid != os.getpid():
            raise self._closed()
        call = _Call(fn, args)
        try:
            with self._guard:
                if not self._accepting or self._loop is None:
                    raise self._closed()
                self._pending.add(call)
                self._inbox.append(call)
                if len(self._inbox) == 1:  # the loop is woken once for all who come meanwhile
                    self._loop.call_soon_threadsafe(self._begin)
            call.wait()
        except BaseException:
            if call in self._pending:
                self._interrupt(call)
            raise
        finally:
            self._pending.discard(call)
        return call.result()

    def _begin(self) -> None:
        with self._guard:
            inbox, self._inbox = self._inbox, []
        assert self._calls is not None
        for call in inbox:
            self._calls.create_task(call.run(), context=call.context)

    def _interrupt(self, call: _Call[Any]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(call.cancel)
        if not call.wait(_ABSORB_S):
            _log.error("%s: an interrupted call does not end; its memory may change", self._name)

    def soon(self, fn: Callable[[], object]) -> None:
        """Run ``fn()`` on the loop soon, if it is open; takes no lock and never waits."""
        loop = self._loop
        if loop is not None and self.is_open():
            with contextlib.suppress(RuntimeError):  # the loop has ended: nothing is left to do
                loop.call_soon_threadsafe(fn)

    def is_inside(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return threading.current_thread() is self._thread

    def _refuse_inside(self) -> None:
        if self.is_inside():
            raise TierKVError(
                "this would wait for the engine's own loop, on that loop: await the engine's "
                "method instead"
            )
