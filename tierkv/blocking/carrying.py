"""The way in to a loop in another thread.

anyio's blocking portal makes two trips to the loop per call (one to start the task, one for the
result) and leaves the work running when the waiting thread is interrupted. :class:`CallCarrier`
makes one trip, and an interrupted call is cancelled and has ended before the caller gets its
memory back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from tierkv.blocking.calls import Call, Pending
from tierkv.errors import ClosedError, TierKVError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

__all__ = ["CallCarrier"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.blocking")
_NOT_OPEN = "the manager is not open: use it inside its 'with'"
_FORKED = "this process was forked after the manager was opened: open a manager of its own here"
_ABSORB_S = 5.0  # an interrupted call is at a cancellable await, or copies one slice


class CallCarrier:
    """Carries calls of any thread to one loop; whoever runs the loop derives from it.

    Args:
        name: Of the engine, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        # guards only the flags and the hand-over; reentrant, because a finalizer may run inside
        self._guard = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: asyncio.TaskGroup | None = None
        self._pending: set[Call[Any]] = set()
        self._inbox: list[Call[Any]] = []
        self._accepting = False
        self._moved = ""  # where the engine is now, in a sentence

    def is_open(self) -> bool:
        """Whether calls are taken, in this process."""
        return self._accepting and self._pid == os.getpid()

    def _closed(self) -> ClosedError:
        return ClosedError(self._moved or (_FORKED if self._pid != os.getpid() else _NOT_OPEN))

    def call(self, fn: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run ``await fn(*args)`` on the loop, in the caller's context, and wait for the result.

        Interruption: a KeyboardInterrupt cancels the work, waits for its end (at most one slice
        of a copy; a second interrupt does not wait), and is raised again.

        Raises:
            ClosedError: if it is not open, or is closed meanwhile.
            TierKVError: if called on the engine's own loop, which would wait for itself.
        """
        self.refuse_inside()
        if self._pid != os.getpid():
            raise self._closed()
        call = Call(fn, args)
        try:
            self._post(call)
            call.hold()
        except BaseException:
            if call in self._pending:
                self._interrupt(call)
            raise
        finally:
            self._pending.discard(call)
        return call.take()

    def submit(
        self,
        fn: Callable[..., Awaitable[_T]],
        *args: Any,
        done: Callable[[Pending[_T]], object] | None = None,
    ) -> Pending[_T]:
        """Start ``await fn(*args)`` on the loop, in the caller's context, and return at once.

        Takes one short lock and waits for nothing else; any thread may call it, the loop's own
        included. Work that is submitted in an order begins in that order.

        Raises:
            ClosedError: if it is not open; ``done`` is not called then.
        """
        loop = self._loop
        if loop is None or self._pid != os.getpid():
            raise self._closed()
        told = [self._pending.discard] if done is None else [self._pending.discard, done]
        pending = Pending(fn, args, loop, told)
        try:
            self._post(pending)
        except BaseException:  # interrupted half-way: nobody has it, so nobody is told of it
            if pending in self._pending:
                self._drop(pending)
            raise
        return pending

    def _post(self, call: Call[Any]) -> None:
        with self._guard:
            if not self._accepting or self._loop is None:
                raise self._closed()
            self._pending.add(call)
            self._inbox.append(call)
            if len(self._inbox) == 1:  # the loop is woken once for all who come meanwhile
                self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        with self._guard:
            inbox, self._inbox = self._inbox, []
        assert self._calls is not None
        for call in inbox:
            self._calls.create_task(call.run(), context=call.context)

    def _drop(self, call: Call[Any]) -> None:
        def drop() -> None:
            self._begin()  # the interrupt may have come before the loop was woken for its inbox
            call.abort()

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
            self._loop.call_soon_threadsafe(drop)

    def _interrupt(self, call: Call[Any]) -> None:
        self._drop(call)
        if not call.hold(_ABSORB_S):
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

    def refuse_inside(self) -> None:
        """Refuse a call that waits for the loop, on that loop.

        Raises:
            TierKVError: if the calling thread is the loop's own.
        """
        if self.is_inside():
            raise TierKVError(
                "this would wait for the engine's own loop, on that loop: await the engine's "
                "method instead"
            )
