"""Making room: whom to drop, whom to demote, and in which order."""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from tierkv.decisions.index import NO_ROW
from tierkv.decisions.types import EvictReason
from tierkv.decisions.victims import Room, Victims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Policy
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Demote, Drop

__all__ = ["Evictor", "Room"]

TICK_PARTS: Final = 1024
"""Parts that one tick handles at most."""
_LOOK_PAST: Final = 32  # copies that may not be dropped, past which a colder-first search goes
_LOOK_FURTHER: Final = 256  # ... before another rule gets its turn


class Evictor(Victims):
    """Decides what leaves a tier."""

    __slots__ = ()

    # ------------------------------------------------------------------ the search

    def missing(self, room: Room) -> int:
        """Bytes still missing."""
        ledger = self._at.ledger
        if room.own:
            quota = ledger.quota(room.tenant, room.tier) or 0
            free = quota - ledger.usage(room.tenant, room.tier)
        else:
            free = ledger.room(room.tier)
        return room.target - free - sum(d.nbytes for d in room.demotes)

    def make(self, room: Room, now: float) -> bool:
        """Drop (and propose) the coldest parts until ``room.target`` bytes are free.

        Returns:
            Whether the room is there (proposed demotions count as done).
        """
        missing = self.missing(room)
        for number in range(max(1, len(self._at.rules[room.tier]))):
            if missing > 0:
                room.rule = number
                missing = self._search(room, missing, now)
        if missing > 0 and room.before is None and not room.dirty and room.limit > 0:
            missing = self._unblock(room, missing, now)
        return missing <= 0

    def _search(self, room: Room, missing: int, now: float) -> int:
        """Go through victims in the order of one rule; the bytes still missing then."""
        at, tier = self._at, room.tier
        rules, partitions = at.rules[tier], at.partitions[tier]
        take = self.take_session if rules and rules[room.rule].sessions else self.take
        most = _LOOK_PAST if len(rules) < 2 else _LOOK_FURTHER
        # one order for all and no rules, as nearly always: what coldest() comes to then
        order = partitions[0][1] if len(partitions) == 1 and not (room.own or rules) else None
        if order is not None and tier == len(at.tiers) - 1:
            return self._drop_coldest(order, room, missing, now)
        before, touched = room.before, at.index.touched
        passed: list[tuple[Policy, int]] = []
        while missing > 0 and room.limit > 0 and len(passed) < most:
            if order is not None:
                first = order.victim()
                if first is None:
                    break
                policy, row = order, first
            else:
                found = self.coldest(room)
                if found is None:
                    break
                policy, row = found
            if before is not None and touched[row] > before:
                break
            room.missing = missing
            gained = take(row, room, now)
            if gained is None:
                policy.hold(row)
                passed.append((policy, row))
            else:
                missing -= gained
        for policy, row in passed:
            # dropping others may have changed or even removed it
            if self._at.index.free[row] >> room.tier & 1:
                policy.release(row)
        return missing

    def _drop_coldest(self, order: Policy, room: Room, missing: int, now: float) -> int:
        """As :meth:`_search`, where no tier is slower: what is offered may go, as fate() has it."""
        before, touched = room.before, self._at.index.touched
        victim, drop = order.victim, self.drop
        while missing > 0 and room.limit > 0:
            row = victim()
            if row is None or (before is not None and touched[row] > before):
                break
            missing -= drop(row, room, now)
        return missing

    def _unblock(self, room: Room, missing: int, now: float) -> int:
        """Let parts go that only children in other tiers keep: the children go with them."""
        at = self._at
        if room.tier != len(at.tiers) - 1:
            return missing
        touched = at.index.touched
        for row in nsmallest(_LOOK_PAST, at.blocked, key=lambda r: (touched[r], r)):
            if missing <= 0:
                break
            owner = at.index.tenant[row]
            left = at.ledger.usage(owner, room.tier) - at.index.charge[room.tier][row]
            if owner != room.tenant and (room.own or left < at.ledger.protected(owner, room.tier)):
                continue
            for descendant in self._idle_descendants(row):
                for tier in at.tiers:
                    if at.index.resident[descendant] >> tier & 1:
                        drop = at.drop(descendant, tier, EvictReason.ORPHANED, now)
                        if drop is not None:
                            room.drops.append(drop)
            if at.index.free[row] >> room.tier & 1:
                missing -= self.drop(row, room, now)
        return missing

    def _idle_descendants(self, row: int) -> list[int]:
        """All descendants that have a copy, leaves first; none at all if one is in use."""
        at, index = self._at, self._at.index
        order: list[int] = []
        stack = list(index.kids(row))
        while stack:
            node = stack.pop()
            if node in at.busy or index.pending[node]:
                return []
            order.append(node)
            stack.extend(index.kids(node))
        order.reverse()
        return order

    # ------------------------------------------------------------------ demotions

    def end_demotion(self, row: int, tier: int) -> bool:
        """End a proposal; False if there is none."""
        at = self._at
        if not at.leaving.get(row, 0) >> tier & 1:
            return False
        at.set_leaving(row, tier, leaving=False)
        at.unhold(row)
        return True

    def cancel(self, demotes: Sequence[Demote]) -> None:
        """Take proposals back: the parts may be evicted again."""
        index = self._at.index
        for demote in demotes:
            row = index.rows.get(demote.part, NO_ROW)
            if row >= 0 and index.generation[row] == demote.generation:
                self.end_demotion(row, demote.source)

    def dropped(
        self, parts: Sequence[tuple[PartId, int]], tier: int, reason: EvictReason, now: float
    ) -> list[Drop]:
        """Forget copies that nobody uses; what is leased or needed stays."""
        at, index = self._at, self._at.index
        drops: list[Drop] = []
        for part, generation in parts:
            row = index.rows.get(part, NO_ROW)
            if row < 0 or index.generation[row] != generation:
                continue
            self.end_demotion(row, tier)
            mask = index.resident[row]
            if not mask >> tier & 1 or row in at.busy:
                continue
            if mask == 1 << tier and index.has_live_child(row):
                continue
            drop = at.drop(row, tier, reason, now)
            if drop is not None:
                drops.append(drop)
        return drops

    # ------------------------------------------------------------------ room on request

    def make_room(
        self, tier: int, nbytes: int, tenant: int, now: float
    ) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        """See :meth:`Decisions.make_room`: the tenant's quota first, then the tier."""
        ledger = self._at.ledger
        drops = self._at.collect()
        demotes: list[Demote] = []
        quota = ledger.quota(tenant, tier)
        if quota is not None:
            target = min(nbytes, quota)
            own = Room(tier, target, tenant, EvictReason.QUOTA, propose=True, own=True)
            self.make(own, now)
            drops += own.drops
            demotes += own.demotes
        target = min(nbytes, ledger.capacity[tier])
        room = Room(tier, target, tenant, propose=True, demotes=demotes)
        self.make(room, now)
        return (*drops, *room.drops), tuple(demotes)

    def resize(
        self, tier: int, capacity: int, now: float
    ) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        """See :meth:`Decisions.set_capacity`."""
        self._at.ledger.capacity[tier] = capacity
        drops = self._at.collect()
        room = Room(tier, 0, reason=EvictReason.SHRUNK, propose=True)
        self.make(room, now)
        return (*drops, *room.drops), tuple(room.demotes)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        """See :meth:`Decisions.tick`."""
        drops = self._at.collect()
        expired = self.expire(now, TICK_PARTS)
        self._at.spread(TICK_PARTS)
        more, demotes = self.watermarks(now, TICK_PARTS - len(expired))
        return (*drops, *expired, *more), tuple(demotes)

    def expire(self, now: float, limit: int) -> list[Drop]:
        """Drop parts whose time is over; those in use wait for their leases."""
        at, index = self._at, self._at.index
        drops: list[Drop] = []
        for row in at.calendar.due(now, limit):
            mask, expiry = index.resident[row], index.expiry[row]
            if not mask and not index.pending[row]:
                continue
            if expiry > now:
                if expiry != float("inf"):
                    at.calendar.add(row, expiry)
                continue
            if row in at.busy or index.pending[row]:
                at.calendar.add(row, now + 0.25)
                continue
            for tier in at.tiers:
                if mask >> tier & 1:
                    drop = at.drop(row, tier, EvictReason.EXPIRED, now)
                    if drop is not None:
                        drops.append(drop)
        return drops

    def watermarks(self, now: float, limit: int) -> tuple[list[Drop], list[Demote]]:
        """Bring tiers above their high mark down to the low one."""
        ledger = self._at.ledger
        drops: list[Drop] = []
        demotes: list[Demote] = []
        for tier, limits in enumerate(ledger.tiers):
            capacity = ledger.capacity[tier]
            busy = ledger.used[tier] + ledger.reserved[tier] - ledger.leaving[tier]
            if limit <= 0 or busy <= limits.high * capacity:
                continue
            target = capacity - int(limits.low * capacity) - ledger.leaving[tier]
            room = Room(tier, target, propose=True, limit=limit)
            self.make(room, now)
            limit = room.limit
            drops += room.drops
            demotes += room.demotes
        return drops, demotes
