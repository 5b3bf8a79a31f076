"""One batch of copies from a memory tier to a slower one: reserve, verify, write, publish.

A demoted part is unpublished in the faster tier only after it was published in the slower one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import IoStatus, WriteItem
from tierkv.blocks import part_id, split_part
from tierkv.decisions.types import EvictReason, SkipReason, StoreItem
from tierkv.errors import CapacityError, CodecError
from tierkv.mover.core import stored_part
from tierkv.mover.staged import stage
from tierkv.pipeline import open_frame, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer, StoredPart
    from tierkv.decisions.types import Demote, Reservation
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level

__all__ = ["Copy", "copy_batch", "most_bytes"]

_HOPELESS = 3  # batches that a tier fails in a row before parts are let go instead of kept for it
_NO_ROOM = (SkipReason.FULL, SkipReason.TOO_LARGE, SkipReason.TENANT_QUOTA)


@dataclass(slots=True, eq=False)
class Copy:
    """One copy to make.

    Attributes:
        stored: What is copied.
        space: Its space.
        source: Memory tier it is in.
        target: Tier it goes to.
        demote: Set if the source copy goes away afterwards.
        settled: Whether it was made, or was given up.
    """

    stored: StoredPart
    space: Space
    source: int
    target: int
    demote: Demote | None = None
    settled: bool = False


class _Job(NamedTuple):
    """A copy that has room in the target: its number in the batch, its frame, and its new home."""

    number: int
    copy: Copy
    frame: memoryview
    room: Buffer | None  # None: the frame is written as it is
    source: Buffer


class _Prepared(NamedTuple):
    number: int
    stored: StoredPart
    buffer: Buffer


async def copy_batch(core: Core, batch: Sequence[Copy]) -> int:
    """Copy parts of one tier to one other; engine-owned.

    Returns:
        How many had room in the target and were not copied nevertheless.
    """
    source, target = core.levels[batch[0].source], core.levels[batch[0].target]
    reservation = _reserve(core, batch, target)
    left = {i for i, o in enumerate(reservation.outcomes) if o.generation}
    slices: list[Buffer] = []
    damaged: list[StoredPart] = []
    hopeless = False
    try:
        jobs = await _jobs(core, batch, sorted(left), source, target, slices)
        prepared, damaged = await core.workers.run(_prepare, core, jobs, target)
        items = [WriteItem(p.stored, p.buffer) for p in prepared]
        results = await core.write(target, items) if items else []
        for ready, result in zip(prepared, results, strict=True):
            if result.status is IoStatus.OK:
                left.discard(ready.number)
                core.commit(target, reservation.id, [ready.number], [ready.stored])
    except CapacityError:
        hopeless = True  # a frame larger than all staging memory can never be encoded anew
    finally:
        if left:
            core.rollback(reservation.id, sorted(left), SkipReason.CLOSED)
        for piece in slices:
            piece.release()
    for stored in damaged:
        core.damaged(stored.part, source.index, stored.generation, "checksum")
    hopeless = hopeless or target.failures >= _HOPELESS
    _leave_source(core, batch, reservation, target, hopeless=hopeless)
    return len(left)


def most_bytes(core: Core, copy: Copy, target: Level) -> int:
    """Most bytes that the copy may take in the target."""
    if core.levels[copy.source].chain == target.chain:
        return copy.stored.nbytes
    bound = core.pipeline(copy.space, target).max_bytes(split_part(copy.stored.part)[1])
    return max(bound, copy.stored.nbytes)


def _reserve(core: Core, batch: Sequence[Copy], target: Level) -> Reservation:
    items = []
    for copy in batch:
        stored = copy.stored
        group = split_part(stored.part)[1]
        same = core.levels[copy.source].chain == target.chain
        items.append(
            StoreItem(
                part=stored.part,
                parent=part_id(stored.parent, group) if stored.parent is not None else None,
                root=stored.root,
                nbytes=target.backend.charge(most_bytes(core, copy, target)),
                exact=stored.exact,
                lossless=stored.lossless and (same or core.pipeline(copy.space, target).lossless),
            )
        )
    source = core.levels[batch[0].source]
    reservation = core.reserve(target, items, tenant=batch[0].stored.tenant, source=source)
    skipped = [o.skip for o in reservation.outcomes if o.skip is not None]
    for reason in set(skipped):
        core.observer.skipped(tier=target.name, reason=reason.value, parts=skipped.count(reason))
    return reservation


async def _jobs(
    core: Core,
    batch: Sequence[Copy],
    numbers: Sequence[int],
    source: Level,
    target: Level,
    slices: list[Buffer],
) -> list[_Job]:
    """Find the source frames, which the reservation holds, and memory to encode them in."""
    assert source.memory is not None
    found = []
    for number in numbers:
        stored = batch[number].stored
        buffer = source.memory.borrow(stored.part, stored.generation)
        if buffer is not None:  # else a newer one took its place, and is queued itself
            found.append((number, batch[number], buffer))
    if source.chain != target.chain:
        slices += await stage(
            core.staging, [most_bytes(core, copy, target) for _, copy, _ in found]
        )
    rooms: list[Buffer | None] = list(slices) or [None] * len(found)
    return [
        _Job(number, copy, buffer.memory, room, buffer)
        for (number, copy, buffer), room in zip(found, rooms, strict=True)
    ]


def _prepare(
    core: Core, jobs: Sequence[_Job], target: Level
) -> tuple[list[_Prepared], list[StoredPart]]:
    """Verify each source frame and, where the chains differ, encode it anew. In a thread."""
    good: list[_Prepared] = []
    bad: list[StoredPart] = []
    for number, copy, frame, room, source in jobs:
        stored = copy.stored
        identity = (copy.space, stored.part, stored.generation, stored.root)
        try:
            header = open_frame(frame, *identity)
            verify(header, frame)
            if room is None:
                good.append(_Prepared(number, stored, source))
                continue
            done = core.pipeline(copy.space, target).transcode(header, frame, room.memory)
            header = open_frame(room.memory[: done.nbytes], *identity)
        except CodecError:
            bad.append(stored)
        else:
            good.append(_Prepared(number, stored_part(header), room))
    return good, bad


def _leave_source(
    core: Core,
    batch: Sequence[Copy],
    reservation: Reservation,
    target: Level,
    *,
    hopeless: bool,
) -> None:
    """Unpublish demoted parts in the faster tier, now that the slower one has them.

    Where the slower tier has no room, or fails again and again, the part is let go: it is a cache,
    and the faster tier must not fill up with what nobody will ever take.
    """
    now = core.clock()
    for copy, outcome in zip(batch, reservation.outcomes, strict=True):
        demote, copy.demote = copy.demote, None
        if demote is None:
            continue
        core.decisions.cancel_demote([demote], now)
        arrived = target.index in core.decisions.state(demote.part, now).tiers
        if arrived or outcome.skip in _NO_ROOM or hopeless:
            reason = EvictReason.DEMOTED if arrived else EvictReason.CAPACITY
            gone = [(demote.part, demote.generation)]
            core.free(core.decisions.dropped(gone, demote.source, reason, now))
