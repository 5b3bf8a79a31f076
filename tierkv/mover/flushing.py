"""Flush: see that parts are on a medium that survives, and that the medium has really kept them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.mover.copies import Copy
from tierkv.mover.slices import sliced
from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from tierkv.blocks import PartId
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core

__all__ = ["FlushResult", "flush"]


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush made sure of.

    Attributes:
        durable: Parts that would survive a crash of the machine.
        missing: Parts that would not: there is no such tier, no room in it, or it fails.
    """

    durable: int
    missing: int


async def flush(core: Core, behind: WriteBehind, parts: Collection[PartId]) -> FlushResult:
    """Make these parts durable, as far as there are tiers and room for it.

    Conversions to other codec chains that are due for them are made first. A tier that is found to
    hang is not waited for: what is only there, or was on its way there, counts as missing.

    Returns:
        How many of them are durable now, and how many are not, wherever they are.

    Raises:
        BackendError: if a durable tier refuses to sync.
        ClosedError: if the engine is closed meanwhile.
    """
    start = core.clock()
    if core.decisions.compressing:
        await _convert(core, behind, list(parts))
    durable = [level for level in core.levels if level.backend.durable]
    if durable:
        copies = await _bring_onwards(core, behind, parts, durable[0].index)
        await behind.settled(copies, unless_hanging=True)
    tiers = {level.index for level in durable}
    # only what was written before the sync began is known to have reached the medium
    written = [part async for part in sliced(parts) if _is_in(core, part, tiers)]
    for level in durable:
        job = core.workers.spawn(core.flush, level, name="flush", lane=Lane.BACKGROUND)
        if await core.landed(level, job.ended, writing=True):
            await job.wait()
        else:
            tiers.discard(level.index)  # it hangs: nothing is known of what is in it
    safe = 0
    async for part in sliced(written):
        safe += _is_in(core, part, tiers)
    core.observer.operation(op="flush", tier="", seconds=core.clock() - start)
    return FlushResult(durable=safe, missing=len(parts) - safe)


async def _convert(core: Core, behind: WriteBehind, parts: Sequence[PartId]) -> None:
    """Have what is due converted where it is, also what is being copied at the moment."""
    wanted = set(parts)
    while True:
        await behind.recoder.settled(parts)
        now = core.clock()
        copies = [
            copy
            for copy in behind.under_way
            if copy.part in wanted and core.decisions.due(copy.part, now)
        ]
        await behind.settled(copies, unless_hanging=True)
        if not copies or not all(copy.settled for copy in copies):
            return


def _is_in(core: Core, part: PartId, tiers: Container[int]) -> bool:
    return any(tier in tiers for tier in core.decisions.state(part, core.clock()).tiers)


async def _bring_onwards(
    core: Core, behind: WriteBehind, parts: Iterable[PartId], target: int
) -> list[Copy]:
    """See that parts which are nowhere durable are on their way to ``target``."""
    durable = {level.index for level in core.levels if level.backend.durable}
    copies = []
    async for part in sliced(parts):
        copy = behind.find(part, target)
        if copy is None and not _is_in(core, part, durable):
            copy = _copy_of(core, part, target)
            if copy is not None:
                behind.add([copy])
        if copy is not None:
            copies.append(copy)
    return copies


def _copy_of(core: Core, part: PartId, target: int) -> Copy | None:
    """A copy of a part out of the fastest tier that has it; None if none has."""
    now = core.clock()
    state = core.decisions.state(part, now)
    if not state.tiers:
        return None
    tier = state.tiers[0]
    nbytes = core.levels[tier].backend.longest(state.nbytes[0])
    return Copy(part, state.generation, nbytes, tier, target, since=now)
