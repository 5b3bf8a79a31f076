"""Room for a store: reserve it in a tier, and get memory for what has room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.buffers import StagingHeldError
from tierkv.chains import RAW
from tierkv.decisions.types import SkipReason, StoreItem
from tierkv.errors import CapacityError
from tierkv.mover.frames import HostWriting
from tierkv.mover.gathering import ResidentWriting
from tierkv.mover.holding import Reserved, frame_bytes
from tierkv.mover.staged import stage, stage_nowait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.types import Reservation
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.mover.writing import Writing
    from tierkv.pipeline import Pipeline

__all__ = ["allocate", "host_memory", "reserve", "reserve_once", "writing"]

_DEMOTE_ROUNDS = 3
_new: Final = tuple.__new__  # a named tuple's own constructor takes twice as long


def host_memory(plan: StorePlan) -> bool:
    """Whether the view can be read by the host: a device's stand-in is host memory, too."""
    return plan.device is None or plan.device.kind == "cpu"


def writing(reserved: Reserved, *, gathered: bool = False) -> Writing:
    """The way of these parts into this tier.

    Args:
        reserved: Room for them.
        gathered: Whether copies bring the KV although it is in host memory.
    """
    tier, device = reserved.level.resident, reserved.plan.device
    if tier is not None and tier.device is device and reserved.pipeline.chain == RAW:
        return ResidentWriting(reserved, tier)
    return HostWriting(reserved, gathered=gathered)


async def reserve(
    core: Core,
    behind: WriteBehind,
    plan: StorePlan,
    level: Level,
    batch: Sequence[NewPart],
) -> Writing:
    """Reserve room, demoting dirty victims first where that is what it takes."""
    patient = True
    for attempt in range(_DEMOTE_ROUNDS):
        reservation, pipeline = reserve_once(core, plan, level, batch)
        full = any(o.skip is SkipReason.FULL for o in reservation.outcomes)
        may_help = reservation.short or (full and behind.holding(level))
        if not (may_help and patient) or attempt == _DEMOTE_ROUNDS - 1:
            break
        # what was taken is given back while we wait: others must not find it in flight for long
        taken = [i for i, o in enumerate(reservation.outcomes) if o.generation]
        if taken:
            core.rollback(reservation.id, taken, SkipReason.CLOSED)
        outcomes = zip(batch, reservation.outcomes, strict=True)
        wanted = [new for new, o in outcomes if o.generation or o.skip]
        room = sum(level.backend.charge(frame_bytes(pipeline, new)) for new in wanted)
        patient = await behind.make_room(level, room, plan.tenant)
    return writing(Reserved(core, plan, level, batch, reservation, pipeline))


def reserve_once(
    core: Core, plan: StorePlan, level: Level, batch: Sequence[NewPart], pending: int = 0
) -> tuple[Reservation, Pipeline]:
    """Reserve what room there is. Atomic.

    Args:
        core: What movements need.
        plan: Whose parts they are.
        level: The tier.
        batch: The parts, in order.
        pending: Bytes that the session is storing already, which count for its quota, too.
    """
    pipeline = core.pipeline(plan.space, level)
    exact, lossless, root, ttl = plan.fidelity == "exact", pipeline.lossless, plan.root, plan.ttl
    sizes: dict[tuple[int, int], int] = {}  # by group and tokens: most have the same
    items: list[StoreItem] = []
    for new in batch:
        part, parent, _, group, _, tokens, private = new
        nbytes = sizes.get((group, tokens))
        if nbytes is None:
            nbytes = level.backend.charge(frame_bytes(pipeline, new))
            sizes[group, tokens] = nbytes
        fields = (part, parent, root, nbytes, exact, lossless, ttl, private)
        items.append(_new(StoreItem, fields))
    reservation = core.reserve(
        level,
        items,
        tenant=plan.tenant,
        session=plan.session,
        session_bytes=core.decisions.session_bytes(plan.session_parts) + pending,
    )
    return reservation, pipeline


async def allocate(core: Core, works: Sequence[Writing], *, wait: bool) -> bool:
    """Get memory for each reserved part; one acquisition of staging memory for all of them.

    Args:
        core: What movements need.
        works: What needs memory; asked again, it goes on where it stopped.
        wait: Whether to wait for staging memory.

    Returns:
        Whether everything has its memory now (or was skipped: it would never fit).
    """
    for work in works:
        work.allocate()
    wanted = [(work, index, size) for work in works for index, size in work.to_stage()]
    sizes = [size for _, _, size in wanted]
    try:
        if wait:
            slices = await stage(core.staging, sizes)
        else:
            found = stage_nowait(core.staging, sizes, background=False)
            if found is None:
                return False
            slices = found
    except CapacityError as error:
        held = isinstance(error, StagingHeldError)
        for work in {id(work): work for work, _, _ in wanted}.values():
            work.refuse(SkipReason.BACKPRESSURE if held else SkipReason.TOO_LARGE)
        return True
    for (work, index, _), piece in zip(wanted, slices, strict=True):
        work.take(index, piece)
    return True
