"""Parts and copies of the naive decision object; everything is counted from scratch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from tierkv.decisions.history import MISS_OF_EVICTION
from tierkv.decisions.types import (
    Demote,
    Drop,
    EvictReason,
    MissReason,
    StoreItem,
    TenantLimits,
    TierLimits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


class Parts:
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
        """Orphans rank first, whole parts by their last use; the dead are forgotten."""
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
