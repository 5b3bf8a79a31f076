"""What became of jobs: counted, logged and kept until the worker's thread asks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError
from tierkv_adapters.serving.jobs import Ended, Outcome
from tierkv_adapters.serving.limited_log import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv_adapters.serving.counters import RankCounters
    from tierkv_adapters.serving.jobs import Job

__all__ = ["JobReports"]

_log = logging.getLogger("tierkv.serving")
_GIVEN_UP: Final = "ended"  # by whoever asked: nothing failed, and nobody computes the rest


class JobReports:
    """The ends of jobs. Not thread-safe, but for :meth:`complain`: its board has the lock.

    Args:
        counters: Where to count.
        clock: The rank's clock.
        complain_every: Seconds between two lines of the log of one kind.

    Attributes:
        untold: Ends that nobody has asked for yet.
    """

    def __init__(
        self, counters: RankCounters, clock: Callable[[], float], complain_every: float
    ) -> None:
        self.untold: list[Ended] = []
        self._counters = counters
        self._clock = clock
        self._complaints = LimitedLog(_log, complain_every)

    def take(self) -> list[Ended]:
        """The ends that were not told yet."""
        ended, self.untold = self.untold, []
        return ended

    def complain(self, kind: str, text: str) -> None:
        """Log it, if that kind of line was not logged lately."""
        self._complaints.warning(kind, text)

    def failed(self, job: Job, error: Exception) -> Outcome:
        """What an exception made of a job."""
        if job.why is not None:
            return Outcome(job.start, job.why)
        closed = isinstance(error, ClosedError)
        if not closed:
            self._counters.errors += 1
        self.complain(f"a {job.kind} failed", repr(error))
        return Outcome(job.start, "closed" if closed else type(error).__name__)

    def add(self, job: Job, outcome: Outcome, *, skipped: bool) -> None:
        """Take in the end of a job; ``skipped``: it never began."""
        seconds, counters = self._clock() - job.asked, self._counters
        tokens, short = outcome.tokens - job.start, outcome.tokens < job.stop
        short = short and outcome.reason != _GIVEN_UP
        if job.kind == "load":
            counters.loads += 1
            counters.loads_short += short
            counters.load_tokens += tokens
            counters.load_bytes += outcome.nbytes
            counters.load_seconds += seconds
            counters.deadline_misses += outcome.reason == MissReason.DEADLINE.value
            counters.corrupt += outcome.reason == MissReason.DAMAGED.value
        else:
            counters.saves += 1
            counters.saves_skipped += skipped
            counters.saves_failed += short and not skipped
            counters.save_tokens += tokens
            counters.save_blocks += outcome.blocks
            counters.save_bytes += outcome.nbytes
            counters.save_seconds += seconds
        if short and not skipped:
            text = f"request {job.request.id}: {tokens} of {job.stop - job.start} tokens"
            self.complain(f"short {job.kind}", f"{text} ({outcome.reason})")
        self.untold.append(
            Ended(
                job.request.id,
                job.kind,
                job.start,
                outcome.tokens,
                outcome.reason,
                seconds,
                outcome.nbytes,
            )
        )
