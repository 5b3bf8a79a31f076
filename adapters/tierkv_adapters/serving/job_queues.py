"""Jobs in line: each request's are carried out one after the other, on the engine's loop."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from tierkv.errors import ClosedError
from tierkv_adapters.serving.job_reports import JobReports
from tierkv_adapters.serving.jobs import JobState, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from tierkv.blocking import CacheManager, Pending
    from tierkv_adapters.serving.counters import RankCounters
    from tierkv_adapters.serving.jobs import Job, RequestState
    from tierkv_adapters.serving.pages import PageGroup
    from tierkv_adapters.serving.settings import RankSettings

__all__ = ["JobQueues"]


class JobQueues:
    """Jobs in the order of their requests: one at a time of each request. Thread-safe.

    Attributes:
        complain: Logs a line of some kind, if none of that kind was logged lately.

    Args:
        manager: The engine.
        groups: Page groups of the rank.
        settings: How patient it is.
        counters: Where to count; changed under this board's lock only.
        clock: The rank's clock.
        carry: Does a job on the loop; None if it must not begin any more.
        part: Leaves a request's session, on the loop.
    """

    def __init__(
        self,
        manager: CacheManager,
        groups: Sequence[PageGroup],
        settings: RankSettings,
        counters: RankCounters,
        clock: Callable[[], float],
        carry: Callable[[Job], Awaitable[Outcome | None]],
        part: Callable[[RequestState], Awaitable[None]],
    ) -> None:
        self._manager = manager
        self._groups = groups
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._carry = carry
        self._part = part
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[Job, None] = {}  # those that have not ended, oldest first
        self._parting = 0
        self._reports = JobReports(counters, clock, settings.complain_every)
        self.complain = self._reports.complain

    def begins(self, job: Job) -> bool:
        """Whether a job may touch its pages from now on; asked on the loop, right before."""
        with self._changed:
            if job.state is not JobState.WAITING:
                return False
            job.state = JobState.BEGUN
            if job.kind == "save":
                job.gathered = partial(self._gathered, job)
            return True

    def _gathered(self, job: Job) -> None:
        """Hear on the loop that a save reads no page any more: nobody need wait for it."""
        with self._changed:
            if job.state is JobState.BEGUN:
                job.state = JobState.GATHERED
                job.forget_pages()
                self._changed.notify_all()

    # ------------------------------------------------------------------ under the lock

    def _drop(self, job: Job, reason: str) -> None:
        """End a job that has not begun."""
        self._finish(job, Outcome(job.start, reason), skipped=True)
        if job.pending is not None:
            job.pending.cancel()

    def _drop_unfilled(self, load: Job, tokens: int) -> None:
        """Drop saves of what a load should have brought: nobody has computed it since."""
        for job in list(load.request.queue):
            if job.kind == "save" and job.stop > tokens and job.state is JobState.WAITING:
                self._drop(job, "not_loaded")

    def _give_up(self, job: Job, reason: str) -> None:
        if job.state is JobState.WAITING:
            self._drop(job, reason)
        elif job.state is not JobState.ENDED and job.pending is not None:
            job.why = job.why or reason
            job.pending.cancel()

    def _advance(self, request: RequestState) -> None:
        """Start the next job of a request, or leave its session if it is over."""
        while request.running is None and request.queue:
            job = request.queue.popleft()
            if job.state is JobState.ENDED:
                continue
            request.running = job
            try:
                job.pending = self._manager.submit(self._carry, job, done=partial(self._over, job))
            except Exception as error:  # noqa: BLE001 - a save less, never an engine less
                request.running = None
                self._finish(job, self._reports.failed(job, error))
        if request.over and request.running is None and not request.leaving:
            request.leaving = True
            self._parting += 1
            try:
                self._manager.submit(self._part, request, done=self._parted)
            except ClosedError:  # its sessions went with the engine
                self._parting -= 1

    def _over(self, job: Job, pending: Pending[Outcome | None]) -> None:
        """Hear on the loop that the work on a job is over."""
        with self._changed:
            if job.state is not JobState.ENDED:
                try:
                    outcome = pending.result()
                except Exception as error:  # noqa: BLE001 - see `_advance`
                    outcome = self._reports.failed(job, error)
                self._finish(job, outcome or Outcome(job.start, job.why or "dropped"))
            job.request.running = None
            self._advance(job.request)
            self._changed.notify_all()

    def _parted(self, pending: Pending[Any]) -> None:
        with self._changed:
            self._parting -= 1
            self._changed.notify_all()
            try:
                pending.result()
            except ClosedError:
                pass  # the engine closed under it, and took its sessions along
            except Exception as error:  # noqa: BLE001 - see `_advance`
                self._counters.errors += 1
                self.complain("a session could not be left", repr(error))

    def _finish(self, job: Job, outcome: Outcome, *, skipped: bool = False) -> None:
        job.state = JobState.ENDED
        self._jobs.pop(job, None)
        job.pages, job.tokens, job.ready = [], job.tokens[:0], None
        if job.kind == "load" and outcome.tokens < job.stop:
            self._drop_unfilled(job, outcome.tokens)
        self._reports.add(job, outcome, skipped=skipped)
        self._changed.notify_all()
