"""The engine's runner task, its jobs, and its worker threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from tierkv.errors import ClosedError
from tierkv.workers.callbacks import loop_known
from tierkv.workers.home import Home
from tierkv.workers.lanes import Lane, current_lane, enter_lane
from tierkv.workers.pools import Pool
from tierkv.workers.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Future as ThreadFuture

    from anyio.abc import TaskGroup

__all__ = ["Job", "Workers"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.workers")
_LONG_THREADS = 64
_BACKOFF_S = (0.01, 0.1, 1.0, 5.0)
_HEALTHY_S = 60.0  # a worker that ran so long starts over with the shortest back-off
_GIVE_UP_S = 1.0
_STUCK_S = 5.0  # a call waits so long for a thread before those that have one are looked at


class Job(Generic[_T]):
    """Engine-owned work: goes on whoever waits for it, or stops waiting.

    Attributes:
        name: For people.
        ended: Set when the work is over, well or not.
    """

    __slots__ = ("_error", "_result", "ended", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = Signal()
        self._result: _T | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "running"
        return f"<Job {self.name}: {state}>"

    def done(self) -> bool:
        """Whether the work ended, well or not."""
        return self.ended.is_set()

    async def wait(self) -> _T:
        """Wait for the result. Cancelling the waiter leaves the job alone.

        Raises:
            BaseException: whatever the job raised.
        """
        await self.ended.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _end(self, result: _T | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self.ended.set()


class Workers:
    """Runner task, supervised background loops, and worker threads of one engine.

    Each :class:`~tierkv.workers.Lane` has threads of its own, started when they are first needed.

    Args:
        threads: Threads for what somebody waits for; the other lanes have half as many each.
        name: Name of the engine in those of its threads and tasks.
        on_restart: Told the name of each background loop that had to be started again.

    Attributes:
        home: The loop and process that they belong to.
        tasks_spawned: Jobs started so far.
        thread_hops: Calls handed to a worker thread so far.
        gave_up: Whether closing has waited long enough for what was under way to believe it ends.
    """

    def __init__(
        self,
        *,
        threads: int = 4,
        name: str = "tierkv",
        on_restart: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.home = Home()
        self.tasks_spawned = self.thread_hops = 0
        self.gave_up = False
        self._threads = threads
        self._on_restart = on_restart
        self._pools: dict[Lane, Pool] = {}
        self._long: Pool | None = None
        self._runner: asyncio.Task[None] | None = None
        self._jobs: TaskGroup | None = None
        self._closers: TaskGroup | None = None
        self._stop, self._quiet, self._end, self._gone = Signal(), Signal(), Signal(), Signal()
        self._stopped = False
        self._waiting: set[Signal] = set()
        self._live: dict[Job[Any], bool] = {}

    def __repr__(self) -> str:
        state = "closed" if self._stopped else "running" if self._jobs else "new"
        return f"<Workers {self.name}: {state}, {self.tasks_spawned} jobs, {self.thread_hops} hops>"

    # ------------------------------------------------------------------ life

    @property
    def running(self) -> bool:
        """Whether the runner can still take work that closes things."""
        return self._closers is not None

    @property
    def stopping(self) -> bool:
        """Whether jobs are being ended, or were: by closing, or with every task of the loop."""
        jobs, runner = self._jobs, self._runner
        ends = runner is not None and runner.cancelling() > 0
        return jobs is None or jobs.cancel_scope.cancel_called or ends

    async def start(self) -> None:
        """Start the runner task on the running loop.

        Raises:
            ClosedError: if it was started before.
        """
        if self._runner is not None:
            raise ClosedError("workers cannot be started twice")
        self._pools = self._make_pools()
        self.home.settle()
        ready = Signal()
        # The single create_task of the project: the runner outlives every caller.
        self._runner = asyncio.get_running_loop().create_task(
            self._run(ready), name=f"{self.name}-runner"
        )
        await ready.wait()

    def _make_pools(self) -> dict[Lane, Pool]:
        return {
            lane: Pool(lane.threads(self._threads), f"{self.name}-{lane.value}", _LONG_THREADS)
            for lane in Lane
        }

    async def _run(self, ready: Signal) -> None:
        try:
            async with anyio.create_task_group() as closers:
                async with anyio.create_task_group() as jobs:
                    self._jobs, self._closers = jobs, closers
                    ready.set()
                    await self._stop.wait()
                    self._jobs = None
                    jobs.cancel_scope.cancel()
                self._jobs = None  # also where a task of theirs was cancelled from outside
                self._forsake([job for job, closing in self._live.items() if not closing])
                self._quiet.set()
                await self._end.wait()
                self._closers = None
                closers.cancel_scope.cancel()
        finally:
            self._jobs = self._closers = None
            self._forsake(self._live)
            for signal in (ready, self._quiet, self._gone):
                signal.set()

    @staticmethod
    def _forsake(jobs: Iterable[Job[Any]]) -> None:
        """End jobs whose task was cancelled from outside before it began: nothing else does."""
        for job in jobs:
            job._end(None, ClosedError("its task was cancelled before it began"))

    async def quiesce(self, grace: float = 10.0) -> None:
        """Cancel every job and wait for its end; only :meth:`outlast` works afterwards. Idempotent.

        A thread that hangs in the medium is given up after ``grace`` seconds: whoever waits for
        it gets :class:`~tierkv.errors.ClosedError`, and the memory it may touch is never reused.

        Cancellation: re-raised at the end, which comes within ``grace`` and one second.
        """
        if self._runner is None:
            return
        self._stop.set()
        if await self._quiet.outlast(grace):
            return
        _log.error("%s: worker threads hang and are given up", self.name)
        old = [*self._pools.values(), self._long]
        self._pools, self._long = self._make_pools(), None
        _shut(old)
        self._give_up()
        await self._quiet.outlast(_GIVE_UP_S)

    def _give_up(self) -> None:
        self.gave_up = True
        for signal in list(self._waiting):
            signal.set()

    async def aclose(self, grace: float = 10.0) -> None:
        """:meth:`quiesce`, then end the runner and the idle threads. Idempotent, bounded.

        Cancellation: re-raised once everything is closed.
        """
        if self._stopped:
            return
        self._stopped = True
        try:
            await self.quiesce(grace)
        finally:
            self._end.set()
            try:
                if self._runner is not None and not await self._gone.outlast(_GIVE_UP_S):
                    self._give_up()  # what closes things hangs, too
                    await self._gone.outlast(_GIVE_UP_S)
            finally:
                self.gave_up = True
                _shut([*self._pools.values(), self._long])

    # ------------------------------------------------------------------ jobs

    def spawn(
        self,
        fn: Callable[..., Awaitable[_T]],
        *args: object,
        name: str | None = None,
        closing: bool = False,
        lane: Lane | None = None,
    ) -> Job[_T]:
        """Run ``await fn(*args)`` as engine-owned work.

        Args:
            fn: What to run.
            *args: Its arguments.
            name: Name of the job, for people.
            closing: Whether it belongs to closing the engine: :meth:`quiesce` spares it then.
            lane: Whose threads it takes; None: those of whoever starts it.

        Raises:
            ClosedError: if the engine was closed.
        """
        group = self._closers if closing else self._jobs
        if group is None:
            raise ClosedError("the engine is closed")
        job: Job[_T] = Job(name or str(getattr(fn, "__qualname__", "job")))
        try:
            with loop_known():
                group.start_soon(self._guard, job, fn, args, lane, name=job.name)
        except RuntimeError as error:  # its tasks were cancelled from outside
            raise ClosedError("the engine is closed: its tasks were cancelled") from error
        self.tasks_spawned += 1
        self._live[job] = closing
        return job

    async def outlast(self, fn: Callable[..., Awaitable[_T]], *args: object) -> _T:
        """Run ``await fn(*args)`` in a task of its own and wait for its end, come what may.

        For what must not be cut in half and has no engine to belong to: opening and closing.

        Raises:
            ClosedError: if the runner has ended.

        Cancellation: re-raised once ``fn`` is done.
        """
        job = self.spawn(fn, *args, closing=True)
        await job.ended.outlast()
        return await job.wait()

    async def _guard(
        self,
        job: Job[_T],
        fn: Callable[..., Awaitable[_T]],
        args: tuple[object, ...],
        lane: Lane | None,
    ) -> None:
        if lane is not None:
            enter_lane(lane)  # of this task alone: it has a context of its own
        try:
            result = await fn(*args)
        except asyncio.CancelledError:
            # ends here in any case: raised on, a stray one would take all other jobs along
            why = "the engine was closed" if self.stopping else "it was cancelled"
            job._end(None, ClosedError(f"{why} while this was under way"))
        except BaseException as error:  # noqa: BLE001 - the waiter gets it, the runner lives on
            job._end(None, error)
            if not isinstance(error, Exception):
                _log.exception("job %s ended by %r", job.name, error)
        else:
            job._end(result, None)
        finally:
            self._live.pop(job, None)

    def supervise(
        self, name: str, loop_fn: Callable[[], Awaitable[None]], lane: Lane | None = None
    ) -> Job[None]:
        """Run a background loop for the engine's life; restart it, with back-off, when it fails."""
        return self.spawn(self._supervised, name, loop_fn, name=name, lane=lane)

    async def _supervised(self, name: str, loop_fn: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            try:
                await loop_fn()
            except (Exception, asyncio.CancelledError) as error:
                # a broken loop must come back, whatever broke it: a stray cancellation, too
                # what a loop begins just as the engine closes is refused, and no failure either
                if isinstance(error, asyncio.CancelledError | ClosedError) and self.stopping:
                    raise
                _log.exception("background worker %s failed and is restarted", name)
                if self._on_restart is not None:
                    self._on_restart(name)
                if loop.time() - began > _HEALTHY_S:
                    failures = 0
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            else:
                return

    # ------------------------------------------------------------------ threads

    async def run(self, fn: Callable[..., _T], /, *args: object) -> _T:
        """Run ``fn(*args)`` in a worker thread of this lane and wait for its end, come what may.

        If the caller is cancelled (natively or by a scope) before the thread took the call up, it
        is never run; else the cancellation is re-raised once the thread is done.

        Raises:
            ClosedError: if the engine was closed.
        """
        if not self._pools or self._stopped:
            raise ClosedError("the engine is closed")
        self.thread_hops += 1
        return await self._absorb(self._pools[current_lane()], fn, args)

    async def run_long(self, fn: Callable[..., _T], /, *args: object) -> _T:
        """Like :meth:`run`, in a pool of its own for calls of seconds (a model's forward)."""
        if self._stopped:
            raise ClosedError("the engine is closed")
        if self._long is None:
            self._long = Pool(_LONG_THREADS, f"{self.name}-long", _LONG_THREADS)
        return await self._absorb(self._long, fn, args)

    async def _absorb(self, pool: Pool, fn: Callable[..., _T], args: tuple[object, ...]) -> _T:
        done = Signal()
        loop = asyncio.get_running_loop()
        try:
            work: ThreadFuture[_T] = pool.start(contextvars.copy_context().run, fn, *args)
        except RuntimeError as error:  # the pool was shut down
            raise ClosedError("the engine is closed") from error
        work.add_done_callback(functools.partial(_wake, loop, done))
        self._waiting.add(done)
        try:
            while not await done.wait(None if work.running() else _STUCK_S):
                if not work.running():
                    pool.relieve(_STUCK_S)
        except asyncio.CancelledError as error:
            if not work.cancel():  # a thread has taken it up
                await done.after(error)
            raise
        finally:
            self._waiting.discard(done)
        if work.cancelled() or not work.done():
            raise ClosedError("the engine was closed before a worker thread was done with this")
        return work.result()


def _shut(pools: Iterable[Pool | None]) -> None:
    for pool in pools:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _wake(loop: asyncio.AbstractEventLoop, done: Signal, _: ThreadFuture[_T]) -> None:
    # the loop may be gone by now: then nobody waits any more
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(done.set)
