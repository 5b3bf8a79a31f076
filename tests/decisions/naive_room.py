"""Evictions, demotions, faults and time of the naive decision object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.decisions.naive_looking import Looking
from tests.decisions.naive_parts import LOOK_PAST, Part, Wish
from tierkv.decisions.types import (
    Demote,
    Drop,
    EvictReason,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId


class Making(Looking):
    # -------------------------------------------------------------- making room

    def make(self, wish: Wish, now: float) -> bool:
        passed: set[PartId] = set()
        while self.missing(wish) > 0:
            part = self.coldest(wish, passed)
            if part is None or (wish.before is not None and part.touched > wish.before):
                break
            fate, target = self.fate(part, wish, now)
            if fate == "drop":
                self.evict(part, wish, now)
            elif fate == "demote" and wish.propose:
                part.leaving.add(wish.tier)
                part.holds += 1
                part.uses += 1
                copy = part.copies[wish.tier]
                wish.demotes.append(
                    Demote(part.name, wish.tier, target, part.generation, copy.nbytes)
                )
            else:
                wish.dirty = wish.dirty or fate == "demote"
                passed.add(part.name)
                if len(passed) >= LOOK_PAST:
                    break
        last = len(self.tiers) - 1
        if wish.tier == last and wish.before is None and not wish.dirty:
            stuck = [p for p in self.everyone() if self.leaf(p, last) and self.blocked(p, last)]
            for part in sorted(stuck, key=lambda p: (p.touched, self.row(p.name)))[:LOOK_PAST]:
                if self.missing(wish) > 0 and self.may_take(part, wish):
                    self.evict_line(part, wish, now)
        return self.missing(wish) <= 0

    def missing(self, wish: Wish) -> int:
        free = self.room(wish.tier)
        if wish.own:
            free = (self.quota(wish.tenant, wish.tier) or 0) - self.usage(wish.tenant, wish.tier)
        return wish.target - free - sum(d.nbytes for d in wish.demotes)

    def may_take(self, part: Part, wish: Wish) -> bool:
        if part.tenant == wish.tenant:
            return True
        left = self.usage(part.tenant, wish.tier) - part.copies[wish.tier].nbytes
        safe = self.owner(part, wish.tier) is None or left >= self.protected(part.tenant, wish.tier)
        return not wish.own and (safe or wish.force)

    def coldest(self, wish: Wish, passed: set[PartId]) -> Part | None:
        best: Part | None = None
        tier = wish.tier
        for owner in self.owners[tier]:
            if wish.own and owner != wish.tenant:
                continue
            mine = [
                p
                for p in self.everyone()
                if self.leaf(p, tier)
                and self.owner(p, tier) == owner
                and not self.blocked(p, tier)
                and p.name not in passed
            ]
            if not mine:
                continue
            first = min(mine, key=lambda p: (p.copies[tier].rank, self.row(p.name)))
            if not self.may_take(first, wish):
                continue
            if best is None or first.copies[tier].rank < best.copies[tier].rank:
                best = first
        return best

    def fate(self, part: Part, wish: Wish, now: float) -> tuple[str, int]:
        if part.orphan or part.expiry <= now or wish.force:
            return "drop", -1
        mine = part.copies[wish.tier]
        slower = [t for t in part.copies if t > wish.tier]
        if slower and (not mine.lossless or any(part.copies[t].lossless for t in slower)):
            return "drop", -1
        for target in range(wish.tier + 1, len(self.tiers)):
            if target in part.pending:
                return "keep", -1
            if target not in part.copies and mine.nbytes <= self.capacity[target]:
                return "demote", target
        if len(part.copies) == 1 and self.children(part):
            return "keep", -1
        return "drop", -1

    def evict(self, part: Part, wish: Wish, now: float) -> None:
        reason = wish.reason
        if part.expiry <= now:
            reason = EvictReason.EXPIRED
        elif part.orphan:
            reason = EvictReason.ORPHANED
        drop = self.drop(part, wish.tier, reason, now)
        assert drop is not None
        wish.drops.append(drop)

    def evict_line(self, part: Part, wish: Wish, now: float) -> None:
        line = self.descendants(part)
        if any(p.uses or p.pending for p in line):
            return
        for member in line:
            for tier in sorted(member.copies):
                drop = self.drop(member, tier, EvictReason.ORPHANED, now)
                assert drop is not None
                wish.drops.append(drop)
        self.evict(part, wish, now)

    def descendants(self, part: Part) -> list[Part]:
        found: list[Part] = []
        for child in self.everyone():
            if child.parent == part.name:
                found += [*self.descendants(child), child]
        return found

    def make_room(
        self, tier: int, nbytes: int, tenant: str, now: float
    ) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        drops = self.collect()
        demotes: list[Demote] = []
        quota = self.quota(tenant, tier)
        if quota is not None:
            own = Wish(tier, min(nbytes, quota), tenant, EvictReason.QUOTA, propose=True, own=True)
            self.make(own, now)
            drops, demotes = drops + own.drops, own.demotes
        wish = Wish(tier, min(nbytes, self.capacity[tier]), tenant, propose=True, demotes=demotes)
        self.make(wish, now)
        self.tidy()
        return (*drops, *wish.drops), tuple(wish.demotes)

    def set_capacity(
        self, tier: int, capacity: int, now: float
    ) -> tuple[tuple[Drop, ...], tuple[Demote, ...]]:
        self.capacity[tier] = capacity
        drops = self.collect()
        wish = Wish(tier, 0, reason=EvictReason.SHRUNK, propose=True)
        self.make(wish, now)
        self.tidy()
        return (*drops, *wish.drops), tuple(wish.demotes)

    def cancel(self, demotes: Sequence[Demote]) -> None:
        for demote in demotes:
            part = self.parts.get(demote.part)
            if part is not None and part.generation == demote.generation:
                self.end_demotion(part, demote.source)
        self.tidy()

    def end_demotion(self, part: Part, tier: int) -> None:
        if tier in part.leaving:
            part.leaving.discard(tier)
            part.holds -= 1
            self.unuse(part)

    def dropped(
        self, parts: Sequence[tuple[PartId, int]], tier: int, reason: EvictReason, now: float
    ) -> list[Drop]:
        drops = []
        for name, generation in parts:
            part = self.parts.get(name)
            if part is None or part.generation != generation:
                continue
            self.end_demotion(part, tier)
            last = len(part.copies) == 1 and bool(self.children(part))
            if tier in part.copies and not part.uses and not last:
                drops.append(self.drop(part, tier, reason, now))
        self.tidy()
        return [d for d in drops if d is not None]

    # -------------------------------------------------------------- faults and time

    def invalidate(
        self, name: PartId, tier: int, generation: int, reason: EvictReason, now: float
    ) -> list[Drop]:
        drops: list[Drop | None] = [*self.collect()]
        part = self.parts.get(name)
        if part is not None and tier in part.copies and part.generation == generation:
            drops.append(self.drop(part, tier, reason, now))
        self.tidy()
        return [d for d in drops if d is not None]

    def forget(self, names: Sequence[PartId], reason: EvictReason, now: float) -> list[Drop]:
        drops: list[Drop | None] = [*self.collect()]
        for name in names:
            part = self.parts.get(name)
            for tier in sorted(part.copies) if part is not None else ():
                assert part is not None
                drops.append(self.drop(part, tier, reason, now))
        self.tidy()
        return [d for d in drops if d is not None]

    def tick(self, now: float) -> tuple[list[Drop], list[Demote]]:
        drops = self.collect()
        for part in self.everyone():
            if part.expiry <= now and part.copies and not part.uses and not part.pending:
                for tier in sorted(part.copies):
                    drop = self.drop(part, tier, EvictReason.EXPIRED, now)
                    assert drop is not None
                    drops.append(drop)
        self.tidy()
        demotes: list[Demote] = []
        for tier, limits in enumerate(self.tiers):
            leaving = sum(p.copies[tier].nbytes for p in self.everyone() if tier in p.leaving)
            busy = self.used(tier) + self.reserved(tier) - leaving
            if busy <= limits.high * self.capacity[tier]:
                continue
            target = self.capacity[tier] - int(limits.low * self.capacity[tier]) - leaving
            wish = Wish(tier, target, propose=True)
            self.make(wish, now)
            drops += wish.drops
            demotes += wish.demotes
        self.tidy()
        return drops, demotes
