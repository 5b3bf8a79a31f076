"""Threads for aiofiles, and a way to await its operations that a cancellation cannot cut short.

An aiofiles operation is a ``run_in_executor``: cancelling it abandons a thread that goes on working
with somebody's buffer. Here an operation is given an executor of its own, a *strand*, whose work
can neither be cancelled nor lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import aiofiles.os

from tierkv.errors import ClosedError
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Pool", "Strand"]

_T = TypeVar("_T")


class Pool:
    """The threads of one backend, apart from the loop's shared ones; knows what is under way.

    They are daemons, unlike those of ``concurrent.futures``: a thread that hangs in a medium must
    not keep the process from ending.

    Args:
        threads: How many, at most; they start when there is work for them.
        name: Prefix of their names.

    Attributes:
        size: How many.
        closed: Whether it takes no more calls, and nobody waits for those under way.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.size = threads
        self.closed = False
        self._name = name
        self._threads = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        self._active = 0
        self._lock = threading.Lock()
        self._last: Callable[[], object] | None = None

    @property
    def crowded(self) -> bool:
        """Whether calls wait for a thread."""
        return self._active > self.size

    def submit(self, fn: Callable[..., _T], *args: Any) -> Future[_T]:
        """Run a call in a thread; the future cannot be cancelled.

        Raises:
            ClosedError: after :meth:`close`.
            RuntimeError: if the system gives no thread, not even one.
        """
        work: Future[_T] = Future()
        work.set_running_or_notify_cancel()
        with self._lock:
            if self.closed:
                raise ClosedError("the tier is closed")
            self._pending.add(work)
            self._active += 1
            number = self._threads
            more = number < min(self._active, self.size)
            self._threads += more
        if more:
            self._start(f"{self._name}_{number}", work)
        self._queue.put(functools.partial(self._run, work, fn, args))
        return work

    def _start(self, name: str, work: Future[Any]) -> None:
        thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._threads -= 1
                if self._threads:  # another one will take it up
                    return
                self._pending.discard(work)
                self._active -= 1
            raise

    def close(self, last: Callable[[], object]) -> None:
        """Take no more calls; whoever still waits for one gets ClosedError. Idempotent.

        A thread that hangs in the medium keeps what it holds until the medium lets it go.

        Args:
            last: Called when no thread runs any more, which may be at once.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
            given_up = list(self._pending)
            if self._active:
                self._last = last
        for work in given_up:
            work.set_exception(ClosedError("the tier was closed before the medium answered"))
        for _ in range(self._threads):
            self._queue.put(None)
        if self._last is None:
            last()

    def _run(self, work: Future[_T], fn: Callable[..., _T], args: tuple[Any, ...]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = fn(*args)
        except BaseException as caught:  # noqa: BLE001 - whoever waits gets it
            error = caught
        with self._lock:
            self._pending.discard(work)
            # before anybody learns of the result: whoever closes next finds this thread done
            self._active -= 1
            last = self._last if self.closed and not self._active else None
            given_up = self.closed
        if not given_up and error is None:
            work.set_result(result)
        elif not given_up:
            work.set_exception(error)
        elif last is not None:
            last()


class Strand(Executor):
    """Executor for aiofiles operations that are awaited one after the other."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._work: Future[Any] | None = None

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Run a call in the pool; see :meth:`Pool.submit`."""
        work = self._pool.submit(functools.partial(fn, *args, **kwargs))
        self._work = work
        return work

    async def call(
        self, fn: Callable[..., _T], *args: Any, stop: Callable[[], None] | None = None
    ) -> _T:
        """Run ``fn(*args)`` in a thread and wait for its end, come what may.

        Args:
            fn: What to run.
            *args: Its arguments.
            stop: Called when the wait is cancelled, to make it short.

        Raises:
            ClosedError: if the pool was closed while the thread hangs.

        Cancellation: re-raised once the thread is done.
        """
        run: Callable[..., Awaitable[_T]] = aiofiles.os.wrap(fn)
        try:
            return await run(*args, executor=self)
        except asyncio.CancelledError as error:
            if stop is not None:
                stop()
            await self._outlast(error)

    async def _outlast(self, cancelled: asyncio.CancelledError) -> NoReturn:
        work = self._work
        if work is None or work.done():
            raise cancelled
        done = Signal()
        work.add_done_callback(functools.partial(_wake, asyncio.get_running_loop(), done))
        await done.after(cancelled)


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()
        del call  # not kept alive while waiting for the next one


def _wake(loop: asyncio.AbstractEventLoop, done: Signal, _: Future[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone, and whoever waited with it
        loop.call_soon_threadsafe(done.set)
