"""The only door to threads and tasks: the engine's runner, its jobs, and worker threads.

Two facts of asyncio shape this module. A thread goes on after the task that awaits it was
cancelled, and an anyio shield does not stop ``task.cancel()``. So work that must not be cut in
half belongs to the engine's own runner task (:meth:`Workers.spawn`); callers only wait for it and
may be cancelled at any await. And :meth:`Workers.run`, which lets a thread touch the caller's
memory, returns only when the thread is done: it absorbs cancellation and re-raises it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from tierkv.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

__all__ = ["Job", "Signal", "Workers"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.workers")
_LONG_THREADS = 64
_BACKOFF_S = (0.01, 0.1, 1.0, 5.0)


class Signal:
    """A one-way switch that many tasks can wait for; a cancelled waiter harms nobody."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._set

    def set(self) -> None:
        """Wake every waiter, now and later. Idempotent; call on the loop."""
        self._set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        """Return once the switch is set."""
        if self._set:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


class Job(Generic[_T]):
    """Engine-owned work: goes on whoever waits for it, or stops waiting."""

    __slots__ = ("_done", "_error", "_result", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._done = Signal()
        self._result: _T | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "running"
        return f"<Job {self.name}: {state}>"

    def done(self) -> bool:
        """Whether the work ended, well or not."""
        return self._done.is_set()

    async def wait(self) -> _T:
        """Wait for the result. Cancelling the waiter leaves the job alone.

        Raises:
            BaseException: whatever the job raised.
        """
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _end(self, result: _T | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._done.set()


class Workers:
    """Runner task, supervised background loops, and worker threads of one engine.

    Attributes:
        tasks_spawned: Jobs started so far.
        thread_hops: Calls handed to a worker thread so far.
    """

    def __init__(
        self,
        *,
        threads: int = 4,
        name: str = "tierkv",
        on_restart: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.tasks_spawned = 0
        self.thread_hops = 0
        self._threads = threads
        self._on_restart = on_restart
        self._io: ThreadPoolExecutor | None = None
        self._long: ThreadPoolExecutor | None = None
        self._runner: asyncio.Task[None] | None = None
        self._group: TaskGroup | None = None
        self._stop: Signal | None = None
        self._stopped = False
        self._abandoned = False
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        state = "closed" if self._stopped else "running" if self._group else "new"
        return f"<Workers {self.name}: {state}, {self.tasks_spawned} jobs, {self.thread_hops} hops>"

    async def start(self) -> None:
        """Start the runner task on the running loop.

        Raises:
            ClosedError: if it was started before.
        """
        if self._runner is not None:
            raise ClosedError("workers cannot be started twice")
        self._io = ThreadPoolExecutor(self._threads, f"{self.name}-io")
        self._stop = Signal()
        ready = Signal()
        # The single create_task of the project: the runner outlives every caller.
        self._runner = asyncio.get_running_loop().create_task(
            self._run(ready), name=f"{self.name}-runner"
        )
        await ready.wait()

    async def _run(self, ready: Signal) -> None:
        assert self._stop is not None
        async with anyio.create_task_group() as group:
            self._group = group
            ready.set()
            await self._stop.wait()
            self._group = None
            group.cancel_scope.cancel()

    async def aclose(self, grace: float = 10.0) -> None:
        """Cancel what still runs, end the runner and the idle threads. Idempotent, bounded.

        A thread that hangs in the medium is given up after ``grace`` seconds: whoever waits for
        it gets :class:`~tierkv.errors.ClosedError`, and the memory it may touch is never reused.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._stop is not None and self._runner is not None:
            self._stop.set()
            if not await self._runner_ended(grace):
                _log.error("%s: worker threads hang and are given up", self.name)
                self._abandoned = True
                for waiter in list(self._waiting):
                    _finish(waiter)
                await self._runner_ended(grace)
        for pool in (self._io, self._long):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    async def _runner_ended(self, within: float) -> bool:
        assert self._runner is not None
        ended = Signal()
        timer = asyncio.get_running_loop().call_later(within, ended.set)
        self._runner.add_done_callback(lambda _: ended.set())
        await ended.wait()
        timer.cancel()
        return self._runner.done()

    # ------------------------------------------------------------------ jobs

    def spawn(
        self, fn: Callable[..., Awaitable[_T]], *args: object, name: str | None = None
    ) -> Job[_T]:
        """Run ``await fn(*args)`` as engine-owned work.

        Raises:
            ClosedError: if the engine was closed.
        """
        if self._group is None:
            raise ClosedError("the engine is closed")
        job: Job[_T] = Job(name or str(getattr(fn, "__qualname__", "job")))
        self.tasks_spawned += 1
        self._group.start_soon(self._guard, job, fn, args, name=job.name)
        return job

    async def _guard(
        self, job: Job[_T], fn: Callable[..., Awaitable[_T]], args: tuple[object, ...]
    ) -> None:
        try:
            result = await fn(*args)
        except asyncio.CancelledError:
            job._end(None, ClosedError("the engine was closed while this was under way"))
            raise
        except BaseException as error:  # noqa: BLE001 - the waiter gets it, the runner lives on
            job._end(None, error)
            if not isinstance(error, Exception):
                _log.exception("job %s ended by %r", job.name, error)
        else:
            job._end(result, None)

    def supervise(self, name: str, loop_fn: Callable[[], Awaitable[None]]) -> Job[None]:
        """Run a background loop for the engine's life; restart it, with back-off, when it fails."""
        return self.spawn(self._supervised, name, loop_fn, name=name)

    async def _supervised(self, name: str, loop_fn: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            try:
                await loop_fn()
            except Exception:  # noqa: BLE001 - a broken loop must come back, whatever broke it
                _log.exception("background worker %s failed and is restarted", name)
                if self._on_restart is not None:
                    self._on_restart(name)
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            else:
                return

    # ------------------------------------------------------------------ threads

    async def run(self, fn: Callable[..., _T], /, *args: object) -> _T:
        """Run ``fn(*args)`` in a worker thread and wait for its end, come what may.

        If the caller is cancelled (natively or by a scope) before the thread took the call up, it
        is never run; else the cancellation is re-raised once the thread is done.

        Raises:
            ClosedError: if the engine was closed.
        """
        if self._io is None or self._stopped:
            raise ClosedError("the engine is closed")
        self.thread_hops += 1
        return await self._absorb(self._io, fn, args)

    async def run_long(self, fn: Callable[..., _T], /, *args: object) -> _T:
        """Like :meth:`run`, in a pool of its own for calls of seconds (a model's forward)."""
        if self._stopped:
            raise ClosedError("the engine is closed")
        if self._long is None:
            self._long = ThreadPoolExecutor(_LONG_THREADS, f"{self.name}-long")
        return await self._absorb(self._long, fn, args)

    async def _absorb(
        self, pool: ThreadPoolExecutor, fn: Callable[..., _T], args: tuple[object, ...]
    ) -> _T:
        loop = asyncio.get_running_loop()
        try:
            work: ThreadFuture[_T] = pool.submit(contextvars.copy_context().run, fn, *args)
        except RuntimeError as error:  # the pool was shut down
            raise ClosedError("the engine is closed") from error
        cancelled: asyncio.CancelledError | None = None
        while not work.done() and not self._abandoned:
            waiter = loop.create_future()
            work.add_done_callback(functools.partial(_wake, loop, waiter))
            self._waiting.add(waiter)
            try:
                await waiter
            except asyncio.CancelledError as error:
                if work.cancel():
                    raise
                cancelled = error
            finally:
                self._waiting.discard(waiter)
        if cancelled is not None:
            if work.done() and not work.cancelled():
                work.exception()
            raise cancelled
        if work.cancelled() or not work.done():
            raise ClosedError("the engine was closed before a worker thread was done with this")
        return work.result()


def _wake(
    loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], _: ThreadFuture[_T]
) -> None:
    # the loop may be gone by now: then nobody waits any more
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_finish, waiter)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
