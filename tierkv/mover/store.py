"""Stores: the caller's KV is gathered and encoded straight into the fastest tier that takes it.

Reserve, gather, seal, publish; a store that fails or is cancelled on the way was never visible.
When :func:`store` returns, the caller may overwrite its tensors. Several chains stored together
share one worker hop per batch.

Batches overlap: while a device copies one, the one before it is sealed in a worker thread, and the
ones before that are written to their medium. They become visible in order, parents first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tierkv.decisions.types import SkipReason
from tierkv.errors import ClosedError
from tierkv.mover.batching import Begun, Passage, Run, batch_bytes, batches
from tierkv.mover.core import INLINE_BYTES
from tierkv.mover.frames import HostWriting
from tierkv.mover.gathering import arrived, settled, submit, submit_last
from tierkv.mover.plans import PartOutcome
from tierkv.mover.reserving import allocate, reserve
from tierkv.mover.steps import asks_to_stop, never
from tierkv.mover.writing import write_and_publish
from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.gathering import Gather
    from tierkv.mover.letting_go import LastRead
    from tierkv.mover.levels import Level
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.mover.writing import Writing
    from tierkv.workers import Signal

__all__ = ["store"]

_WRITES = 2
"""Batches being written at once, beside the one that is gathered and the one that is sealed."""
_WAIT_AND_SEE = (SkipReason.IN_FLIGHT, SkipReason.NO_PARENT)
_TRY_SLOWER = (
    SkipReason.FULL,
    SkipReason.TOO_LARGE,
    SkipReason.TENANT_QUOTA,
    SkipReason.FAILED,
    SkipReason.REFUSED,
    SkipReason.NO_PARENT,
    SkipReason.BACKPRESSURE,
)


async def store(
    core: Core,
    behind: WriteBehind,
    plans: Sequence[StorePlan],
    begun: Sequence[Begun] = (),
    last: LastRead | None = None,
) -> None:
    """Store the parts of each plan in order; ``plan.done`` gets one entry per part.

    Args:
        core: What movements need.
        behind: Takes the copies onwards.
        plans: What to store.
        begun: What is gathered already, ahead of the parts that the plans list; whoever began it
            rolls it back if this raises.
        last: Told, if it is wanted, as soon as all is gathered, or else left for the caller to
            tell. What a tier fails to write after that is skipped: nothing is left to read for
            another one.

    Raises:
        LayoutError: if a view does not fit its space.

    Cancellation: what was published stays; batches whose writing has begun become visible as well;
    others are rolled back once the worker thread or device that reads the caller's tensors is
    done.
    """
    flow = _Flow(core, behind)
    try:
        for item in begun:
            await flow.join(item)
        for batch in batches(core, plans, batch_bytes(core, plans)):
            await flow.put(batch)
            await asyncio.sleep(0)  # blocks that are present already take no await of their own
        if last is not None and last.wanted:
            await flow.let_go(last)
        await flow.drain()
    finally:
        await flow.abandon()


class _Flow:
    """The batches of one store that are under way, oldest first."""

    def __init__(self, core: Core, behind: WriteBehind) -> None:
        self._core = core
        self._behind = behind
        self._gathered: deque[Passage] = deque()
        self._launched: deque[Passage] = deque()
        self._last: dict[int, Writing] = {}
        self._before: Signal | None = None
        self._orphans = False  # whether a part was left behind for want of its parent
        self._gone = False  # whether the views may not be read any more

    async def put(self, batch: Sequence[Run]) -> None:
        """Start a batch; it may still be under way when this returns."""
        for run in batch:
            run.start()
        if any(run.plan.session_parts for run in batch):
            await self.drain()  # a session's quota counts what is published
        await self._go_on(await self._begin(self._core.levels[0], batch))

    async def join(self, begun: Begun) -> None:
        """Take over what is gathered already."""
        run = Run(begun.work.plan)
        run.parts = list(begun.parts)
        run.start()
        begun.work.announce()
        passage = Passage(begun.work.level, [run])
        passage.works, passage.gathers = [(run, begun.work)], begun.gathers
        passage.unfilled = [begun.work]
        self._gathered.append(passage)
        await self._go_on(passage)

    async def _go_on(self, passage: Passage) -> None:
        """Let the batches ahead of one that was gathered make room for the next."""
        for run, work in passage.works:
            work.previous = self._last.get(id(run.plan))
            self._last[id(run.plan)] = work
        if not passage.smooth or not passage.works:
            await self.drain()  # it will be tried elsewhere: first those before it
            return
        while self._gathered and (len(self._gathered) > 1 or not self._gathered[0].unfilled):
            await self._launch()
        while self._launched and (self._launched[0].job is None or len(self._launched) > _WRITES):
            await self._finish(self._launched.popleft())

    async def drain(self) -> None:
        """Bring every batch to its end."""
        while self._gathered or self._launched:
            while self._gathered:
                await self._launch()
            await self._finish(self._launched.popleft())
        self._last.clear()
        self._before = None

    async def let_go(self, last: LastRead) -> None:
        """Gather what is left to gather; tell it, unless some parts have to be read once more."""
        while self._gathered:
            await self._launch()
        if not all(passage.smooth for passage in self._launched):
            await self.drain()  # what was refused is read again, for another tier
        if last.again and self._orphans:
            return
        self._gone = True
        last.tell()

    async def abandon(self) -> None:
        """Roll back what was only gathered, once no copy touches it. What is written goes on."""
        left, self._gathered = self._gathered, deque()
        try:
            await settled(self._core, [gather for passage in left for gather in passage.gathers])
        finally:
            for work in (work for passage in left for work in passage.writings):
                if not work.handed_over:
                    work.abandon()

    # ------------------------------------------------------------------ one tier

    async def _begin(self, level: Level, batch: Sequence[Run]) -> Passage:
        """Reserve room, and have the KV copied there."""
        core = self._core
        passage = Passage(level, batch)
        self._gathered.append(passage)
        if core.hangs(level):
            for run in batch:
                run.note([PartOutcome(False, SkipReason.BACKPRESSURE, level.index)] * len(run.left))
            return passage
        for run in batch:
            if run.left:
                parts = [run.parts[i] for i in run.left]
                work = await reserve(core, self._behind, run.plan, level, parts)
                passage.works.append((run, work))
        await self._allocate(passage)
        moved = passage.unfilled = [work for work in passage.writings if work.device is not None]
        read = [work for work in passage.writings if work.device is None]
        if moved and _bytes(moved) < INLINE_BYTES:
            submit(moved, passage.gathers)
        elif moved:
            await core.workers.run(submit, moved, passage.gathers)
        await _build(core, read, passage.gathers)
        core.bytes_gathered += sum(work.raw_bytes() for work in passage.writings)
        return passage

    async def _allocate(self, passage: Passage) -> None:
        """Get memory; never wait for it while earlier batches keep theirs for no writer."""
        if await allocate(self._core, passage.writings, wait=len(self._gathered) == 1):
            return
        while self._gathered[0] is not passage:
            await self._launch()
        await allocate(self._core, passage.writings, wait=True)

    async def _launch(self) -> None:
        """Seal the oldest batch that was gathered; publish it, or have it written."""
        core, passage = self._core, self._gathered[0]
        level, writings = passage.level, passage.writings
        if passage.unfilled:
            await self._arrived(passage)
            await _build(core, passage.unfilled, passage.gathers)
            await self._arrived(passage)
        staged = []
        for work in writings:
            if isinstance(work, HostWriting) and level.memory is None:
                staged.append(work)
                continue
            work.publish()
            self._behind.copy_onwards(level, work.plan.space, work.published)
        if any(work.open for work in staged):
            before = self._before if level.index == 0 else None
            passage.job = core.workers.spawn(
                *(write_and_publish, core, self._behind, level, staged, before),
                name="store",
                lane=Lane.BACKGROUND,
            )
            if level.index == 0:
                self._before = passage.job.ended
            for work in staged:
                work.handed_over = True
        self._gathered.popleft()
        self._launched.append(passage)

    async def _arrived(self, passage: Passage) -> None:
        await arrived(self._core, passage.gathers)
        if self._core.closed:  # its memory and devices are going, or gone
            raise ClosedError("the engine was closed while this was under way")

    async def _settle(self, passage: Passage) -> None:
        """Wait for what writes a batch, and note what became of each part."""
        if passage.job is not None:
            if await self._core.landed(passage.level, passage.job.ended, writing=True):
                await passage.job.wait()
            else:  # the job has its own copy of the KV: it goes on without us
                for work in passage.writings:
                    work.leave()
        for run, work in passage.works:
            run.note(work.outcomes)

    # ------------------------------------------------------------------ the tiers in turn

    async def _finish(self, passage: Passage) -> None:
        """Try the slower tiers with what the first one did not take; each part goes to one."""
        core, batch = self._core, passage.batch
        await self._settle(passage)
        for level in () if self._gone else core.levels[passage.level.index :]:
            if level is not passage.level:
                await self._through(level, batch)
            busy = [new for run in batch for new in run.busy()]
            if busy or any(self._adopted(run) for run in batch):
                await self._wait_for(busy, level)  # for the others' outcome, then look again
                for run in batch:
                    self._leave(run, _WAIT_AND_SEE)
                await self._through(level, batch)
                for run in batch:
                    _accept_promoted(core, run)
            for run in batch:
                self._leave(run, _TRY_SLOWER)
            if not any(run.left for run in batch):
                break
        for run in batch:
            self._orphans |= any(o.skip is SkipReason.NO_PARENT for o in run.outcomes)
            run.plan.done.extend(zip(run.parts, run.outcomes, strict=True))
            _observe(core, run.outcomes)

    def _adopted(self, run: Run) -> bool:
        """Whether what was skipped for its parent's sake has a parent now: it was stored later."""
        orphan = run.orphan()
        if orphan is None or orphan.parent is None:
            return False
        state = self._core.decisions.state(orphan.parent, self._core.clock())
        return bool(state.tiers or state.pending)

    def _leave(self, run: Run, reasons: Sequence[SkipReason]) -> None:
        run.keep(reasons)
        if run.orphan() is not None and not self._adopted(run):
            run.left = []  # nothing before them was skipped for a reason worth another try

    async def _through(self, level: Level, batch: Sequence[Run]) -> None:
        """Bring what is left of a batch to its end in one tier."""
        while self._gathered:  # else they would keep memory that this may wait for
            await self._launch()
        await self._begin(level, batch)
        await self._launch()
        await self._settle(self._launched.pop())

    async def _wait_for(self, busy: Sequence[NewPart], level: Level) -> None:
        core = self._core
        for new in busy:
            signal = core.storing.get(new.part)
            if signal is None:
                continue
            pending = core.decisions.state(new.part, core.clock()).pending
            theirs = core.levels[pending[0]] if pending else level
            if not await core.landed(theirs, signal, writing=True):
                break  # theirs hangs: no need to ask each of them


def _accept_promoted(core: Core, run: Run) -> None:
    """Count a part as present that is in flight only because it is copied to this tier."""
    for index in run.left:
        outcome = run.outcomes[index]
        if outcome.skip is SkipReason.IN_FLIGHT:
            state = core.decisions.state(run.parts[index].part, core.clock())
            if state.exact and any(state.lossless):
                run.outcomes[index] = PartOutcome(False, None, outcome.tier)


async def _build(core: Core, works: Sequence[Writing], gathers: list[Gather]) -> None:
    """Build frames: on the loop if there is little to do, else in a worker thread.

    In one: two threads with half of a batch each took 1.1 to 1.4 times as long on two cores, for
    between sections they wait for each other's GIL.

    Args:
        core: What movements need.
        works: Whose frames.
        gathers: Gets the copies that have to follow.

    Cancellation: a thread is waited for until it is done with the block that it is at.
    """
    if _bytes(works) < INLINE_BYTES:
        _fill(works, gathers, never)
        return
    stopped = asks_to_stop()
    await core.workers.run(_fill, works, gathers, stopped)
    if stopped():  # not everything is built, and whoever cancelled us is about to be told
        await asyncio.sleep(0)
        raise asyncio.CancelledError


def _fill(works: Sequence[Writing], gathers: list[Gather], stopped: Callable[[], bool]) -> None:
    for work in works:
        work.fill(stopped)
    if not stopped():
        submit_last(works, gathers)


def _bytes(works: Sequence[Writing]) -> int:
    return sum(work.nbytes for work in works)


def _observe(core: Core, outcomes: Sequence[PartOutcome]) -> None:
    skips: dict[tuple[int, SkipReason], int] = {}
    for outcome in outcomes:
        if outcome.skip is not None:
            key = (outcome.tier, outcome.skip)
            skips[key] = skips.get(key, 0) + 1
    for (tier, reason), parts in skips.items():
        core.observer.skipped(tier=core.levels[tier].name, reason=reason.value, parts=parts)
