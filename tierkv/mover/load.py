"""Loads: blocks land in the caller's view in prefix order, each verified before it is copied.

A load is a list of windows. While one window is verified and copied into the view, the next ones
are on their way from their tiers, and (into a device's memory) the copies of the one before are
still running: reading, verifying and copying overlap, bounded by the staging memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.decisions.types import MissReason
from tierkv.errors import BackendError
from tierkv.mover.core import SLICE_BYTES
from tierkv.mover.fetch import Wanted
from tierkv.mover.inplace import InPlace, Place, fits
from tierkv.mover.landing import Landing, Step, stop
from tierkv.mover.reforming import longest
from tierkv.mover.scattering import Target, arrived_on, target_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import View
    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import Found, FoundPart
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher, Flight
    from tierkv.mover.lease import Lease
    from tierkv.mover.levels import Level

__all__ = ["ONE_WINDOW_BYTES", "LoadPlan", "Progress", "load"]

ONE_WINDOW_BYTES = 16 * 1024 * 1024
"""A load of fewer bytes is one window: one backend call per tier."""

_SHARE = 20  # of a longer one, a window is this part: what it costs to fill and drain the stages
_LEAST_BYTES = 1024 * 1024  # ... but not less: below this a call costs more than it moves
_AHEAD = 2  # windows that are read while another one is verified and copied
_BLOCKS = 128  # most blocks of a window: what is set up for it must not hold up the loop


@dataclass(slots=True)
class Progress:
    """How far a load got. Holds no memory of the caller, so that it may be kept.

    Attributes:
        blocks: Leading blocks that are in place.
        by_tier: Tokens in place by tier (the slowest one among a block's parts).
        derived: How the loaded KV differs from exact KV; empty if it is exact.
        reason: Why it stopped early; None if it did not.
    """

    blocks: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    derived: str = ""
    reason: MissReason | None = None


@dataclass(slots=True)
class LoadPlan:
    """One prefix to load.

    Attributes:
        space: Space of the blocks.
        root: Root of the key chain.
        keys: Keys of the blocks of the prefix.
        found: The lookup result.
        lease: The lease on its parts.
        view: Where the KV goes.
        progress: How far it got.
        target: The view and its device; set by :meth:`aim`.
        in_place: Whether reads may go straight into the view; None: not found out yet.
    """

    space: Space
    root: BlockKey
    keys: Sequence[BlockKey]
    found: Found
    lease: Lease
    view: View
    progress: Progress = field(default_factory=Progress)
    target: Target = field(init=False)
    in_place: bool | None = None

    def __post_init__(self) -> None:
        self.target = Target(self.view)

    def aim(self, core: Core) -> None:
        """Find the view's device; on the caller's thread, whose work so far comes first.

        Raises:
            ConfigError: if no plug-in knows such memory.
        """
        self.target = target_of(self.view, core.devices.of(self.view))

    def tokens_of(self, block: int) -> int:
        """Tokens of one block of the prefix."""
        size = self.space.block_tokens
        return min(size, self.found.tokens - block * size)

    def wanted(self, found: FoundPart) -> Wanted:
        """Describe one of the found parts for a fetch."""
        parent = part_id(self.keys[found.block - 1], found.group) if found.block else None
        return Wanted(found, self.space, self.root, parent)

    def place(self, found: FoundPart, level: Level) -> Place:
        """Describe one of the found parts, in this tier, for a read straight into the view."""
        nbytes, start = longest(level, found.nbytes), found.block * self.space.block_tokens
        tokens = self.tokens_of(found.block)
        return Place(found, nbytes, self.space, self.root, self.view, start, tokens)


def _steps(plans: Sequence[LoadPlan]) -> Iterator[Step]:
    for plan in plans:
        parts = iter(plan.found.parts)
        ahead = next(parts, None)
        for block in range(plan.found.blocks):
            mine = []
            while ahead is not None and ahead.block == block:
                mine.append(ahead)
                ahead = next(parts, None)
            yield Step(plan, block, mine)


def _limit(core: Core, plans: Sequence[LoadPlan]) -> int:
    """Bytes of one window; whole loads where no stage has another one to overlap with."""
    levels = core.levels
    total, stages = 0, False
    for plan in plans:
        total += sum(part.nbytes for part in plan.found.parts)
        away = any(levels[part.tier].memory is None for part in plan.found.parts)
        stages = stages or away or plan.target.device is not None
    if not stages or total < ONE_WINDOW_BYTES:
        return SLICE_BYTES
    return max(total // _SHARE, _LEAST_BYTES)


def _windows(core: Core, plans: Sequence[LoadPlan]) -> Iterator[list[Step]]:
    limit = min(_limit(core, plans), SLICE_BYTES)
    window: list[Step] = []
    cold = total = 0
    for step in _steps(plans):
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


async def load(
    core: Core, fetcher: Fetcher, plans: Sequence[LoadPlan], deadline: float | None = None
) -> None:
    """Load leased prefixes into their views, one backend call per tier and window.

    Args:
        core: The engine's core.
        fetcher: Its flights.
        plans: What to load; progress is written into them.
        deadline: Time on the core's clock after which no further window is waited for.

    Raises:
        ClosedError: if the engine is closed.
        ConfigError: if a view is in memory that no device plug-in knows.
        LayoutError: if a view does not hold the tokens.

    Cancellation: re-raised once nothing writes into the views any more: at most one window's copy
    is waited for, and (a view that the engine owns) the reads that go straight into it. Other
    reads under way go on without us and stay available to others.
    """
    for plan in plans:
        plan.aim(core)
    with ExitStack() as stack:
        for plan in plans:
            stack.enter_context(plan.lease)
        run = _Run(core, fetcher, plans, deadline)
        try:
            await run.go()
        finally:
            await run.close()


class _Run:
    """The windows of one load, each in one of three stages: on its way, landing, in place."""

    def __init__(
        self, core: Core, fetcher: Fetcher, plans: Sequence[LoadPlan], deadline: float | None
    ) -> None:
        self._core = core
        self._fetcher = fetcher
        self._plans = plans
        self._deadline = deadline
        self._windows = _windows(core, plans)
        self._coming: list[Step] | None = None  # the next one, if it had to be put off
        self._ahead: deque[list[Step]] = deque()
        self._landings: deque[Landing] = deque()
        self._reached: dict[int, int] = {}

    async def go(self) -> None:
        """Bring everything into place, window by window."""
        core, deadline = self._core, self._deadline
        self._depart()
        while self._ahead:
            if not _is_there(self._ahead[0]):
                # whoever waits for memory must hold none that it could let go: neither may others
                while self._landings:
                    await self._finish()
            await self._arrive(self._ahead[0])
            landing = Landing(core, self._fetcher, self._ahead.popleft())
            self._landings.append(landing)
            self._depart()
            await landing.begin(self._reached)
            # the newest one goes on while the next window, if it is there, is verified
            while self._landings and (len(self._landings) > 1 or not self._landings[0].sent):
                await self._finish()
            if all(plan.progress.reason is not None for plan in self._plans):
                break
            if deadline is not None and core.clock() >= deadline:
                break
            await asyncio.sleep(0)  # a load that never has to wait must not hold up the others
        while self._landings:
            await self._finish()
        for plan in self._plans:
            if plan.progress.blocks < plan.found.blocks:  # a reason that is there stays
                stop(plan, MissReason.FAILED if deadline is None else MissReason.DEADLINE)

    async def _finish(self) -> None:
        await self._landings[0].finish()
        _leave(self._landings.popleft().window)

    async def close(self) -> None:
        """Let go of everything. Cancellation: re-raised once no view is written any more."""
        cancelled: asyncio.CancelledError | None = None
        for landing in self._landings:
            try:
                await landing.settle()
            except asyncio.CancelledError as error:
                cancelled = error
            except BackendError:
                pass  # logged; nothing of it is reported
            _leave(landing.window)
        for window in self._ahead:
            for job in {job for step in window for job, _ in step.places.values()}:
                try:
                    await job.over()
                except asyncio.CancelledError as error:
                    cancelled = error
            _leave(window)
        if cancelled is not None:
            raise cancelled

    # ------------------------------------------------------------------ departing

    def _depart(self) -> None:
        """Start (or join) the reads of windows, as many as may be on their way."""
        while len(self._ahead) < _AHEAD:
            window = self._coming or next(self._windows, None)
            self._coming = None
            if window is None:
                return
            if self._ahead and not self._in_order(window):
                self._coming = window
                return
            self._ahead.append(window)
            self._start(window)

    def _in_order(self, window: Sequence[Step]) -> bool:
        """Whether the reads of this window get their memory after those that it has to wait for.

        Flights get memory in the order in which they were started. Somebody else may have started
        one of these before one of ours that comes first here: who then held the later one and
        waited for the earlier one could wait for a load that waits for him.
        """
        numbers = [
            flight.number
            for earlier in self._ahead
            for step in earlier
            for flight in step.flights.values()
            if not flight.landed.is_set()
        ]
        newest = max(numbers, default=0)
        flying = (self._fetcher.flying(found) for step in window for found in step.parts)
        return all(number == 0 or number > newest for number in flying)

    def _start(self, window: Sequence[Step]) -> None:
        core = self._core
        cold: list[tuple[Step, FoundPart]] = []
        placed: dict[int, list[tuple[Step, Place]]] = {}
        for step in window:
            plan = step.plan
            if plan.progress.reason is not None:
                continue
            for found in step.parts:
                level = core.levels[found.tier]
                if level.memory is not None:
                    continue
                held = arrived_on(plan.target.device, level, found, plan.space, plan.root)
                if held is not None:
                    held.checked = not core.verify_host
                    step.held[found.part] = held
                elif not core.usable(level):
                    continue  # found out when its turn comes
                elif self._in_place(plan, found):
                    placed.setdefault(found.tier, []).append((step, plan.place(found, level)))
                else:
                    cold.append((step, found))
        for tier, pairs in placed.items():
            job = InPlace(core, core.levels[tier], [place for _, place in pairs])
            for step, place in pairs:
                step.places[place.found.part] = (job, place)
        self._join(cold)

    def _join(self, cold: Sequence[tuple[Step, FoundPart]]) -> None:
        if not cold:
            return
        flights = self._fetcher.join([step.plan.wanted(found) for step, found in cold])
        for (step, found), flight in zip(cold, flights, strict=True):
            step.flights[found.part] = flight

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

    async def _arrive(self, window: Sequence[Step]) -> None:
        """Wait for the bytes of a window, until the deadline or until its tier hangs."""
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
            await job.over()
        self._join(
            [
                (step, place.found)
                for step in window
                for _, place in step.places.values()
                if place.misfit and place.found.part not in step.flights
            ]
        )
        waiting: list[Flight] = [
            f for step in window for f in step.flights.values() if not f.landed.is_set()
        ]
        for flight in waiting:
            await core.landed(core.levels[flight.wanted.found.tier], flight.landed)


def _is_there(window: Sequence[Step]) -> bool:
    """Whether everything of a window has arrived."""
    return all(f.landed.is_set() for step in window for f in step.flights.values()) and all(
        job.job.done() for step in window for job, _ in step.places.values()
    )


def _leave(window: Sequence[Step]) -> None:
    for step in window:
        for flight in step.flights.values():
            flight.leave()
        step.flights.clear()
