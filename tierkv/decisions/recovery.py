"""Rebuilding the index from what a durable tier still holds."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tierkv.blocks import part_id, split_part
from tierkv.decisions.evicting import Room
from tierkv.decisions.index import EXACT, NO_ROW
from tierkv.decisions.types import Drop, EvictReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import StoredPart
    from tierkv.decisions.evicting import Evictor
    from tierkv.decisions.placement import Placement
    from tierkv.decisions.storing import Storer

__all__ = ["recover"]


def recover(
    at: Placement,
    storer: Storer,
    evictor: Evictor,
    tier: int,
    parts: Sequence[StoredPart],
    charges: Sequence[int],
    now: float,
    wall: float,
) -> list[Drop]:
    """Take over the parts of one tier; see :meth:`Decisions.recover`."""
    index = at.index
    drops: list[Drop] = []
    kept: list[StoredPart] = []
    # a newer generation counts as used more recently; it also wins over an older duplicate
    order = sorted(range(len(parts)), key=lambda i: (parts[i].generation, parts[i].part))
    for number in order:
        stored, nbytes = parts[number], charges[number]
        storer.seen(stored.generation)
        expiry = inf if stored.expires is None else now + (stored.expires - wall)
        if expiry <= now:
            drops.append(Drop(stored.part, tier, stored.generation, nbytes, EvictReason.EXPIRED))
            continue
        tenant = at.ledger.tenant(stored.tenant)
        row = index.rows.get(stored.part, NO_ROW)
        if row < 0:
            row = index.add(stored.part, NO_ROW, tenant)
        elif index.resident[row] and index.generation[row] > stored.generation:
            drops.append(Drop(stored.part, tier, stored.generation, nbytes, EvictReason.REPLACED))
            continue
        else:
            drops += _replace(at, row, tier, stored.generation, now)
        at.clock += 1
        index.generation[row] = stored.generation
        # several processes that share a medium number for themselves: where copies of one number
        # are not of one kind, none of them passes for exact
        exact = stored.exact and (not index.resident[row] or index.flags[row] & EXACT)
        index.flags[row] = (index.flags[row] & ~EXACT) | (EXACT if exact else 0)
        index.touched[row] = at.clock
        index.expiry[row] = expiry
        if expiry < inf:
            at.calendar.add(row, expiry)
        at.ledger.charge(tier, tenant, 1, nbytes, 0)
        hole = not index.resident[row]
        at.place(row, stored.part, tier, nbytes, stored.lossless, at.clock)
        index.pending[row] &= ~(1 << tier)
        if hole:  # of parts that a faster tier kept
            at.refilled(row)
        kept.append(stored)
    _link(at, kept)
    at.spread(len(index) + 1)
    room = Room(tier, 0, force=True)
    evictor.make(room, now)
    return drops + room.drops + at.collect()


def _replace(at: Placement, row: int, tier: int, generation: int, now: float) -> list[Drop]:
    """Drop copies that a newer generation outdates; keep the row alive meanwhile."""
    index = at.index
    index.pending[row] |= 1 << tier
    drops: list[Drop] = []
    for other in at.tiers:
        older = index.generation[row] != generation or other == tier
        if index.resident[row] >> other & 1 and older:
            drop = at.drop(row, other, EvictReason.REPLACED, now)
            if drop is not None:
                drops.append(drop)
    return drops


def _link(at: Placement, kept: Sequence[StoredPart]) -> None:
    """Rebuild the tree; a parent that is nowhere leaves a hole that a later store can fill."""
    index = at.index
    for stored in kept:
        if stored.parent is None:
            continue
        row = index.rows.get(stored.part, NO_ROW)
        if row < 0 or index.parent[row] >= 0:
            continue
        name = part_id(stored.parent, split_part(stored.part)[1])
        parent = index.rows.get(name, NO_ROW)
        if parent < 0:
            parent = index.add(name, NO_ROW, index.tenant[row])
        index.link(row, parent)
        at.refresh(parent)
        at.refilled(parent)
