"""Two-phase stores and copies: reserve, then commit or roll back."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tierkv.decisions.evicting import TICK_PARTS, Room
from tierkv.decisions.index import EXACT, NO_ROW, PRIVATE
from tierkv.decisions.types import (
    Drop,
    EvictReason,
    MissReason,
    Outcome,
    Reservation,
    SkipReason,
    StoreItem,
)
from tierkv.errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId
    from tierkv.decisions.evicting import Evictor
    from tierkv.decisions.placement import Placement

__all__ = ["Storer"]

_PRESENT = Outcome(0)


class _Slot(NamedTuple):
    """One accepted item until it is committed or rolled back."""

    row: int
    generation: int
    nbytes: int
    item: StoreItem
    clock: int


class _Open(NamedTuple):
    """One reservation under way."""

    tier: int
    source: int | None
    slots: dict[int, _Slot]


@dataclass(slots=True)
class _Request:
    """Arguments of one reserve call, and what it has gathered so far."""

    tier: int
    tenant: int
    source: int | None
    demand: bool
    items: Sequence[StoreItem]
    session_left: int | None
    now: float
    clock: int
    slots: dict[int, _Slot]
    room: Room
    guarded: list[int] | None = None
    refused: int = 0
    dirty: bool = False


class Storer:
    """Decides what may be stored where."""

    __slots__ = ("_at", "_evictor", "_generation", "_number", "_open")

    def __init__(self, placement: Placement, evictor: Evictor) -> None:
        self._at = placement
        self._evictor = evictor
        self._generation = 0
        self._number = 0
        self._open: dict[int, _Open] = {}

    def seen(self, generation: int) -> None:
        """Continue numbering behind a generation found on a durable tier."""
        self._generation = max(self._generation, generation)

    def pending(self) -> list[tuple[int, int, int, int | None]]:
        """(row, tier, bytes, source) of everything being written."""
        return [
            (slot.row, held.tier, slot.nbytes, held.source)
            for held in self._open.values()
            for slot in held.slots.values()
        ]

    # ------------------------------------------------------------------ reserve

    def reserve(
        self,
        tier: int,
        items: Sequence[StoreItem],
        tenant: str,
        now: float,
        session_left: int | None,
        *,
        demand: bool,
        source: int | None,
    ) -> Reservation:
        """Decide about a chain of items; see :meth:`Decisions.reserve`."""
        at = self._at
        drops, owner = at.collect(), at.ledger.tenant(tenant)
        request = _Request(
            tier,
            owner,
            source,
            demand,
            items,
            session_left,
            now,
            at.clock,
            {},
            Room(tier, 0, owner, drops=drops),
        )
        if source is None:
            at.clock += len(items)
        outcomes: list[Outcome] = []
        broken: set[PartId] = set()
        for number, item in enumerate(items):
            if item.parent is not None and item.parent in broken:
                outcome = Outcome(0, SkipReason.NO_PARENT)
            else:
                outcome = self._decide(number, item, request)
            if outcome.skip is not None and outcome.skip is not SkipReason.IN_FLIGHT:
                broken.add(item.part)
                if request.dirty:
                    request.refused += item.nbytes
            outcomes.append(outcome)
        for row in request.guarded or ():
            at.unpin(row)
        handle = 0
        if request.slots:
            self._number += 1
            handle = self._number
            self._open[handle] = _Open(tier, source, request.slots)
        short = self._short(request) if request.dirty else 0
        return Reservation(handle, tuple(outcomes), tuple(drops), short)

    def _short(self, request: _Request) -> int:
        """Bytes missing for the whole rest of the chain, as far as it can ever fit."""
        ledger, tier, tenant = self._at.ledger, request.tier, request.tenant
        capacity, quota = ledger.capacity[tier], ledger.quota(tenant, tier)
        short = min(request.refused, capacity) - max(0, ledger.room(tier))
        if quota is not None:
            left = max(0, quota - ledger.usage(tenant, tier))
            short = max(short, min(request.refused, quota) - left)
        return max(1, short)

    def _decide(self, number: int, item: StoreItem, request: _Request) -> Outcome:
        at, index = self._at, self._at.index
        row = index.rows.get(item.part, NO_ROW)
        parent = NO_ROW
        if request.source is None and item.parent is not None:
            parent = index.rows.get(item.parent, NO_ROW)
            if parent < 0 or not at.whole(parent):
                return Outcome(0, SkipReason.NO_PARENT)
        if row >= 0:
            known = self._known(row, item, number, request)
            if known is not None:
                return known
        elif request.source is not None:
            return Outcome(0, SkipReason.FAILED)
        skip = self._refuse(row, item, request)
        if skip is not None:
            if skip in (SkipReason.TENANT_QUOTA, SkipReason.SESSION_QUOTA):
                row = index.rows.get(item.part, NO_ROW)
                if row < 0 or not index.resident[row]:
                    at.history.note(item.part, MissReason.QUOTA, request.tier, request.now)
            return Outcome(0, skip)
        return self._accept(number, item, parent, request)

    def _known(self, row: int, item: StoreItem, number: int, request: _Request) -> Outcome | None:
        """Outcome for a part that has a row, or None if it is to be stored."""
        index, bit = self._at.index, 1 << request.tier
        resident, pending = index.resident[row], index.pending[row]
        if pending & bit:
            return Outcome(0, SkipReason.IN_FLIGHT)
        if request.source is not None:
            if not resident >> request.source & 1:
                return Outcome(0, SkipReason.FAILED)
            return _PRESENT if resident & bit else None
        best = bool(index.flags[row] & EXACT and index.lossless[row])
        if resident and (best or not (item.exact and item.lossless)):
            until = inf if item.ttl is None else request.now + item.ttl
            self._at.touch(row, self._clock(number, item, request), until)
            return _PRESENT
        if pending:
            return Outcome(0, SkipReason.IN_FLIGHT)
        return None

    @staticmethod
    def _clock(number: int, item: StoreItem, request: _Request) -> int:
        # the root of a chain ends up as the most recent part; parts that stand alone (states,
        # windows) count for the more the later they are
        count = len(request.items)
        alone = item.parent is None and not (
            number + 1 < count and request.items[number + 1].parent == item.part
        )
        if request.source is not None:
            return max(0, request.clock - number)
        return request.clock + (number + 1 if alone else count - number)

    def _refuse(self, row: int, item: StoreItem, request: _Request) -> SkipReason | None:
        """Make room for an item, or say why there is none."""
        ledger, tier, tenant = self._at.ledger, request.tier, request.tenant
        if request.source is not None:
            tenant = self._at.index.tenant[row]
        nbytes = item.nbytes
        quota = ledger.quota(tenant, tier)
        if nbytes > ledger.capacity[tier] or (quota is not None and nbytes > quota):
            return SkipReason.TOO_LARGE
        if request.session_left is not None and nbytes > request.session_left:
            return SkipReason.SESSION_QUOTA
        if quota is not None and ledger.usage(tenant, tier) + nbytes > quota:
            if not self._make(nbytes, tenant, row, request, own=True):
                return SkipReason.TENANT_QUOTA
        if ledger.room(tier) < nbytes:
            rest = nbytes
            if request.demand and quota is None and request.session_left is None:
                rest += self._still_new(request, item)
            if not self._make(nbytes, tenant, row, request, rest=rest):
                return SkipReason.FULL
        return None

    def _still_new(self, request: _Request, item: StoreItem) -> int:
        """Bytes that the items behind ``item`` will need if all of them are stored."""
        rows, index, bit = self._at.index.rows, self._at.index, 1 << request.tier
        total, behind = 0, False
        for other in request.items:
            if behind:
                row = rows.get(other.part, NO_ROW)
                there = index.resident[row] | index.pending[row] if row >= 0 else 0
                if not there or (request.source is not None and not there & bit):
                    total += other.nbytes
            behind = behind or other is item
        return total

    def _make(
        self,
        nbytes: int,
        tenant: int,
        row: int,
        request: _Request,
        *,
        own: bool = False,
        rest: int = 0,
    ) -> bool:
        """Evict until ``nbytes`` fit; on the way, for ``rest`` bytes if so much can go."""
        ledger, tier, room = self._at.ledger, request.tier, request.room
        if request.guarded is None:
            self._guard(request)
        room.tenant, room.own, room.dirty = tenant, own, False
        room.target = nbytes
        room.reason = EvictReason.QUOTA if own else EvictReason.CAPACITY
        if not own:
            evictable = ledger.capacity[tier] - ledger.reserved[tier] - ledger.pinned[tier]
            if evictable < nbytes:
                return False  # in vain: evict nothing for it
            room.target = min(max(rest, nbytes), evictable)
        if not request.demand:
            index = self._at.index
            room.before = index.touched[row] if row >= 0 and index.resident[row] else -1
        done = self._evictor.make(room, request.now) or (not own and ledger.room(tier) >= nbytes)
        # nobody demotes for the sake of what nobody waits for
        request.dirty = request.dirty or (not done and room.dirty and request.demand)
        return done

    def _guard(self, request: _Request) -> None:
        """Keep the chain itself from being evicted to make room for the chain."""
        rows = self._at.index.rows
        names = [item.part for item in request.items]
        names += [item.parent for item in request.items if item.parent is not None]
        request.guarded = list({rows[name]: None for name in names if name in rows})
        for row in request.guarded:
            self._at.pin(row)

    def _accept(self, number: int, item: StoreItem, parent: int, request: _Request) -> Outcome:
        at, index, tier = self._at, self._at.index, request.tier
        row = index.rows.get(item.part, NO_ROW)
        if row < 0:
            row = index.add(item.part, parent, request.tenant)
        elif parent >= 0 and index.parent[row] < 0:
            index.link(row, parent)
        if request.source is None:
            self._generation += 1
            generation = self._generation
        else:
            generation = index.generation[row]
            at.hold(row)
        hole = index.first[row] >= 0 and not index.resident[row] | index.pending[row]
        index.pending[row] |= 1 << tier
        at.ledger.reserve(tier, index.tenant[row], item.nbytes)
        at.sync(row)
        if hole:
            at.refilled(row)
            at.spread(TICK_PARTS)
        if request.session_left is not None and request.source is None:
            request.session_left -= item.nbytes
        clock = self._clock(number, item, request)
        request.slots[number] = _Slot(row, generation, item.nbytes, item, clock)
        return Outcome(generation)

    # ------------------------------------------------------------------ the second phase

    def commit(
        self,
        handle: int,
        done: Sequence[int],
        now: float,
        charges: Sequence[int] | None,
        lossless: Sequence[bool] | None,
    ) -> list[Drop]:
        """Make written items visible; see :meth:`Decisions.commit`."""
        at, index = self._at, self._at.index
        if not done:
            return at.collect()
        held, real = self._check(handle, done, charges)
        tier, bit, source = held.tier, 1 << held.tier, held.source
        drops: list[Drop] = []
        for position, number in enumerate(done):
            slot = held.slots.pop(number)
            row, nbytes = slot.row, real[position]
            index.pending[row] &= ~bit
            if source is not None and index.resident[row]:
                if index.generation[row] != slot.generation:
                    drops.append(self._outdated(slot, tier, nbytes))
                    continue
            elif source is None:
                index.pending[row] |= bit  # the row stays while copies change
                drops += self._publish(row, slot, now)
                index.pending[row] &= ~bit
            index.generation[row] = slot.generation
            at.ledger.charge(tier, index.tenant[row], nbytes, slot.nbytes)
            fine = slot.item.lossless if lossless is None else lossless[position]
            at.place(row, tier, nbytes, lossless=fine, clock=slot.clock)
            if source is not None:
                at.unhold(row)
        if not held.slots:
            del self._open[handle]
        return drops + at.collect()

    def _outdated(self, slot: _Slot, tier: int, nbytes: int) -> Drop:
        """Give up a copy of a part that was replaced while it was being copied."""
        at, row = self._at, slot.row
        at.ledger.give_back(tier, at.index.tenant[row], slot.nbytes)
        at.settle(row)
        at.unhold(row)
        return Drop(slot.item.part, tier, slot.generation, nbytes, EvictReason.REPLACED)

    def _check(
        self, handle: int, numbers: Sequence[int], charges: Sequence[int] | None
    ) -> tuple[_Open, list[int]]:
        """Check a second phase before anything is changed; return the bytes of each item."""
        held = self._open.get(handle)
        if held is None or len(set(numbers)) != len(numbers):
            raise self._closed(handle, numbers)
        real: list[int] = []
        for position, number in enumerate(numbers):
            slot = held.slots.get(number)
            if slot is None:
                raise self._closed(handle, number)
            nbytes = slot.nbytes if charges is None else charges[position]
            if not 0 <= nbytes <= slot.nbytes:
                raise CapacityError(
                    f"item {number} of reservation {handle} took {nbytes} bytes, more than the"
                    f" {slot.nbytes} reserved for it; reserve the upper bound"
                )
            real.append(nbytes)
        return held, real

    @staticmethod
    def _closed(handle: int, number: object) -> ClosedError:
        return ClosedError(
            f"item {number} of reservation {handle} is not open: it was never reserved, or was"
            " committed or rolled back before"
        )

    def _publish(self, row: int, slot: _Slot, now: float) -> list[Drop]:
        """Take the place of older copies."""
        at, index, item = self._at, self._at.index, slot.item
        until = inf if item.ttl is None else now + item.ttl
        drops: list[Drop] = []
        if index.resident[row]:
            until = max(until, index.expiry[row])
        for tier in at.tiers if index.resident[row] else ():
            if index.resident[row] >> tier & 1:
                drop = at.drop(row, tier, EvictReason.REPLACED, now)
                if drop is not None:
                    drops.append(drop)
        flags = index.flags[row] & ~(EXACT | PRIVATE)
        flags |= EXACT if item.exact else 0
        flags |= PRIVATE if item.private else 0
        index.flags[row] = flags
        index.touched[row] = slot.clock
        at.live_until(row, until)
        return drops

    def rollback(
        self, handle: int, failed: Sequence[int], now: float, reason: SkipReason
    ) -> list[Drop]:
        """Give reserved bytes back; see :meth:`Decisions.rollback`."""
        at, index = self._at, self._at.index
        if not failed:
            return at.collect()
        held, _ = self._check(handle, failed, None)
        for number in failed:
            slot = held.slots.pop(number)
            row = slot.row
            index.pending[row] &= ~(1 << held.tier)
            at.ledger.give_back(held.tier, index.tenant[row], slot.nbytes)
            if reason is SkipReason.FAILED and not index.resident[row]:
                at.history.note(slot.item.part, MissReason.FAILED, held.tier, now)
            at.settle(row)
            if held.source is not None:
                at.unhold(row)
        if not held.slots:
            del self._open[handle]
        return at.collect()
