"""Departing: what a load reads ahead, window by window, and the order in which it may do so.

Staging memory is shared by all loads, and several of them may want the same frames. Nobody waits
for ever because of three rules: batches get their memory in the order in which they were started;
a window waits for one batch (or for those that it started itself, one after the other); and a load
that has to wait for memory holds none but that window's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tierkv.decisions.types import MissReason
from tierkv.errors import LoadIncomplete
from tierkv.mover.core import SLICE_BYTES
from tierkv.mover.inplace import InPlace, Place, fits
from tierkv.mover.scattering import arrived_on
from tierkv.mover.steps import Step, steps, stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.decisions.types import FoundPart
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher, Flight
    from tierkv.mover.load import LoadPlan

__all__ = ["ONE_WINDOW_BYTES", "Departures", "leave"]

ONE_WINDOW_BYTES = 16 * 1024 * 1024
"""A load of fewer bytes is one window: one backend call per tier."""

_SHARE = 20  # of a longer one, a window is this part: what it costs to fill and drain the stages
_LEAST_BYTES = 1024 * 1024  # ... but not less: below this a call costs more than it moves
_AHEAD = 2  # windows that are read while another one is verified and copied
_BLOCKS = 128  # most blocks of a window: what is set up for it must not hold up the loop
_HEADERS_BYTES = _BLOCKS * 8192  # what headers may add to a slice: 32 frames of 1 MiB go together


def _limit(core: Core, plans: Sequence[LoadPlan]) -> int:
    """Bytes of one window; whole loads where no stage has another one to overlap with."""
    levels = core.levels
    total, stages = 0, False
    for plan in plans:
        total += sum(part.nbytes for part in plan.found.parts)
        away = any(levels[part.tier].memory is None for part in plan.found.parts)
        stages = stages or away or plan.target.device is not None
    if not stages or total < ONE_WINDOW_BYTES:
        return SLICE_BYTES + _HEADERS_BYTES
    return min(max(total // _SHARE, _LEAST_BYTES), SLICE_BYTES)


def _windows(core: Core, plans: Sequence[LoadPlan]) -> Iterator[list[Step]]:
    limit = _limit(core, plans)
    window: list[Step] = []
    cold = total = 0
    for step in steps(plans):
        size = sum(p.nbytes for p in step.parts)
        away = sum(p.nbytes for p in step.parts if core.levels[p.tier].memory is None)
        if window and (
            cold + away > core.window_bytes or total + size > limit or len(window) == _BLOCKS
        ):
            yield window
            window, cold, total = [], 0, 0
        window.append(step)
        cold += away
        total += size
    if window:
        yield window


class Departures:
    """The windows of one load that are on their way, or still to come.

    Attributes:
        ahead: Those on their way, the first one first.
    """

    def __init__(
        self, core: Core, fetcher: Fetcher, plans: Sequence[LoadPlan], deadline: float | None
    ) -> None:
        self.ahead: deque[list[Step]] = deque()
        self._core = core
        self._fetcher = fetcher
        self._deadline = deadline
        self._windows = _windows(core, plans)
        self._coming: list[Step] | None = None  # the next one, if it had to be put off

    def depart(self) -> None:
        """Start (or join) the reads of windows, as many as may be on their way."""
        while len(self.ahead) < _AHEAD:
            window = self._coming or next(self._windows, None)
            self._coming = None
            if window is None:
                return
            if self.ahead and not self._in_order(window):
                self._coming = window
                return
            window, rest = self._of_one_kind(window)
            self._coming = rest or None
            self.ahead.append(window)
            self._start(window)

    def _in_order(self, window: Sequence[Step]) -> bool:
        """Whether the reads of this window get their memory after those that it has to wait for.

        Flights get memory in the order in which they were started. Somebody else may have started
        one of these before one of ours that comes first here: who then held the later one and
        waited for the earlier one could wait for a load that waits for him.
        """
        numbers = [
            flight.number
            for earlier in self.ahead
            for step in earlier
            for flight in step.flights.values()
            if not flight.landed.is_set()
        ]
        newest = max(numbers, default=0)
        flying = (self._fetcher.flying(found) for step in window for found in step.parts)
        return all(number == 0 or number >= newest for number in flying)

    def _of_one_kind(self, window: list[Step]) -> tuple[list[Step], list[Step]]:
        """Find out how each step travels; cut the window where that changes.

        All of a window is read by its own batches, or by one and the same batch of somebody else,
        or straight into the view. Else a load would hold what one batch brought and wait for the
        memory of another: several loads that do so can fill all of the memory, and wait for ever.
        """
        kind: int | None = None
        for number, step in enumerate(window):
            mine = self._look(step)
            if mine is not None and kind is not None and mine != kind:
                return window[:number], window[number:]
            kind = kind if mine is None else mine
        return window, []

    def _look(self, step: Step) -> int | None:
        """Find out how the parts of a step travel.

        Returns:
            Number of the batch that reads them; 0 for batches that are still to be started, -1 for
            reads straight into the view; None if nothing has to travel.
        """
        core, plan = self._core, step.plan
        step.held, step.cold, step.apart = {}, [], False
        if plan.progress.reason is not None:
            return None
        for found in step.parts:
            level = core.levels[found.tier]
            if level.memory is not None:
                continue
            held = arrived_on(plan.target.device, level, found, plan.space, plan.root)
            if held is not None:
                held.checked = not core.verify_host
                step.held[found.part] = held
            elif core.usable(level):  # else found out when its turn comes
                step.cold.append(found)
        if not step.cold:
            return None
        if all(self._in_place(plan, found) for found in step.cold):
            return -1
        numbers = {self._fetcher.flying(found) for found in step.cold}
        step.apart = len(numbers) > 1
        return 0 if step.apart else numbers.pop()

    def _start(self, window: Sequence[Step]) -> None:
        cold = [(step, found) for step in window for found in step.cold]
        if cold and all(self._in_place(step.plan, found) for step, found in cold):
            self._place(cold)
            return
        self._join([(step, found) for step, found in cold if not step.apart])
        self._join([(step, found) for step, found in cold if step.apart], apart=True)

    def _place(self, cold: Sequence[tuple[Step, FoundPart]]) -> None:
        core = self._core
        placed: dict[int, list[tuple[Step, Place]]] = {}
        for step, found in cold:
            place = step.plan.place(found, core.levels[found.tier])
            placed.setdefault(found.tier, []).append((step, place))
        for tier, pairs in placed.items():
            job = InPlace(core, core.levels[tier], [place for _, place in pairs])
            for step, place in pairs:
                step.plan.progress.spilled = True
                step.places[place.found.part] = (job, place)

    def _join(self, cold: Sequence[tuple[Step, FoundPart]], *, apart: bool = False) -> None:
        if not cold:
            return
        wanted = [step.plan.wanted(found) for step, found in cold]
        for (step, found), flight in zip(
            cold, self._fetcher.join(wanted, apart=apart), strict=True
        ):
            step.flights[found.part] = flight

    def _put_back(self) -> None:
        """Let go of what is read ahead: what comes first has to wait for memory anew."""
        while len(self.ahead) > 1 and any(step.flights for step in self.ahead[-1]):
            window = self.ahead.pop()
            leave(window)
            self._coming = [*window, *(self._coming or ())]

    def _in_place(self, plan: LoadPlan, found: FoundPart) -> bool:
        """Whether to read this part straight into the view.

        Not where it lands in a memory tier, which later loads have more of; nor with a deadline,
        after which the view must not be written any more.
        """
        if not plan.view.owned_by_engine or plan.target.device is not None:
            return False
        level, fetcher = self._core.levels[found.tier], self._fetcher
        if self._deadline is not None or fetcher.lands(level) is not None or fetcher.flying(found):
            return False
        if plan.in_place is None:
            plan.in_place = fits(plan.place(found, level))
        return plan.in_place

    # ------------------------------------------------------------------ arriving

    async def arrive(self) -> None:
        """Wait for the bytes of the first window, until the deadline or until its tier hangs."""
        window = self.ahead[0]
        if self._deadline is None:
            await self._wait(window)
            return
        try:
            async with asyncio.timeout(max(self._deadline - self._core.clock(), 0)):
                await self._wait(window)
        except TimeoutError:
            for step in window:
                if any(not f.landed.is_set() for f in step.flights.values()):
                    stop(step.plan, MissReason.DEADLINE)

    async def _wait(self, window: Sequence[Step]) -> None:
        core = self._core
        for job in {job for step in window for job, _ in step.places.values()}:
            if not await job.over():
                why = f"tier {job.tier!r} does not answer, and may write into the view at any time"
                raise LoadIncomplete(0, why)
        misfits = [
            (step, place.found)
            for step in window
            for _, place in step.places.values()
            if place.misfit and place.found.part not in step.flights
        ]
        if misfits:
            self._put_back()
            self._join(misfits, apart=True)
        waiting: list[Flight] = [
            f for step in window for f in step.flights.values() if not f.landed.is_set()
        ]
        for flight in waiting:
            await core.landed(core.levels[flight.wanted.found.tier], flight.landed)

    def is_there(self) -> bool:
        """Whether everything of the first window has arrived."""
        return all(
            f.landed.is_set() for step in self.ahead[0] for f in step.flights.values()
        ) and all(job.job.done() for step in self.ahead[0] for job, _ in step.places.values())


def leave(window: Sequence[Step]) -> None:
    """Let go of the frames of a window."""
    for step in window:
        for flight in step.flights.values():
            flight.leave()
        step.flights.clear()
