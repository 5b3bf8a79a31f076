"""Work that another thread asked the engine's loop to do, and how that thread hears of its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tierkv.errors import ClosedError, TierKVError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

__all__ = ["Call", "Pending"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.blocking")


class Call(Generic[_T]):
    """One call from a foreign thread: runs on the loop, while a lock holds the caller."""

    __slots__ = (
        *("_args", "_done", "_error", "_fn", "_gate", "_interrupted", "_result", "_task"),
        *("__weakref__", "context"),
    )

    def __init__(self, fn: Callable[..., Awaitable[_T]], args: tuple[Any, ...]) -> None:
        self.context = contextvars.copy_context()
        self._fn: Callable[..., Awaitable[_T]] | None = fn
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
        if self._interrupted or self._fn is None:
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
        if self._done:
            return
        self._result, self._error = result, error
        # who keeps the call to ask for its result later keeps no tensors of its arguments alive
        self._fn, self._args, self._task = None, (), None
        self._done = True  # last: other threads read it without a lock
        self._gate.release()

    def abort(self) -> None:
        """Cancel the work, begun or not; on the loop."""
        self._interrupted = True
        if self._task is not None:
            self._task.cancel()

    def hold(self, within: float = -1) -> bool:
        """Hold this thread until the work has ended, for at most ``within`` seconds."""
        if self._gate.acquire(timeout=within):
            self._gate.release()  # for others that wait for the same work
        return self._done

    def take(self) -> _T:
        """What the work returned, or raise what it raised, once; after :meth:`hold`."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: no cycle, no tensors kept alive
        return self._result  # type: ignore[return-value]


class Pending(Call[_T]):
    """Work under way on the engine's loop, as :meth:`CacheManager.submit` started it.

    Every method may be called in any thread, any number of times.
    """

    __slots__ = ("_loop", "_told", "_trace")

    def __init__(
        self,
        fn: Callable[..., Awaitable[_T]],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        told: Sequence[Callable[[Pending[_T]], object]],
    ) -> None:
        super().__init__(fn, args)
        self._loop = loop
        self._told = told
        self._trace: TracebackType | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<Pending: {state}>"

    def done(self) -> bool:
        """Whether the work has ended, well or not. Takes no lock."""
        return self._done

    def wait(self, within: float | None = None) -> bool:
        """Wait until the work has ended, for at most ``within`` seconds; whether it has.

        Interruption: a KeyboardInterrupt ends the wait and leaves the work alone.

        Raises:
            TierKVError: if called on the engine's own loop before the end, which would never come.
        """
        if self._done:
            return True
        if _runs_here(self._loop):
            raise TierKVError("this would wait for the engine's own loop, on that loop")
        bounded = -1.0 if within is None else min(max(within, 0.0), threading.TIMEOUT_MAX)
        return self.hold(bounded)

    def result(self) -> _T:
        """What the work returned.

        Raises:
            ClosedError: if it has not ended, was cancelled, or the manager was closed meanwhile.
            BaseException: whatever it raised, at every call.
        """
        if not self._done:
            raise ClosedError("this has not ended yet: wait() first, or give submit() a 'done'")
        if self._error is not None:
            # with the frames of the work, without those of whoever asked before
            raise self._error.with_traceback(self._trace)
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """Cancel the work soon, begun or not; never waits. What has ended stays as it is.

        The work ends as any cancelled call does (a copy finishes its slice); only then is it
        :meth:`done`, with :class:`~tierkv.errors.ClosedError` unless it ended otherwise.
        """
        if self._done:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the work with it
            self._loop.call_soon_threadsafe(self.abort)

    def end(self, result: _T | None, error: BaseException | None) -> None:
        """Let everyone know, once; in the loop's thread."""
        if self._done:
            return
        if error is not None:
            self._trace = error.__traceback__
        super().end(result, error)
        told, self._told = self._told, ()
        for fn in told:
            try:
                fn(self)
            except Exception:  # noqa: BLE001 - the loop's other work must not hear of it
                _log.exception("who was told that a call has ended failed")


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:  # none runs in this thread
        return False
