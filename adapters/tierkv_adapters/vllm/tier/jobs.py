"""Jobs of the tier: begun and told on the scheduler's thread, ended on the engine's loop."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.errors import ClosedError, TierKVError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tierkv.blocking import CacheManager, Pending
    from tierkv_adapters.vllm.tier.engine import RowsLoaded, RowsStored

__all__ = ["EndedJob", "Job", "JobBook"]


@dataclass(slots=True, eq=False)
class Job:
    """One job of vLLM.

    Attributes:
        number: vLLM's number of it.
        keys: Its chunks.
        begun: When it was asked for.
        rows: What came of it so far.
        pending: The work on the engine's loop; None: it never began.
    """

    number: int
    keys: Sequence[bytes]
    begun: float
    rows: RowsLoaded | RowsStored
    pending: Pending[None] | None = None


class EndedJob(NamedTuple):
    """A job that is over.

    Attributes:
        job: Which.
        error: What kept some of it from being tried; None: all was.
        seconds: From its order to its end.
    """

    job: Job
    error: BaseException | None
    seconds: float


_CANCEL_S: Final = 30.0  # a cancelled copy finishes its slice: milliseconds, on a starved machine


class JobBook:
    """Jobs that vLLM is owed an answer to. Every one gets exactly one, whatever happens.

    All methods belong to one thread, the scheduler's; jobs end on the engine's loop.

    Args:
        manager: Where they are done.
        clock: Tells the time.
    """

    def __init__(self, manager: CacheManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._open: dict[int, Job] = {}
        self._over: SimpleQueue[tuple[Job, float]] = SimpleQueue()
        self._told: list[tuple[Job, float]] = []  # taken from the queue, not yet asked for

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._open.values())

    def begin(
        self,
        number: int,
        keys: Sequence[bytes],
        rows: RowsLoaded | RowsStored,
        work: Callable[[Job], Awaitable[None]] | None,
    ) -> Job:
        """Start a job; never waits, never raises.

        Args:
            number: vLLM's number of it; none that is open.
            keys: Its chunks.
            rows: Gets what comes of it.
            work: Does it, on the engine's loop; None: it has ended already.
        """
        job = Job(number, keys, self._clock(), rows)
        self._open[number] = job
        if work is not None:
            try:
                job.pending = self._manager.submit(work, job, done=lambda _: self._end(job))
            except ClosedError:
                work = None
        if work is None:
            self._end(job)
        return job

    def _end(self, job: Job) -> None:
        self._over.put((job, self._clock()))

    def ended(self) -> list[EndedJob]:
        """Jobs that have ended since the last call, each once."""
        while True:
            try:
                self._told.append(self._over.get_nowait())
            except Empty:
                break
        told, self._told = self._told, []
        for job, _ in told:
            del self._open[job.number]
        return [EndedJob(job, _error_of(job), when - job.begun) for job, when in told]

    def drain(self, within: float) -> None:
        """Wait until every job has ended: at most ``within`` seconds, then they are cancelled.

        All of them are told by the next :meth:`ended`.

        Raises:
            TierKVError: if even a cancelled job does not end. Rows must not be used again then.
        """
        if self._all_over(self._clock() + within):
            return
        for job in self._open.values():
            if job.pending is not None:
                job.pending.cancel()
        if not self._all_over(self._clock() + _CANCEL_S):
            raise TierKVError(
                f"a copy between vLLM's CPU tier and tierkv has not ended {_CANCEL_S:.0f} s after "
                "it was cancelled: a thread is stuck in the operating system; restart vLLM"
            )

    def _all_over(self, until: float) -> bool:
        while len(self._told) < len(self._open):
            try:
                self._told.append(self._over.get(timeout=max(until - self._clock(), 0.0)))
            except Empty:
                return False
        return True


def _error_of(job: Job) -> BaseException | None:
    if job.pending is None:
        return None
    try:
        job.pending.result()
    except BaseException as error:  # noqa: BLE001 - told, not raised: vLLM's thread lives on
        return error
    return None
