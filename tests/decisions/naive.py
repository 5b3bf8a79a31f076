"""The decision object as one would write it without caring about speed: full scans, no counters.

Ordered by LRU. Results are compared for equality with the real object's. Only two things are
taken from it: the row number that breaks ties, and the handles of leases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from tests.decisions.naive_parts import Part, Slot, Wish
from tests.decisions.naive_room import Making
from tierkv.decisions.types import (
    Drop,
    EvictReason,
    MissReason,
    Outcome,
    SkipReason,
    StoreItem,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId


@dataclass
class Call:
    """One reserve call and what it has gathered so far."""

    tier: int
    items: Sequence[StoreItem]
    tenant: str
    now: float
    session_left: int | None
    demand: bool
    source: int | None
    start: int
    slots: dict[int, Slot] = field(default_factory=dict)
    drops: list[Drop] = field(default_factory=list)
    broken: set[PartId | None] = field(default_factory=set)
    guarded: list[Part] | None = None
    dirty: bool = False
    refused: int = 0


class Naive(Making):
    # -------------------------------------------------------------- stores

    def reserve(
        self,
        tier: int,
        items: Sequence[StoreItem],
        tenant: str,
        now: float,
        session_left: int | None,
        demand: bool,
        source: int | None,
    ) -> tuple[dict[int, Slot], list[Outcome], list[Drop], int]:
        call = Call(tier, items, tenant, now, session_left, demand, source, self.clock)
        call.drops = self.collect()
        if source is None:
            self.clock += len(items)
        outcomes: list[Outcome] = []
        for number, item in enumerate(items):
            clock = self.clock_of(call, number, item)
            broken = item.parent in call.broken
            outcome = self.known(tier, item, source, clock, now, broken)
            if outcome is None:
                skip = self.refusal(call, number, item)
                if skip is not None:
                    outcome = Outcome(0, skip)
                else:
                    outcome = self.accept(call, number, item, clock)
            if outcome.skip is not None and outcome.skip is not SkipReason.IN_FLIGHT:
                call.broken.add(item.part)
                call.refused += item.nbytes if call.dirty else 0
            outcomes.append(outcome)
        for part in call.guarded or []:
            self.unuse(part)
        short = self.short(call) if call.dirty else 0
        self.tidy()
        return call.slots, outcomes, call.drops, short

    @staticmethod
    def clock_of(call: Call, number: int, item: StoreItem) -> int:
        if call.source is not None:
            return max(0, call.start - number)
        following = call.items[number + 1] if number + 1 < len(call.items) else None
        alone = item.parent is None and (following is None or following.parent != item.part)
        return call.start + (number + 1 if alone else len(call.items) - number)

    def refusal(self, call: Call, number: int, item: StoreItem) -> SkipReason | None:
        tier, part = call.tier, self.parts.get(item.part)
        owner = call.tenant if call.source is None or part is None else part.tenant
        quota = self.quota(owner, tier)
        if item.nbytes > self.capacity[tier] or (quota or inf) < item.nbytes:
            return SkipReason.TOO_LARGE
        skip = None
        if call.session_left is not None and item.nbytes > call.session_left:
            skip = SkipReason.SESSION_QUOTA
        if not skip and quota is not None and self.usage(owner, tier) + item.nbytes > quota:
            own = Wish(tier, item.nbytes, owner, EvictReason.QUOTA, own=True)
            skip = None if self.granted(call, own, item) else SkipReason.TENANT_QUOTA
        if skip is not None:
            if part is None or not part.copies:
                self.gone[item.part] = (MissReason.QUOTA, tier, call.now)
            return skip
        wish = Wish(tier, item.nbytes, owner)
        if self.missing(wish) > 0:
            if call.guarded is None:
                call.guarded = self.guard(call.items, tier)
            evictable = self.capacity[tier] - self.reserved(tier) - self.pinned(tier)
            if evictable < item.nbytes:
                return SkipReason.FULL
            if quota is None and call.session_left is None:
                later = [i for i in call.items[number + 1 :] if self.is_new(i, tier, call.source)]
                wish.target = min(item.nbytes + sum(i.nbytes for i in later), evictable)
                if later and not call.demand:
                    coldest = min(self.last_use(i) for i in [item, *later])
                    first = Wish(tier, wish.target, owner, before=coldest)
                    self.make(first, call.now)
                    call.drops += first.drops
                    wish.target = item.nbytes
        return None if self.granted(call, wish, item) else SkipReason.FULL

    def granted(self, call: Call, wish: Wish, item: StoreItem) -> bool:
        if self.missing(wish) <= 0:
            return True
        if call.guarded is None:
            call.guarded = self.guard(call.items, call.tier)
        if not call.demand:
            wish.before = self.last_use(item)
        done = self.make(wish, call.now)
        done = done or (not wish.own and self.room(call.tier) >= item.nbytes)
        call.drops += wish.drops
        call.dirty = call.dirty or (not done and wish.dirty and call.demand)
        return done

    def last_use(self, item: StoreItem) -> int:
        part = self.parts.get(item.part)
        return part.touched if part is not None and part.copies else -1

    def pinned(self, tier: int) -> int:
        in_use = [p for p in self.everyone() if p.uses]
        total = sum(p.copies[tier].nbytes for p in in_use if tier in p.copies)
        return total + sum(d.nbytes for p in in_use for d in p.waiting if d.tier == tier)

    def short(self, call: Call) -> int:
        tier, quota = call.tier, self.quota(call.tenant, call.tier)
        short = min(call.refused, self.capacity[tier]) - max(0, self.room(tier))
        if quota is not None:
            left = max(0, quota - self.usage(call.tenant, tier))
            short = max(short, min(call.refused, quota) - left)
        return max(1, short)

    def is_new(self, item: StoreItem, tier: int, source: int | None) -> bool:
        part = self.parts.get(item.part)
        if part is None or not part.there:
            return True
        return source is not None and tier not in part.copies and tier not in part.pending

    def known(
        self,
        tier: int,
        item: StoreItem,
        source: int | None,
        clock: int,
        now: float,
        broken: bool,
    ) -> Outcome | None:
        if broken and item.parent is not None:
            return Outcome(0, SkipReason.NO_PARENT)
        part = self.parts.get(item.part)
        if source is not None:
            if part is None:
                return Outcome(0, SkipReason.FAILED)
            if tier in part.pending:
                return Outcome(0, SkipReason.IN_FLIGHT)
            if source not in part.copies:
                return Outcome(0, SkipReason.FAILED)
            if any(drop.tier == tier for drop in part.waiting) and tier not in part.copies:
                return Outcome(0, SkipReason.IN_FLIGHT)
            return Outcome(0) if tier in part.copies else None
        if item.parent is not None:
            parent = self.parts.get(item.parent)
            if parent is None or not parent.there or parent.orphan:
                return Outcome(0, SkipReason.NO_PARENT)
        if part is None:
            return None
        if tier in part.pending:
            return Outcome(0, SkipReason.IN_FLIGHT)
        best = part.exact and any(c.lossless for c in part.copies.values())
        if part.copies and (best or not (item.exact and item.lossless)):
            self.touch(part, clock, inf if item.ttl is None else now + item.ttl)
            return Outcome(0)
        return Outcome(0, SkipReason.IN_FLIGHT) if part.pending else None

    def guard(self, items: Sequence[StoreItem], tier: int) -> list[Part]:
        last = len(self.tiers) - 1
        all_of_it = any(self.leaf(p, last) and self.blocked(p, last) for p in self.everyone())
        names = {i.part for i in items} | {i.parent for i in items if i.parent is not None}
        guarded = [self.parts[n] for n in names if n in self.parts]
        guarded = [p for p in guarded if tier in p.copies or all_of_it]
        for part in guarded:
            part.uses += 1
        return guarded

    def accept(self, call: Call, number: int, item: StoreItem, clock: int) -> Outcome:
        part = self.parts.setdefault(item.part, Part(item.part, tenant=call.tenant))
        if call.source is None:
            part.parent = part.parent or item.parent
            self.generation += 1
            generation = self.generation
            if call.session_left is not None:
                call.session_left -= item.nbytes
        else:
            generation = part.generation
            part.uses += 1
            part.holds += 1
        part.pending[call.tier] = item.nbytes
        call.slots[number] = Slot(part, generation, item.nbytes, item, clock)
        self.tidy()
        return Outcome(generation)

    def commit(
        self,
        handle: int,
        done: Sequence[int],
        now: float,
        charges: Sequence[int],
        lossless: Sequence[bool],
    ) -> list[Drop]:
        tier, source, slots = self.open[handle]
        drops: list[Drop] = []
        for number, nbytes, fine in zip(done, charges, lossless, strict=True):
            slot = slots.pop(number)
            part, item = slot.part, slot.item
            if source is not None and part.copies and part.generation != slot.generation:
                del part.pending[tier]
                part.holds -= 1
                self.unuse(part)
                drops.append(Drop(part.name, tier, slot.generation, nbytes, EvictReason.REPLACED))
                continue
            if source is None:
                until = inf if item.ttl is None else now + item.ttl
                part.expiry = max(until, part.expiry) if part.copies else until
                for other in sorted(part.copies):
                    drop = self.drop(part, other, EvictReason.REPLACED, now)
                    drops += [drop] if drop is not None else []
                part.exact, part.private = item.exact, item.private
                part.touched = slot.clock
            part.generation = slot.generation
            self.place(part, tier, nbytes, fine, slot.clock)
            del part.pending[tier]
            if source is not None:
                part.holds -= 1
                self.unuse(part)
        self.tidy()
        return drops + self.collect()

    def rollback(
        self, handle: int, failed: Sequence[int], now: float, reason: SkipReason
    ) -> list[Drop]:
        tier, source, slots = self.open[handle]
        for number in failed:
            part = slots.pop(number).part
            del part.pending[tier]
            if reason is SkipReason.FAILED and not part.copies:
                self.gone[part.name] = (MissReason.FAILED, tier, now)
            if source is not None:
                part.holds -= 1
                self.unuse(part)
        self.tidy()
        return self.collect()

    # -------------------------------------------------------------- restart

    def recover(
        self,
        tier: int,
        parts: Sequence[StoredPart],
        charges: Sequence[int],
        now: float,
        wall: float,
    ) -> list[Drop]:
        drops = []
        for stored, nbytes in sorted(
            zip(parts, charges, strict=True), key=lambda x: (x[0].generation, x[0].part)
        ):
            self.generation = max(self.generation, stored.generation)
            expiry = inf if stored.expires is None else now + (stored.expires - wall)
            reason = None
            part = self.parts.get(stored.part)
            if expiry <= now:
                reason = EvictReason.EXPIRED
            elif part is not None and part.copies and part.generation > stored.generation:
                reason = EvictReason.REPLACED
            if reason is not None:
                drops.append(Drop(stored.part, tier, stored.generation, nbytes, reason))
                continue
            part = self.parts.setdefault(stored.part, Part(stored.part, tenant=stored.tenant))
            for other in sorted(part.copies):
                if part.generation != stored.generation or other == tier:
                    drop = self.drop(part, other, EvictReason.REPLACED, now)
                    assert drop is not None
                    drops.append(drop)
            self.clock += 1
            part.generation, part.exact, part.expiry = stored.generation, stored.exact, expiry
            part.touched = self.clock
            self.place(part, tier, nbytes, stored.lossless, self.clock)
            if stored.parent is not None:
                name: PartId = stored.parent + stored.part[-2:]  # type: ignore[assignment]
                part.parent = name
        for part in self.everyone():
            if part.parent is not None and part.parent not in self.parts:
                self.parts[part.parent] = Part(part.parent, tenant=part.tenant)
        self.tidy()
        wish = Wish(tier, 0, force=True)
        self.make(wish, now)
        self.tidy()
        return [*drops, *wish.drops, *self.collect()]
