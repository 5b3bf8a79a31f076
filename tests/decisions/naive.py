"""The decision object as one would write it without caring about speed: lists and full scans.

Ordered by LRU. Results are compared for equality with the real object's. Only two things are
taken from it: the row number that breaks ties, and the handles of leases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from tierkv.decisions.history import MISS_OF_EVICTION
from tierkv.decisions.types import (
    Demote,
    Drop,
    EvictReason,
    Found,
    FoundPart,
    MissReason,
    Outcome,
    PartState,
    Query,
    SkipReason,
    StoreItem,
    TenantLimits,
    TierLimits,
)
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId

LOOK_PAST = 32


@dataclass
class Copy:
    nbytes: int
    lossless: bool
    rank: int


@dataclass
class Part:
    name: PartId
    parent: PartId | None = None
    tenant: str = ""
    exact: bool = False
    private: bool = False
    expiry: float = inf
    touched: int = 0
    generation: int = 0
    copies: dict[int, Copy] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    uses: int = 0
    holds: int = 0
    leaving: set[int] = field(default_factory=set)
    orphan: bool = False
    waiting: list[Drop] = field(default_factory=list)

    @property
    def there(self) -> bool:
        return bool(self.copies or self.pending)


@dataclass
class Slot:
    part: Part
    generation: int
    nbytes: int
    item: StoreItem
    clock: int


@dataclass
class Wish:
    """One attempt to make room."""

    tier: int
    target: int
    tenant: str | None = None
    reason: EvictReason = EvictReason.CAPACITY
    before: int | None = None
    propose: bool = False
    force: bool = False
    own: bool = False
    drops: list[Drop] = field(default_factory=list)
    demotes: list[Demote] = field(default_factory=list)
    dirty: bool = False


class Naive:
    def __init__(
        self,
        tiers: Sequence[TierLimits],
        tenants: dict[str, TenantLimits],
        row: Callable[[PartId], int],
    ) -> None:
        self.tiers = list(tiers)
        self.capacity = [t.capacity for t in tiers]
        self.tenants = tenants
        self.row = row
        self.parts: dict[PartId, Part] = {}
        self.clock = 0
        self.generation = 0
        self.leases: dict[int, list[Part]] = {}
        self.open: dict[int, tuple[int, int | None, dict[int, Slot]]] = {}
        self.ready: list[tuple[str, Drop]] = []
        self.gone: dict[PartId, tuple[MissReason, int, float]] = {}
        self.owners: list[list[str | None]] = [[None] for _ in tiers]

    # -------------------------------------------------------------- counting, always from scratch

    def everyone(self) -> list[Part]:
        return list(self.parts.values())

    def used(self, tier: int) -> int:
        resident = sum(p.copies[tier].nbytes for p in self.everyone() if tier in p.copies)
        waiting = sum(d.nbytes for p in self.everyone() for d in p.waiting if d.tier == tier)
        return resident + waiting + sum(d.nbytes for _, d in self.ready if d.tier == tier)

    def reserved(self, tier: int) -> int:
        return sum(p.pending.get(tier, 0) for p in self.everyone())

    def room(self, tier: int) -> int:
        return self.capacity[tier] - self.used(tier) - self.reserved(tier)

    def usage(self, tenant: str | None, tier: int) -> int:
        mine = [p for p in self.everyone() if p.tenant == tenant]
        total = sum(p.copies[tier].nbytes for p in mine if tier in p.copies)
        total += sum(p.pending.get(tier, 0) for p in mine)
        total += sum(d.nbytes for p in mine for d in p.waiting if d.tier == tier)
        return total + sum(d.nbytes for t, d in self.ready if d.tier == tier and t == tenant)

    def quota(self, tenant: str | None, tier: int) -> int | None:
        limits = self.tenants.get(tenant or "")
        return limits.quota.get(self.tiers[tier].name) if limits else None

    def protected(self, tenant: str, tier: int) -> int:
        limits = self.tenants.get(tenant)
        return limits.reserved.get(self.tiers[tier].name, 0) if limits else 0

    def owner(self, part: Part, tier: int) -> str | None:
        apart = self.quota(part.tenant, tier) is not None or self.protected(part.tenant, tier) > 0
        return part.tenant if apart else None

    def children(self, part: Part) -> list[Part]:
        return [p for p in self.everyone() if p.parent == part.name and p.there]

    def is_orphan(self, part: Part) -> bool:
        if part.parent is None:
            return False
        parent = self.parts[part.parent]
        return not parent.there or self.is_orphan(parent)

    def blocked(self, part: Part, tier: int) -> bool:
        last = len(self.tiers) - 1
        return tier == last and set(part.copies) == {last} and bool(self.children(part))

    def leaf(self, part: Part, tier: int) -> bool:
        if part.uses or tier not in part.copies:
            return False
        return not any(
            (tier in c.copies or tier in c.pending) and tier not in c.leaving
            for c in self.children(part)
        )

    # -------------------------------------------------------------- small changes

    def tidy(self) -> None:
        """Orphans rank first, whole parts where their last use puts them; the dead are forgotten."""
        for part in self.everyone():
            orphan = self.is_orphan(part)
            if orphan != part.orphan:
                part.orphan = orphan
                for copy in part.copies.values():
                    copy.rank = 0 if orphan else part.touched + 1
        for part in self.everyone():
            has_heirs = any(p.parent == part.name for p in self.everyone())
            if not part.there and not part.uses and not has_heirs:
                del self.parts[part.name]
                return self.tidy()
        return None

    def place(self, part: Part, tier: int, nbytes: int, lossless: bool, clock: int) -> None:
        owner = self.owner(part, tier)
        if owner not in self.owners[tier]:
            self.owners[tier].append(owner)
        part.copies[tier] = Copy(nbytes, lossless, 0 if part.orphan else clock + 1)

    def drop(self, part: Part, tier: int, reason: EvictReason, now: float) -> Drop | None:
        if tier in part.leaving:
            part.leaving.discard(tier)
            part.holds -= 1
            self.unuse(part)
        copy = part.copies.pop(tier)
        drop = Drop(part.name, tier, part.generation, copy.nbytes, reason)
        quiet = reason is EvictReason.REPLACED or (reason is EvictReason.REMOVED and part.private)
        if not part.copies and not quiet:
            self.gone[part.name] = (MISS_OF_EVICTION[reason], tier, now)
        if part.uses:
            part.waiting.append(drop)
            return None
        return drop

    def unuse(self, part: Part) -> None:
        part.uses -= 1
        if not part.uses:
            self.ready += [(part.tenant, d) for d in part.waiting]
            part.waiting = []

    def collect(self) -> list[Drop]:
        drops = [d for _, d in self.ready]
        self.ready = []
        return drops

    def touch(self, part: Part, clock: int, expiry: float) -> None:
        for copy in part.copies.values():
            copy.rank = clock + 1
        part.touched = clock
        part.expiry = max(part.expiry, expiry)

    # -------------------------------------------------------------- lookups

    def tier_of(self, name: PartId, query: Query, now: float) -> int | None:
        part = self.parts.get(name)
        if part is None or part.expiry <= now:
            return None
        fine = [t for t, c in part.copies.items() if query.lossy or (part.exact and c.lossless)]
        return min(fine, default=None)

    @staticmethod
    def name(query: Query, block: int, group: int) -> PartId:
        return query.keys[block] + group.to_bytes(2, "little")  # type: ignore[return-value]

    def needed(self, query: Query, blocks: int) -> list[tuple[int, int]]:
        end = query.tokens if blocks == len(query.keys) else blocks * query.block_tokens
        needed: list[tuple[int, int]] = []
        for group, rule in enumerate(query.groups):
            first = 0
            if rule.kind is GroupKind.STATE:
                first = blocks - 1
            elif rule.window is not None:
                first = max(0, end - (rule.window - 1)) // query.block_tokens
                first = blocks if rule.window == 1 else first
            needed += [(block, group) for block in range(first, blocks)]
        return sorted(needed)

    def lookup(self, query: Query, now: float, lease: int) -> Found:
        def there(block: int, group: int) -> bool:
            return self.tier_of(self.name(query, block, group), query, now) is not None

        best = max(
            n
            for n in range(len(query.keys) + 1)
            if n == 0 or all(there(b, g) for b, g in self.needed(query, n))
        )
        reason = None
        if best < len(query.keys):
            reason = self.why(self.first_missing(query, best, there), query.lossy, now)
        strict = [g for g, r in enumerate(query.groups) if r.kind.value in ("full", "latent")]
        needed = self.needed(query, best) if best else []
        parts = []
        for block, group in needed:
            part = self.parts[self.name(query, block, group)]
            tier = self.tier_of(part.name, query, now)
            assert tier is not None
            nbytes = part.copies[tier].nbytes
            parts.append(FoundPart(part.name, block, group, tier, part.generation, nbytes))
        if query.touch:
            until = inf if query.ttl is None else now + query.ttl
            size = len(query.keys)
            seen = []
            for block, group in ((b, g) for b in range(size) for g in strict):
                if not there(block, group):
                    break
                seen.append((block, group))
            for block, group in seen:
                self.touch(
                    self.parts[self.name(query, block, group)], self.clock + size - block, until
                )
            for block, group in needed:
                if group not in strict:
                    self.touch(
                        self.parts[self.name(query, block, group)], self.clock + block + 1, until
                    )
            self.clock += size
        if lease:
            self.leases[lease] = [self.parts[p.part] for p in parts]
            for part in self.leases[lease]:
                part.uses += 1
        tokens = query.tokens if best == len(query.keys) else best * query.block_tokens
        return Found(best, tokens if best else 0, tuple(parts), lease, reason)

    def first_missing(self, query: Query, best: int, there: Callable[[int, int], bool]) -> PartId:
        loose = []
        for group, rule in enumerate(query.groups):
            if rule.kind.value in ("full", "latent"):
                if not there(best, group):
                    return self.name(query, best, group)
            else:
                loose.append(group)
        for group in loose:
            mine = [b for b, g in self.needed(query, best + 1) if g == group]
            missing = [b for b in mine if not there(b, group)]
            if missing:
                return self.name(query, max(missing), group)
        raise AssertionError("a longer prefix is loadable")

    def why(self, name: PartId, lossy: bool, now: float) -> MissReason:
        part = self.parts.get(name)
        if part is not None and part.copies and part.expiry <= now:
            return MissReason.EXPIRED
        if part is not None and part.copies and not lossy:
            return MissReason.FIDELITY
        if part is not None and part.pending:
            return MissReason.PENDING
        if name in self.gone:
            return self.gone[name][0]
        return MissReason.NEVER_STORED if part is None else MissReason.HOLE

    def release(self, lease: int) -> list[Drop]:
        for part in self.leases.pop(lease, []):
            self.unuse(part)
        self.tidy()
        return self.collect()

    def state(self, name: PartId, now: float) -> PartState:
        part = self.parts.get(name)
        if part is not None and part.copies and part.expiry > now:
            tiers = tuple(sorted(part.copies))
            lossless = tuple(part.copies[t].lossless for t in tiers)
            return PartState(
                tiers,
                tuple(sorted(part.pending)),
                part.uses - part.holds,
                part.generation,
                part.exact,
                lossless,
            )
        pending = tuple(sorted(part.pending)) if part else ()
        leases = part.uses - part.holds if part else 0
        reason = self.why(name, True, now)
        gone = self.gone.get(name)
        if gone is not None and gone[0] is reason:
            return PartState((), pending, leases, reason=reason, tier=gone[1], ago=now - gone[2])
        ago = now - part.expiry if part and reason is MissReason.EXPIRED else None
        return PartState((), pending, leases, reason=reason, ago=ago)

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
        drops = self.collect()
        start = self.clock
        if source is None:
            self.clock += len(items)
        outcomes: list[Outcome] = []
        slots: dict[int, Slot] = {}
        broken: set[PartId | None] = set()
        guarded: list[Part] | None = None
        dirty, refused = False, 0
        for number, item in enumerate(items):
            alone = item.parent is None and not (
                number + 1 < len(items) and items[number + 1].parent == item.part
            )
            clock = start + (number + 1 if alone else len(items) - number)
            clock = max(0, start - number) if source is not None else clock
            outcome = self.known(tier, item, source, clock, now, item.parent in broken)
            if outcome is None:
                part = self.parts.get(item.part)
                owner = tenant if source is None or part is None else part.tenant
                quota = self.quota(owner, tier)
                skip = None
                wishes = []
                if item.nbytes > self.capacity[tier] or (quota or inf) < item.nbytes:
                    skip = SkipReason.TOO_LARGE
                elif session_left is not None and item.nbytes > session_left:
                    skip = SkipReason.SESSION_QUOTA
                else:
                    if quota is not None and self.usage(owner, tier) + item.nbytes > quota:
                        wish = Wish(tier, item.nbytes, owner, EvictReason.QUOTA, own=True)
                        wishes.append((wish, SkipReason.TENANT_QUOTA))
                    wishes.append((Wish(tier, item.nbytes, owner), SkipReason.FULL))
                for wish, refusal in wishes:
                    if skip is not None or self.missing(wish) <= 0:
                        continue
                    if guarded is None:
                        guarded = self.guard(items, tier)
                    in_use = [p for p in self.everyone() if p.uses]
                    pinned = sum(p.copies[tier].nbytes for p in in_use if tier in p.copies)
                    pinned += sum(d.nbytes for p in in_use for d in p.waiting if d.tier == tier)
                    if not wish.own and self.capacity[tier] - self.reserved(tier) - pinned < (
                        item.nbytes
                    ):
                        skip = refusal
                        continue
                    if not wish.own:
                        later = items[number + 1 :] if demand and quota is None else []
                        later = [] if session_left is not None else later
                        rest = sum(i.nbytes for i in later if self.is_new(i, tier, source))
                        evictable = self.capacity[tier] - self.reserved(tier) - pinned
                        wish.target = min(item.nbytes + rest, evictable)
                    if not demand:
                        wish.before = part.touched if part is not None and part.copies else -1
                    done = self.make(wish, now)
                    done = done or (not wish.own and self.room(tier) >= item.nbytes)
                    drops += wish.drops
                    if not done:
                        skip = refusal
                        dirty = dirty or (wish.dirty and demand)
                if skip in (SkipReason.SESSION_QUOTA, SkipReason.TENANT_QUOTA):
                    part = self.parts.get(item.part)
                    if part is None or not part.copies:
                        self.gone[item.part] = (MissReason.QUOTA, tier, now)
                if skip is not None:
                    outcome = Outcome(0, skip)
                else:
                    outcome = self.accept(number, item, tier, tenant, source, clock, slots)
                    if session_left is not None and source is None:
                        session_left -= item.nbytes
                    self.tidy()
            if outcome.skip is not None and outcome.skip is not SkipReason.IN_FLIGHT:
                broken.add(item.part)
                refused += item.nbytes if dirty else 0
            outcomes.append(outcome)
        for part in guarded or []:
            self.unuse(part)
        short = 0
        if dirty:
            short = min(refused, self.capacity[tier]) - max(0, self.room(tier))
            quota = self.quota(tenant, tier)
            if quota is not None:
                left = max(0, quota - self.usage(tenant, tier))
                short = max(short, min(refused, quota) - left)
            short = max(1, short)
        self.tidy()
        return slots, outcomes, drops, short

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

    def accept(
        self,
        number: int,
        item: StoreItem,
        tier: int,
        tenant: str,
        source: int | None,
        clock: int,
        slots: dict[int, Slot],
    ) -> Outcome:
        part = self.parts.setdefault(item.part, Part(item.part, tenant=tenant))
        if source is None:
            part.parent = part.parent or item.parent
            self.generation += 1
            generation = self.generation
        else:
            generation = part.generation
            part.uses += 1
            part.holds += 1
        part.pending[tier] = item.nbytes
        slots[number] = Slot(part, generation, item.nbytes, item, clock)
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
