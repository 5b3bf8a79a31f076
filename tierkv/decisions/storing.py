"""The second phase of a store or copy: commit or roll back what was reserved."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tierkv.decisions.evicting import Room
from tierkv.decisions.index import EXACT, NO_ROW, ORPHAN, PRIVATE
from tierkv.decisions.reserving import Request, Reserver
from tierkv.decisions.types import Drop, EvictReason, MissReason, Reservation, SkipReason
from tierkv.errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.evicting import Evictor
    from tierkv.decisions.placement import Placement
    from tierkv.decisions.reserving import Slot
    from tierkv.decisions.types import StoreItem

__all__ = ["Storer"]


class _Open(NamedTuple):
    """One reservation under way."""

    tier: int
    source: int | None
    slots: dict[int, Slot]
    promotes: bool


class Storer:
    """Keeps reservations and brings them to an end."""

    __slots__ = ("_at", "_number", "_open", "_reserver")

    def __init__(self, placement: Placement, evictor: Evictor) -> None:
        self._at = placement
        self._reserver = Reserver(placement, evictor)
        self._number = 0
        self._open: dict[int, _Open] = {}

    def seen(self, generation: int) -> None:
        """Continue numbering behind a generation found on a durable tier."""
        self._reserver.generation = max(self._reserver.generation, generation)

    def pending(self) -> list[tuple[int, int, int, int | None]]:
        """(row, tier, bytes, source) of everything being written."""
        return [
            (row, held.tier, nbytes, held.source)
            for held in self._open.values()
            for row, _, nbytes, _, _ in held.slots.values()
        ]

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
        ahead: bool,
    ) -> Reservation:
        """See :meth:`Decisions.reserve`."""
        at = self._at
        drops, owner = at.collect(), at.ledger.tenant(tenant)
        room = Room(tier, 0, owner, drops=drops)
        request = Request(tier, owner, source, demand, items, session_left, now, at.clock, room)
        request.promotes = source is not None and source > tier and not (demand or ahead)
        outcomes = self._reserver.decide(request)
        handle = 0
        if request.slots:
            self._number += 1
            handle = self._number
            self._open[handle] = _Open(tier, source, request.slots, request.promotes)
            if request.promotes and drops:
                self._race(request, drops)
        short = self._reserver.short(request) if request.dirty else 0
        return Reservation(handle, tuple(outcomes), tuple(drops), short)

    def _race(self, request: Request, drops: Sequence[Drop]) -> None:
        """Watch who is asked for first: what is promoted, or what it pushed out."""
        at, rows = self._at, self._at.index.rows
        pushed = [rows[d.part] for d in drops if d.tier == request.tier and d.part in rows]
        at.guards[request.tier].begin([row for row, *_ in request.slots.values()], pushed)

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
        held = self._check(handle, done, charges)
        tier, bit, source = held.tier, 1 << held.tier, held.source
        gate, promotes = at.gates[tier], held.promotes
        drops: list[Drop] = []
        # nearly always one tenant's: the accounts are told of all at once
        owner, copies, taken, given = NO_ROW, 0, 0, 0
        for position, number in enumerate(done):
            row, generation, reserved, item, clock = slot = held.slots.pop(number)
            nbytes = reserved if charges is None else charges[position]
            if source is None:
                self._publish(row, item, clock, drops, now)  # it is pending: the row stays
            index.pending[row] &= ~bit
            if source is None:
                index.generation[row] = generation
            elif index.generation[row] != generation:
                # also where the newer one is gone already: what is known of the part is about it
                drops.append(self._outdated(slot, tier, nbytes))
                continue
            tenant = index.tenant[row]
            if tenant != owner:
                if copies:
                    at.ledger.charge(tier, owner, copies, taken, given)
                owner, copies, taken, given = tenant, 0, 0, 0
            copies, taken, given = copies + 1, taken + nbytes, given + reserved
            fine = item.lossless if lossless is None else lossless[position]
            at.place(row, item.part, tier, nbytes, fine, clock)
            if promotes:
                index.fresh[row] |= bit
                at.guards[tier].made += 1
            if gate is not None and nbytes != reserved:
                gate.wrote(nbytes - reserved, now)
            if source is not None:
                at.unhold(row)
        if copies:
            at.ledger.charge(tier, owner, copies, taken, given)
        if not held.slots:
            del self._open[handle]
        return drops + at.collect()

    def _outdated(self, slot: Slot, tier: int, nbytes: int) -> Drop:
        """Give up a copy of a part that was replaced while it was being copied."""
        at, (row, generation, reserved, item, _) = self._at, slot
        at.ledger.give_back(tier, at.index.tenant[row], reserved)
        at.settle(row, item.part)
        at.unhold(row)
        return Drop(item.part, tier, generation, nbytes, EvictReason.REPLACED)

    def _check(self, handle: int, numbers: Sequence[int], charges: Sequence[int] | None) -> _Open:
        """Check a second phase before anything is changed; return the reservation."""
        held, asked = self._open.get(handle), set(numbers)
        if held is None or len(asked) != len(numbers):
            raise self._closed(handle, numbers)
        if not asked <= held.slots.keys():
            raise self._closed(handle, next(n for n in numbers if n not in held.slots))
        for number, nbytes in zip(numbers, charges, strict=True) if charges is not None else ():
            _, _, most, _, _ = held.slots[number]
            if not 0 <= nbytes <= most:
                raise CapacityError(
                    f"item {number} of reservation {handle} took {nbytes} bytes, more than the"
                    f" {most} reserved for it; reserve the upper bound"
                )
        return held

    @staticmethod
    def _closed(handle: int, number: object) -> ClosedError:
        return ClosedError(
            f"item {number} of reservation {handle} is not open: it was never reserved, or was"
            " committed or rolled back before"
        )

    def _publish(
        self, row: int, item: StoreItem, clock: int, drops: list[Drop], now: float
    ) -> None:
        """Take the place of older copies; ``drops`` gets those that are to be freed."""
        at, index = self._at, self._at.index
        until = inf if item.ttl is None else now + item.ttl
        if index.resident[row]:
            until = max(until, index.expiry[row])
            for tier in at.tiers:
                if index.resident[row] >> tier & 1:
                    drop = at.drop(row, tier, EvictReason.REPLACED, now)
                    if drop is not None:
                        drops.append(drop)
        flags = index.flags[row] & ORPHAN
        if item.exact:
            flags |= EXACT
        if item.private:
            flags |= PRIVATE
        index.flags[row] = flags
        index.touched[row] = clock
        index.expiry[row] = until
        if until < inf:
            at.calendar.add(row, until)

    def rollback(
        self, handle: int, failed: Sequence[int], now: float, reason: SkipReason
    ) -> list[Drop]:
        """Give reserved bytes back; see :meth:`Decisions.rollback`."""
        at, index = self._at, self._at.index
        if not failed:
            return at.collect()
        held = self._check(handle, failed, None)
        gate = at.gates[held.tier]
        for number in failed:
            row, _, nbytes, item, _ = held.slots.pop(number)
            index.pending[row] &= ~(1 << held.tier)
            at.ledger.give_back(held.tier, index.tenant[row], nbytes)
            if gate is not None:
                gate.wrote(-nbytes, now)
            if reason is SkipReason.FAILED and not index.resident[row]:
                at.history.note(item.part, MissReason.FAILED, held.tier, now)
            at.settle(row, item.part)
            if held.source is not None:
                at.unhold(row)
        if not held.slots:
            del self._open[handle]
        return at.collect()
