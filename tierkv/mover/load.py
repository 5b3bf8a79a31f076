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
from tierkv.errors import BackendError, ClosedError
from tierkv.mover.core import SLICE_BYTES
from tierkv.mover.departing import Departures, leave
from tierkv.mover.fetch import Wanted
from tierkv.mover.inplace import Place
from tierkv.mover.landing import Landing
from tierkv.mover.plain import load_plainly
from tierkv.mover.scattering import Target, target_of
from tierkv.mover.steps import Step, steps, stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import View
    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import Found, FoundPart
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.mover.lease import Lease
    from tierkv.mover.levels import Level

__all__ = ["UNKNOWN", "LoadPlan", "Progress", "load"]

UNKNOWN = "unknown-prefix"
"""How KV came about of which nobody told."""

_NEAR_BYTES = 256 * 1024 * 1024
_NEAR_BLOCKS = 128
"""Most blocks that one hop to a thread copies out of RAM: what is set up for it must not hold up
the loop. How many bytes they have matters little: a caller that is cancelled waits for one. Only a
deadline is looked at between hops: with one, a hop copies no more than a slice."""


@dataclass(slots=True)
class Progress:
    """How far a load got. Holds no memory of the caller, so that it may be kept.

    Attributes:
        blocks: Leading blocks that are in place, those that were there before included.
        by_tier: Tokens in place by tier (the slowest one among a block's parts).
        derived: How the loaded KV differs from exact KV; empty if it is exact.
        reason: Why it stopped early; None if it did not.
        spilled: Whether memory of the view may have been written for a block that is not in
            place: harmless behind the last token, not where a recurrent state was.
    """

    blocks: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    derived: str = ""
    reason: MissReason | None = None
    spilled: bool = False


@dataclass(slots=True)
class LoadPlan:
    """One prefix to load.

    Attributes:
        space: Space of the blocks.
        root: Root of the key chain.
        keys: Keys of the blocks of the prefix.
        found: The lookup result, without parts of blocks before ``first``.
        lease: The lease on its parts.
        view: Where the KV goes.
        first: First block to load: those before it are in place already.
        exact: Whether frames that are not exact are refused, whatever the lookup took them for.
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
    first: int = 0
    exact: bool = False
    progress: Progress = field(default_factory=Progress)
    target: Target = field(init=False)
    in_place: bool | None = None

    def __post_init__(self) -> None:
        self.target = Target(self.view)
        self.progress.blocks = self.first

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
        nbytes, start = level.backend.longest(found.nbytes), found.block * self.space.block_tokens
        tokens = self.tokens_of(found.block)
        return Place(found, nbytes, self.space, self.root, self.view, start, tokens)


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
        LoadIncomplete: if a tier hangs that reads straight into a view which the engine owns: it
            may go on writing there at any time, so that the view cannot be used any more.

    Cancellation: re-raised once nothing writes into the views any more: at most one window's copy
    is waited for, and (a view that the engine owns) the reads that go straight into it. Other
    reads under way go on without us and stay available to others.
    """
    for plan in plans:
        plan.aim(core)
    with ExitStack() as stack:
        for plan in plans:
            stack.enter_context(plan.lease)
        if _is_near(core, plans):
            limit = _NEAR_BYTES if deadline is None else SLICE_BYTES
            if len(plans) > 1 or await load_plainly(core, fetcher, plans[0], limit, deadline):
                await _load_near(core, fetcher, plans, limit, deadline)
        else:
            run = _Run(core, fetcher, plans, deadline)
            try:
                await run.go()
            finally:
                await run.close()
        for plan in plans:
            if plan.progress.blocks < plan.found.blocks:  # a reason that is there stays
                stop(plan, MissReason.FAILED if deadline is None else MissReason.DEADLINE)


def _is_near(core: Core, plans: Sequence[LoadPlan]) -> bool:
    """Whether nothing has to travel: all of it goes from memory to memory that hosts can read."""
    ram = {level.index for level in core.levels if level.memory is not None}
    return all(
        plan.target.device is None and ram.issuperset([part.tier for part in plan.found.parts])
        for plan in plans
    )


def _near_windows(plans: Sequence[LoadPlan], limit: int) -> Iterator[list[Step]]:
    """Cut it into what one thread does in one go."""
    window: list[Step] = []
    size = 0
    for step in steps(plans, near=True):
        nbytes = sum([part.nbytes for part in step.parts])
        if window and (size + nbytes > limit or len(window) == _NEAR_BLOCKS):
            yield window
            window, size = [], 0
        window.append(step)
        size += nbytes
    if window:
        yield window


async def _load_near(
    core: Core, fetcher: Fetcher, plans: Sequence[LoadPlan], limit: int, deadline: float | None
) -> None:
    """Load what is in RAM already, behind what is in place: verify and copy, by the window."""
    reached = {id(plan): plan.progress.blocks for plan in plans}
    for window in _near_windows(plans, limit):
        landing = Landing(core, fetcher, window)
        await landing.begin(reached)
        landing.account()
        if all(plan.progress.reason is not None for plan in plans):
            break
        if deadline is not None and core.clock() >= deadline:
            break
        await asyncio.sleep(0)  # a load that never has to wait must not hold up the others


class _Run:
    """The windows of one load, each in one of three stages: on its way, landing, in place."""

    def __init__(
        self, core: Core, fetcher: Fetcher, plans: Sequence[LoadPlan], deadline: float | None
    ) -> None:
        self._core = core
        self._fetcher = fetcher
        self._plans = plans
        self._deadline = deadline
        self._departures = Departures(core, fetcher, plans, deadline)
        self._landings: deque[Landing] = deque()
        self._reached: dict[int, int] = {}

    async def go(self) -> None:
        """Bring everything into place, window by window."""
        core, deadline, departures = self._core, self._deadline, self._departures
        departures.depart()
        while departures.ahead:
            if not departures.is_there():
                # whoever waits for memory must hold none that it could let go: neither may others
                while self._landings:
                    await self._finish()
            await departures.arrive()
            landing = Landing(core, self._fetcher, departures.ahead.popleft())
            self._landings.append(landing)
            departures.depart()
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

    async def _finish(self) -> None:
        await self._landings[0].finish()
        leave(self._landings.popleft().window)

    async def close(self) -> None:
        """Let go of everything. Cancellation: re-raised once no view is written any more."""
        cancelled: asyncio.CancelledError | None = None
        for landing in self._landings:
            try:
                await landing.settle()
            except asyncio.CancelledError as error:
                cancelled = error
            except (BackendError, ClosedError):
                pass  # logged; nothing of it is reported
            leave(landing.window)
        for window in self._departures.ahead:
            for job in {job for step in window for job, _ in step.places.values()}:
                try:
                    await job.over()
                except asyncio.CancelledError as error:
                    cancelled = error
            leave(window)
        if cancelled is not None:
            raise cancelled
