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
    drops: list[Drop]
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
        request = _Request(
            tier,
            at.ledger.tenant(tenant),
            source,
            demand,
            items,
            session_left,
            now,
            at.clock,
            {},
            at.collect(),
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
        return Reservation(handle, tuple(outcomes), tuple(request.drops), short)

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
            own = Room(tier, nbytes, tenant, EvictReason.QUOTA, own=True)
            if not self._make(own, row, request):
                return SkipReason.TENANT_QUOTA
        if ledger.room(tier) < nbytes and not self._make(Room(tier, nbytes, tenant), row, request):
            return SkipReason.FULL
        return None

    def _make(self, room: Room, row: int, request: _Request) -> bool:
        ledger, tier = self._at.ledger, room.tier
        self._guard(request)
        if (
            not room.own
            and ledger.room(tier) + ledger.used[tier] - ledger.pinned[tier] < room.target
        ):
            return False  # in vain: evict nothing for it
        if not request.demand:
            index = self._at.index
            room.before = index.touched[row] if row >= 0 and index.resident[row] else -1
        done = self._evictor.make(room, request.now)
        request.drops += room.drops
        # nobody demotes for the sake of what nobody waits for
        request.dirty = request.dirty or (not done and room.dirty and request.demand)
        return done

    def _guard(self, request: _Request) -> None:
        """Keep the chain itself from being evicted to make room for the chain."""
        if request.guarded is not None:
            return
        at, rows = self._at, self._at.index.rows
        request.guarded = []
        for item in request.items:
            names = (item.part,) if item.parent is None else (item.parent, item.part)
            for row in {rows[name] for name in names if name in rows}:
                at.pin(row)
                request.guarded.append(row)

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
        empty = not index.resident[row] | index.pending[row]
        index.pending[row] |= 1 << tier
        at.ledger.reserve(tier, index.tenant[row], item.nbytes)
        at.sync(row)
        if empty:
            at.refilled(row)
            at.spread(TICK_PARTS)
        if request.session_left is not None and request.source is None:
            request.session_left -= item.nbytes
        clock = self._clock(number, item, request)
        request.slots[number] = _Slot(row, generation, item.nbytes, item, clock)
        return Outcome(generation)

    # ------------------------------------------------------------------ the second phase

    def _take(self, handle: int, number: int) -> tuple[_Open, _Slot]:
        held = self._open.get(handle)
        slot = held.slots.pop(number, None) if held is not None else None
        if held is None or slot is None:
            raise self._closed(handle, number)
        if not held.slots:
            del self._open[handle]
        self._at.ledger.give_back(held.tier, self._at.index.tenant[slot.row], slot.nbytes)
        return held, slot

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
        real = self._real_charges(handle, done, charges)
        drops: list[Drop] = []
        for position, number in enumerate(done):
            opened, slot = self._take(handle, number)
            row, tier, nbytes = slot.row, opened.tier, real[position]
            fine = slot.item.lossless if lossless is None else lossless[position]
            if opened.source is None:
                drops += self._publish(row, slot, now)
            elif index.resident[row] and index.generation[row] != slot.generation:
                # replaced while it was being copied: the copy is of no use
                index.pending[row] &= ~(1 << tier)
                at.settle(row)
                at.unhold(row)
                drops.append(
                    Drop(slot.item.part, tier, slot.generation, nbytes, EvictReason.REPLACED)
                )
                continue
            index.generation[row] = slot.generation
            at.place(row, tier, nbytes, lossless=fine, clock=slot.clock)
            index.pending[row] &= ~(1 << tier)
            at.sync(row)
            if opened.source is not None:
                at.unhold(row)
        return drops + at.collect()

    def _real_charges(
        self, handle: int, done: Sequence[int], charges: Sequence[int] | None
    ) -> list[int]:
        """Check a commit before anything is changed; return the bytes of each item."""
        held = self._open.get(handle)
        slots = held.slots if held is not None else {}
        real: list[int] = []
        for position, number in enumerate(done):
            slot = slots.get(number)
            if slot is None or number in done[:position]:
                raise self._closed(handle, number)
            nbytes = slot.nbytes if charges is None else charges[position]
            if not 0 <= nbytes <= slot.nbytes:
                raise CapacityError(
                    f"item {number} of reservation {handle} took {nbytes} bytes, more than the"
                    f" {slot.nbytes} reserved for it; reserve the upper bound"
                )
            real.append(nbytes)
        return real

    @staticmethod
    def _closed(handle: int, number: int) -> ClosedError:
        return ClosedError(
            f"item {number} of reservation {handle} is not open: it was never reserved, or was"
            " committed or rolled back before"
        )

    def _publish(self, row: int, slot: _Slot, now: float) -> list[Drop]:
        """Take the place of older copies."""
        at, index, item = self._at, self._at.index, slot.item
        until = inf if item.ttl is None else now + item.ttl
        if index.resident[row]:
            until = max(until, index.expiry[row])
        drops: list[Drop] = []
        for tier in at.tiers:
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
        held = self._open.get(handle)
        for position, number in enumerate(failed):
            if held is None or number not in held.slots or number in failed[:position]:
                raise self._closed(handle, number)
        for number in failed:
            opened, slot = self._take(handle, number)
            row = slot.row
            index.pending[row] &= ~(1 << opened.tier)
            if reason is SkipReason.FAILED and not index.resident[row]:
                at.history.note(slot.item.part, MissReason.FAILED, opened.tier, now)
            at.settle(row)
            if opened.source is not None:
                at.unhold(row)
        return at.collect()
