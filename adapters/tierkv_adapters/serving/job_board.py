"""The jobs of a rank: which of them wait, which touch pages, and what became of them.

Three parties meet here: the worker's thread orders jobs and asks for their ends, the engine's loop
carries them out, and the fence stands between a job and whoever gets its pages next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.decisions.types import MissReason
from tierkv_adapters.serving.job_queues import JobQueues
from tierkv_adapters.serving.jobs import JobState, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv_adapters.serving.jobs import Ended, Job, RequestState

__all__ = ["JobBoard"]

_LOOK_S: Final = 5.0
_HANDS_OFF: Final = (JobState.GATHERED, JobState.ENDED)


class JobBoard(JobQueues):
    """Jobs in the order of their requests, and the fence around their pages. Thread-safe."""

    def __repr__(self) -> str:
        return f"<JobBoard {len(self._jobs)} jobs, {len(self._reports.untold)} ends to tell>"

    # ------------------------------------------------------------------ orders

    def add(self, job: Job) -> None:
        """Take a job; loads come before the saves that wait."""
        with self._changed:
            queue = job.request.queue
            at = len(queue)
            if job.kind == "load":
                at = next((i for i, other in enumerate(queue) if other.kind == "save"), at)
            queue.insert(at, job)
            self._jobs[job] = None
            self._advance(job.request)

    def refuse(self, job: Job, reason: str) -> None:
        """Report a job that cannot be done at all."""
        self.fault(f"a {job.kind} was refused", reason)
        with self._changed:
            self._finish(job, Outcome(job.start, reason))

    def fault(self, kind: str, text: str) -> None:
        """Count and log what should not have happened."""
        with self._changed:
            self._counters.errors += 1
        self.complain(kind, text)

    def drop_saves(self, request: RequestState, reason: str) -> None:
        """Drop a request's saves that have not begun."""
        with self._changed:
            for job in self._of(request):
                if job.kind == "save" and job.state is JobState.WAITING:
                    self._drop(job, reason)

    def end(self, request: RequestState) -> None:
        """Hear that a request is over: its loads are given up, then its session is left."""
        with self._changed:
            request.over = True
            for job in self._of(request):
                if job.kind == "load":
                    self._give_up(job, "ended")
            self._advance(request)

    def _of(self, request: RequestState) -> list[Job]:
        return [*request.queue, *([request.running] if request.running is not None else ())]

    # ------------------------------------------------------------------ the fence

    def fence(self, taken: Sequence[set[int]]) -> None:
        """Return once no job touches these pages, listed by group, any more.

        Saves that have not begun lose what they have there, or are dropped. Those that have begun
        are waited for; if that takes too long, they are cancelled, which ends as soon as the copies
        that are under way have ended.
        """
        with self._changed:
            begun = []
            for job in [job for job in self._jobs if job.touches(taken)]:
                if job.state is JobState.BEGUN:
                    begun.append(job)
                elif job.kind == "load" or not job.let_go(taken, self._groups):
                    self._drop(job, "pages_taken")
            if not begun:
                return
            start = self._clock()
            self._counters.fence_waits += 1
            for job in begun:
                if job.kind == "load":  # nobody waits for it, if its pages are somebody else's
                    self._give_up(job, "pages_taken")
            if not self._wait(begun, self._settings.fence_patience):
                for job in begun:
                    if job.state is JobState.BEGUN:
                        self._counters.fence_gave_up += 1
                        self._give_up(job, "pages_taken")
                while not self._wait(begun, _LOOK_S):
                    self.complain("fence", "a step still waits for copies out of its pages")
            self._counters.fence_seconds += self._clock() - start

    def _wait(self, jobs: Sequence[Job], within: float) -> bool:
        return self._changed.wait_for(lambda: all(job.state in _HANDS_OFF for job in jobs), within)

    # ------------------------------------------------------------------ ends

    def take_ended(self) -> list[Ended]:
        """What ended since the last time."""
        with self._changed:
            self._expire()
            return self._reports.take()

    def _expire(self) -> None:
        """Report loads whose deadline came before their turn."""
        now = self._clock()
        for job in list(self._jobs):
            if job.until is not None and job.until <= now and job.state is JobState.WAITING:
                self._drop(job, MissReason.DEADLINE.value)

    def wait_loads(self, ids: Iterable[str]) -> None:
        """Wait until the loads of these requests have ended."""
        wanted = set(ids)
        with self._changed:
            while True:
                self._expire()
                left = [
                    job for job in self._jobs if job.kind == "load" and job.request.id in wanted
                ]
                if not left:
                    return
                now = self._clock()
                waits = [job.until - now for job in left if job.until is not None]
                self._wait(left, min([_LOOK_S, *(max(wait, 0.01) for wait in waits)]))

    def is_busy(self) -> bool:
        """Whether a job has not ended, or an end was not told."""
        return bool(self._jobs or self._reports.untold)

    def is_saving(self, request_id: str) -> bool:
        """Whether a request has saves that have not ended."""
        with self._changed:
            return any(j.kind == "save" and j.request.id == request_id for j in self._jobs)

    def drain(self, within: float) -> bool:
        """Wait until no job is left and no session is being left; whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._parting, within)

    def withdraw(self, reason: str) -> None:
        """Drop what waits, and cancel loads.

        Saves that have begun are left to end: what an engine writes of a store that was cancelled
        may still be published later, when nobody waits for it any more.
        """
        with self._changed:
            for job in list(self._jobs):
                if job.kind == "load" or job.state is JobState.WAITING:
                    self._give_up(job, reason)

    def abandon(self, reason: str) -> None:
        """Drop what waits and cancel what has begun."""
        with self._changed:
            for job in list(self._jobs):
                self._give_up(job, reason)
