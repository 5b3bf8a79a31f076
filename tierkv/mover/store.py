"""Stores: the caller's KV is gathered and encoded straight into the fastest tier that takes it.

Reserve, gather, seal, publish; a store that fails or is cancelled on the way was never visible.
When :func:`store` returns, the caller may overwrite its tensors. Several chains stored together
share one worker hop per batch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tierkv.decisions.types import SkipReason, StoreItem
from tierkv.mover.core import INLINE_BYTES, PATIENCE_S, SLICE_BYTES
from tierkv.mover.plans import PartOutcome
from tierkv.mover.writing import Writing, allocate, frame_bytes, write_and_publish

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.decisions.types import Reservation
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.plans import NewPart, StorePlan

__all__ = ["store"]

_BATCH_PARTS = 256
_DEMOTE_ROUNDS = 3
_WAIT_AND_SEE = (SkipReason.IN_FLIGHT, SkipReason.NO_PARENT)
_TRY_SLOWER = (
    SkipReason.FULL,
    SkipReason.TOO_LARGE,
    SkipReason.TENANT_QUOTA,
    SkipReason.FAILED,
    SkipReason.NO_PARENT,
    SkipReason.BACKPRESSURE,
)


class _Run:
    """Consecutive parts of one plan that travel together, and what became of them."""

    __slots__ = ("left", "outcomes", "parts", "plan")

    def __init__(self, plan: StorePlan) -> None:
        self.plan = plan
        self.parts: list[NewPart] = []
        self.outcomes: list[PartOutcome] = []
        self.left: list[int] = []

    def start(self) -> None:
        self.outcomes = [PartOutcome(False, SkipReason.FULL)] * len(self.parts)
        self.left = list(range(len(self.parts)))

    def note(self, got: Sequence[PartOutcome]) -> None:
        for index, outcome in zip(self.left, got, strict=True):
            self.outcomes[index] = outcome

    def busy(self) -> list[NewPart]:
        """Parts that somebody else is storing right now."""
        return [self.parts[i] for i in self.left if self.outcomes[i].skip is SkipReason.IN_FLIGHT]

    def keep(self, reasons: Sequence[SkipReason]) -> None:
        self.left = [i for i in range(len(self.parts)) if self.outcomes[i].skip in reasons]
        if self.left and self.outcomes[self.left[0]].skip is SkipReason.NO_PARENT:
            self.left = []  # nothing before them was skipped for a reason worth another try


async def store(core: Core, behind: WriteBehind, plans: Sequence[StorePlan]) -> None:
    """Store the parts of each plan in order; ``plan.done`` gets one entry per part.

    Cancellation: what was published stays; the batch under way is rolled back once the worker
    thread that reads the caller's tensors is done.
    """
    for batch in _batches(plans, min(SLICE_BYTES, core.window_bytes)):
        for run in batch:
            run.start()
        await _store_batch(core, behind, batch)
        for run in batch:
            run.plan.done.extend(zip(run.parts, run.outcomes, strict=True))
            _observe(core, run.outcomes)
        await asyncio.sleep(0)  # blocks that are present already take no await of their own


def _batches(plans: Sequence[StorePlan], limit: int) -> Iterator[list[_Run]]:
    batch: list[_Run] = []
    size = count = 0
    for plan in plans:
        run = _Run(plan)
        for new in plan.parts:
            nbytes = plan.space.layout.groups[new.group].raw_bytes(new.tokens)
            if count and (size + nbytes > limit or count == _BATCH_PARTS):
                yield [*batch, run] if run.parts else batch
                batch, run, size, count = [], _Run(plan), 0, 0
            run.parts.append(new)
            size += nbytes
            count += 1
        if run.parts:
            batch.append(run)
    if batch:
        yield batch


async def _store_batch(core: Core, behind: WriteBehind, batch: Sequence[_Run]) -> None:
    """Try the tiers from the fastest on; a part goes to the first that takes it."""
    for level in core.levels:
        await _store_level(core, behind, level, batch)
        busy = [new for run in batch for new in run.busy()]
        if busy:  # wait for the others' outcome, then look again
            for new in busy:
                signal = core.storing.get(new.part)
                if signal is not None and not await signal.wait(PATIENCE_S):
                    break  # theirs hangs: no need to ask each of them
            for run in batch:
                run.keep(_WAIT_AND_SEE)
            await _store_level(core, behind, level, batch)
            for run in batch:
                _accept_promoted(core, run)
        for run in batch:
            run.keep(_TRY_SLOWER)
        if not any(run.left for run in batch):
            return


def _accept_promoted(core: Core, run: _Run) -> None:
    """Count a part as present that is in flight only because it is copied to this tier."""
    for index in run.left:
        outcome = run.outcomes[index]
        if outcome.skip is SkipReason.IN_FLIGHT:
            state = core.decisions.state(run.parts[index].part, core.clock())
            if state.exact and any(state.lossless):
                run.outcomes[index] = PartOutcome(False, None, outcome.tier)


async def _store_level(
    core: Core, behind: WriteBehind, level: Level, batch: Sequence[_Run]
) -> None:
    if core.hangs(level):
        for run in batch:
            run.note([PartOutcome(False, SkipReason.BACKPRESSURE, level.index)] * len(run.left))
        return
    works: list[tuple[_Run, Writing]] = []
    try:
        for run in batch:
            if run.left:
                parts = [run.parts[i] for i in run.left]
                reservation = await _reserve(core, behind, run.plan, level, parts)
                works.append((run, Writing(core, run.plan, level, parts, reservation)))
        writings = [work for _, work in works]
        await allocate(core, writings)
        if sum(work.nbytes for work in writings) < INLINE_BYTES:
            _encode(writings)
        else:
            await core.workers.run(_encode, writings)
        if level.memory is not None:
            for work in writings:
                work.publish_in_memory()
        elif writings:
            job = core.workers.spawn(write_and_publish, core, level, writings, name="store")
            for work in writings:
                work.handed_over = True
            if await job.ended.wait(PATIENCE_S):
                await job.wait()
            else:  # the job has its own copy of the KV: it goes on without us
                for work in writings:
                    work.leave()
    finally:
        for _, work in works:
            if not work.handed_over:
                work.abandon()
    for run, work in works:
        run.note(work.outcomes)
        behind.copy_onwards(level, run.plan.space, work.published)


def _encode(writings: Sequence[Writing]) -> None:
    for work in writings:
        work.encode()


async def _reserve(
    core: Core,
    behind: WriteBehind,
    plan: StorePlan,
    level: Level,
    batch: Sequence[NewPart],
) -> Reservation:
    """Reserve room, demoting dirty victims first where that is what it takes."""
    pipeline = core.pipeline(plan.space, level)
    items = [
        StoreItem(
            part=new.part,
            parent=new.parent,
            root=plan.root,
            nbytes=level.backend.charge(frame_bytes(pipeline, new)),
            exact=plan.fidelity == "exact",
            lossless=pipeline.lossless,
            ttl=plan.ttl,
            private=new.private,
        )
        for new in batch
    ]
    patient = True
    for attempt in range(_DEMOTE_ROUNDS):
        reservation = core.reserve(
            level,
            items,
            tenant=plan.tenant,
            session=plan.session,
            session_bytes=core.decisions.session_bytes(plan.session_parts),
        )
        full = any(o.skip is SkipReason.FULL for o in reservation.outcomes)
        may_help = reservation.short or (full and behind.holding(level))
        if not (may_help and patient) or attempt == _DEMOTE_ROUNDS - 1:
            return reservation
        # what was taken is given back while we wait: others must not find it in flight for long
        taken = [i for i, o in enumerate(reservation.outcomes) if o.generation]
        if taken:
            core.rollback(reservation.id, taken, SkipReason.CLOSED)
        wanted = [i for i, o in enumerate(reservation.outcomes) if o.generation or o.skip]
        room = sum(items[i].nbytes for i in wanted)
        patient = await behind.make_room(level, room, plan.tenant)
    raise AssertionError("unreachable")


def _observe(core: Core, outcomes: Sequence[PartOutcome]) -> None:
    skips: dict[tuple[int, SkipReason], int] = {}
    for outcome in outcomes:
        if outcome.skip is not None:
            key = (outcome.tier, outcome.skip)
            skips[key] = skips.get(key, 0) + 1
    for (tier, reason), parts in skips.items():
        core.observer.skipped(tier=core.levels[tier].name, reason=reason.value, parts=parts)
