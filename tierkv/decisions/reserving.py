"""The first phase of a store or copy: what may be stored where, and at whose expense."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

from tierkv.decisions.evicting import TICK_PARTS, Room
from tierkv.decisions.index import EXACT, NO_ROW, ORPHAN, identify
from tierkv.decisions.types import EvictReason, MissReason, Outcome, SkipReason, StoreItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Admission
    from tierkv.blocks import PartId
    from tierkv.decisions.evicting import Evictor
    from tierkv.decisions.placement import Placement

__all__ = ["Request", "Reserver", "Slot"]

_new: Final = tuple.__new__  # a named tuple's own constructor takes twice as long
_PRESENT: Final = Outcome(0)
_WHY_NOT: Final = {
    SkipReason.TENANT_QUOTA: MissReason.QUOTA,
    SkipReason.SESSION_QUOTA: MissReason.QUOTA,
    SkipReason.REFUSED: MissReason.REFUSED,
}


Slot: TypeAlias = tuple[int, int, int, StoreItem, int]
"""One accepted item until it is committed or rolled back: row, generation, bytes, item, clock.

One is made and taken apart for each part that is stored: a plain tuple takes a third of the time.
"""


@dataclass(slots=True)
class Request:
    """One reserve call: its arguments, and what has been gathered so far.

    Attributes:
        tier: Where to.
        tenant: Who stores.
        source: Tier that is copied from, if it is a copy.
        demand: Whether somebody waits for it.
        items: The chain.
        session_left: Bytes left of the session's quota; None: no quota.
        now: Time.
        clock: Access clock before the call.
        room: The attempt to make room, reused for every item.
        slots: Accepted items by number.
        guarded: Rows of the chain that are pinned while room is made.
        refused: Bytes of the items refused since dirty parts were found in the way.
        dirty: Whether dirty parts were in the way.
        unlimited: Whether neither tenants nor the session have limits.
        promotes: Whether it is a promotion on a hit: the thrash guard watches it.
        kept_out: Whether the guard keeps it out where it needs room; None until that is asked.
    """

    tier: int
    tenant: int
    source: int | None
    demand: bool
    items: Sequence[StoreItem]
    session_left: int | None
    now: float
    clock: int
    room: Room
    slots: dict[int, Slot] = field(default_factory=dict)
    guarded: list[int] | None = None
    refused: int = 0
    dirty: bool = False
    unlimited: bool = False
    promotes: bool = False
    kept_out: bool | None = None


class Reserver:
    """Decides item by item.

    Attributes:
        generation: Generation given out last.
    """

    __slots__ = ("_at", "_evictor", "generation")

    def __init__(self, placement: Placement, evictor: Evictor) -> None:
        self._at = placement
        self._evictor = evictor
        self.generation = 0

    def decide(self, request: Request) -> list[Outcome]:
        """Decide about a chain, parents first."""
        at = self._at
        request.unlimited = at.ledger.unlimited and request.session_left is None
        if request.source is None:
            at.clock += len(request.items)
        outcomes: list[Outcome] = []
        broken: set[PartId] = set()
        for number, item in enumerate(request.items):
            if broken and item.parent is not None and item.parent in broken:
                outcome = Outcome(0, SkipReason.NO_PARENT)
            else:
                outcome = self._decide(number, item, request)
            if outcome.skip is not None and outcome.skip is not SkipReason.IN_FLIGHT:
                broken.add(item.part)
                request.refused += item.nbytes if request.dirty else 0
            outcomes.append(outcome)
        for row in request.guarded or ():
            at.unpin(row)
        return outcomes

    def short(self, request: Request) -> int:
        """Bytes missing for the whole rest of the chain, as far as it can ever fit."""
        ledger, tier, tenant = self._at.ledger, request.tier, request.tenant
        capacity, quota = ledger.capacity[tier], ledger.quota(tenant, tier)
        short = min(request.refused, capacity) - max(0, ledger.room(tier))
        if quota is not None:
            left = max(0, quota - ledger.usage(tenant, tier))
            short = max(short, min(request.refused, quota) - left)
        return max(1, short)

    def _decide(self, number: int, item: StoreItem, request: Request) -> Outcome:
        at, index = self._at, self._at.index
        get, above, nbytes = index.rows.get, item.parent, item.nbytes
        row = get(item.part, NO_ROW)
        parent = NO_ROW
        if above is not None and request.source is None:
            parent = get(above, NO_ROW)
            # in reach of a prefix, as whole() has it
            if parent < 0 or not (
                index.resident[parent] | index.pending[parent] and not index.flags[parent] & ORPHAN
            ):
                return Outcome(0, SkipReason.NO_PARENT)
        if row >= 0:
            known = self._known(row, item, number, request)
            if known is not None:
                return known
        elif request.source is not None:
            return Outcome(0, SkipReason.FAILED)
        ledger, tier = at.ledger, request.tier
        room = ledger.capacity[tier] - ledger.used[tier] - ledger.reserved[tier]
        gate = at.gates[tier]
        thrashes = request.promotes and nbytes > room and self._thrashes(request)
        if thrashes or (gate is not None and self._keeps_out(gate, row, item, room, request)):
            self._note(item.part, SkipReason.REFUSED, request)
            return Outcome(0, SkipReason.REFUSED)
        if nbytes > room or not request.unlimited:
            skip = self._refuse(row, number, item, request)
            if skip is not None:
                self._note(item.part, skip, request)
                return Outcome(0, skip)
            row = get(item.part, NO_ROW)  # room may have been made with its own row
        return self._accept(row, number, item, parent, request)

    def _thrashes(self, request: Request) -> bool:
        """Whether the thrash guard keeps out a promotion that needs room."""
        if request.kept_out is None:
            request.kept_out = self._at.guards[request.tier].refuses()
        return request.kept_out

    def _keeps_out(
        self, gate: Admission, row: int, item: StoreItem, room: int, request: Request
    ) -> bool:
        """Whether admission keeps an item out of a tier."""
        at, tier, nbytes = self._at, request.tier, item.nbytes
        if row >= 0 and at.index.resident[row] >> tier & 1:
            return False  # it is there already: a better copy takes its place
        if nbytes > at.ledger.capacity[tier]:
            return False  # there is a better reason
        victim = self._evictor.next_out(tier) if gate.compares and nbytes > room else None
        name = identify(item.part)
        return not gate.admit(name, nbytes, request.now, demand=request.demand, victim=victim)

    def _note(self, part: PartId, skip: SkipReason, request: Request) -> None:
        """Remember that a quota or admission kept a part out."""
        why = _WHY_NOT.get(skip)
        if why is not None:
            index = self._at.index
            row = index.rows.get(part, NO_ROW)
            if row < 0 or not index.resident[row]:
                self._at.history.note(part, why, request.tier, request.now)

    def _known(self, row: int, item: StoreItem, number: int, request: Request) -> Outcome | None:
        """Outcome for a part that has a row, or None if it is to be stored."""
        index, bit = self._at.index, 1 << request.tier
        resident, pending = index.resident[row], index.pending[row]
        if pending & bit:
            return Outcome(0, SkipReason.IN_FLIGHT)
        if request.source is not None:
            if not resident >> request.source & 1:
                return Outcome(0, SkipReason.FAILED)
            if resident & bit:
                return _PRESENT
            # a copy of this generation that was given up there, but is still being read, would
            # take the new one along when it is freed
            waiting = self._at.deferred.get(row)
            if waiting and any(drop.tier == request.tier for drop in waiting):
                return Outcome(0, SkipReason.IN_FLIGHT)
            return None
        best = bool(index.flags[row] & EXACT and index.lossless[row])
        worse = not (item.exact and item.lossless)
        # a copy in a tier that is out is worth a second one above it, if that is as good
        if resident and (worse or (best and resident & self._at.readable)):
            until = inf if item.ttl is None else request.now + item.ttl
            self._at.touch(row, self._clock(number, item, request), until)
            return _PRESENT
        if pending:
            return Outcome(0, SkipReason.IN_FLIGHT)
        return None

    def _clock(self, number: int, item: StoreItem, request: Request) -> int:
        # the root of a chain ends up as the most recent part; parts that stand alone (states,
        # windows) count for the more the later they are
        count = len(request.items)
        if item.parent is None and (
            number + 1 == count or request.items[number + 1].parent != item.part
        ):
            return request.clock + number + 1
        if self._at.step > 0:
            return request.clock + number + 1
        return request.clock + count - number

    def _refuse(
        self, row: int, number: int, item: StoreItem, request: Request
    ) -> SkipReason | None:
        """Make room for an item, or say why there is none."""
        ledger, tier, nbytes = self._at.ledger, request.tier, item.nbytes
        tenant = request.tenant if request.source is None else self._at.index.tenant[row]
        quota = ledger.quota(tenant, tier)
        if nbytes > ledger.capacity[tier] or (quota is not None and nbytes > quota):
            return SkipReason.TOO_LARGE
        if request.session_left is not None and nbytes > request.session_left:
            return SkipReason.SESSION_QUOTA
        over = quota is not None and ledger.usage(tenant, tier) + nbytes > quota
        if over and not self._make(nbytes, tenant, row, request, own=True):
            return SkipReason.TENANT_QUOTA
        if ledger.capacity[tier] - ledger.used[tier] - ledger.reserved[tier] < nbytes:
            alone = quota is not None or request.session_left is not None
            if not self._make(nbytes, tenant, row, request, number=None if alone else number):
                return SkipReason.FULL
        return None

    def _behind(self, request: Request, number: int) -> tuple[int, int]:
        """Bytes that the items behind a number will need, and the last use of their coldest."""
        index, bit, copies = self._at.index, 1 << request.tier, request.source is not None
        get, resident, pending, touched = (
            index.rows.get,
            index.resident,
            index.pending,
            index.touched,
        )
        total, coldest = 0, 1 << 62
        for other in request.items[number + 1 :]:
            row = get(other.part, NO_ROW)
            there = resident[row] | pending[row] if row >= 0 else 0
            if not there or (copies and not there & bit):
                total += other.nbytes
                used = touched[row] if there and resident[row] else -1  # as _last_use() has it
                if used < coldest:
                    coldest = used
        return total, coldest

    def _last_use(self, row: int) -> int:
        index = self._at.index
        return index.touched[row] if row >= 0 and index.resident[row] else -1

    def _make(
        self,
        nbytes: int,
        tenant: int,
        row: int,
        request: Request,
        *,
        own: bool = False,
        number: int | None = None,
    ) -> bool:
        """Evict until ``nbytes`` fit.

        Args:
            nbytes: Room wanted.
            tenant: For whom.
            row: Row of the item, or -1.
            request: The call.
            own: Whether the tenant's quota is in the way, not the tier's capacity.
            number: Of the item, if room for the rest of the chain may be made along with it;
                None where items behind it may meet a quota.
        """
        ledger, tier, room = self._at.ledger, request.tier, request.room
        if request.guarded is None:
            self._guard(request)
        room.tenant, room.own, room.dirty, room.target = tenant, own, False, nbytes
        room.reason = EvictReason.QUOTA if own else EvictReason.CAPACITY
        evictable = ledger.capacity[tier] - ledger.reserved[tier] - ledger.pinned[tier]
        if not own and evictable < nbytes:
            return False  # in vain: evict nothing for it
        last_use = self._last_use(row)
        room.before = None if request.demand else last_use
        if number is not None:
            rest, coldest = self._behind(request, number)
            room.target = min(nbytes + rest, evictable)
            if not request.demand and rest:
                # for all of them, only what is colder than each of them
                room.before = min(last_use, coldest)
                self._evictor.make(room, request.now)
                room.target, room.before = nbytes, last_use
        done = self._evictor.make(room, request.now) or (not own and ledger.room(tier) >= nbytes)
        # nobody demotes for the sake of what nobody waits for
        request.dirty = request.dirty or (not done and room.dirty and request.demand)
        return done

    def _guard(self, request: Request) -> None:
        """Keep the chain itself from being evicted to make room for the chain."""
        at, rows, resident = self._at, self._at.index.rows, self._at.index.resident
        bit = 1 << request.tier
        names = [item.part for item in request.items]
        names += [item.parent for item in request.items if item.parent is not None]
        found = {rows[name]: None for name in names if name in rows}
        # only what is in this tier can go, unless whole lines of descendants are at stake
        request.guarded = [row for row in found if resident[row] & bit or at.blocked]
        for row in request.guarded:
            at.pin(row)

    def _accept(
        self, row: int, number: int, item: StoreItem, parent: int, request: Request
    ) -> Outcome:
        at, index, tier, nbytes = self._at, self._at.index, request.tier, item.nbytes
        if row < 0:
            row = at.expect(item.part, parent, request.tenant, tier)
        else:
            self._expect(row, parent, request)
        if request.source is None:
            generation = self.generation = self.generation + 1
            if request.session_left is not None:
                request.session_left -= nbytes
        else:
            generation = index.generation[row]
        at.ledger.reserve(tier, index.tenant[row], nbytes)
        gate = at.gates[tier]
        if gate is not None:
            gate.wrote(nbytes, request.now)
        if request.source is not None:  # a copy is no use
            clock = request.clock - number if request.clock > number else 0
        elif item.parent is not None and at.step <= 0:
            clock = request.clock + len(request.items) - number  # as _clock() has it
        else:
            clock = self._clock(number, item, request)
        request.slots[number] = (row, generation, nbytes, item, clock)
        return _new(Outcome, (generation, None))

    def _expect(self, row: int, parent: int, request: Request) -> None:
        """Note that a part that has a row is being written."""
        at, index = self._at, self._at.index
        if parent >= 0 and index.parent[row] < 0:
            index.link(row, parent)
        if request.source is not None:
            at.hold(row)
        hole = index.first[row] >= 0 and not index.resident[row] | index.pending[row]
        index.pending[row] |= 1 << request.tier
        at.sync(row)
        if hole:
            at.refilled(row)
            at.spread(TICK_PARTS)
