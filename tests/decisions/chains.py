"""Short key chains and the items and queries over them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tierkv.blocks import BlockKey, PartId, part_id
from tierkv.decisions.core import Decisions
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import (
    Found,
    GroupRule,
    Query,
    Reservation,
    SkipReason,
    StoreItem,
    TierLimits,
)
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK = 4
FULL = (GroupRule(GroupKind.FULL),)


def root(tenant: str) -> BlockKey:
    return BlockKey(hashlib.sha256(tenant.encode()).digest())


def keys(path: Iterable[int], tenant: str = "t") -> list[BlockKey]:
    """Keys of a chain: equal beginnings of ``path`` give equal keys."""
    key, out = root(tenant), []
    for step in path:
        key = BlockKey(hashlib.sha256(key + step.to_bytes(4, "little")).digest())
        out.append(key)
    return out


def part(key: BlockKey, group: int = 0) -> PartId:
    return part_id(key, group)


def items(
    chain: Sequence[BlockKey],
    nbytes: int = 10,
    *,
    groups: Sequence[GroupRule] = FULL,
    start: int = 0,
    tenant: str = "t",
    exact: bool = True,
    lossless: bool = True,
    ttl: float | None = None,
    private: bool = False,
) -> list[StoreItem]:
    """Items of a chain from block ``start``, block by block, group by group."""
    out = []
    for block in range(start, len(chain)):
        for group, rule in enumerate(groups):
            strict = rule.kind in (GroupKind.FULL, GroupKind.LATENT)
            parent = part(chain[block - 1], group) if strict and block else None
            name = part(chain[block], group)
            out.append(StoreItem(name, parent, root(tenant), nbytes, exact, lossless, ttl, private))
    return out


def query(
    chain: Sequence[BlockKey],
    *,
    groups: Sequence[GroupRule] = FULL,
    tokens: int | None = None,
    lossy: bool = False,
    ttl: float | None = None,
    touch: bool = True,
    lease: bool = True,
    start: int = 0,
) -> Query:
    size = len(chain) * BLOCK if tokens is None else tokens
    return Query(tuple(chain), tuple(groups), BLOCK, size, lossy, ttl, touch, lease, start=start)


def decisions(*capacities: int, **options: object) -> Decisions:
    """Decisions over tiers named t0, t1, ... with LRU."""
    tiers = [TierLimits(f"t{i}", c) for i, c in enumerate(capacities)]
    return Decisions(tiers, **{"policy": Lru, **options})  # type: ignore[arg-type]


def reserved(reservation: Reservation) -> list[int]:
    """Numbers of the accepted items."""
    return [i for i, o in enumerate(reservation.outcomes) if o.generation]


def skips(reservation: Reservation) -> list[SkipReason | None]:
    return [o.skip for o in reservation.outcomes]


def store(
    d: Decisions, tier: int, wanted: Sequence[StoreItem], now: float = 0.0, tenant: str = "t"
) -> Reservation:
    """Reserve and commit at once."""
    reservation = d.reserve(tier, wanted, tenant=tenant, now=now)
    if reservation.id:
        d.commit(reservation.id, reserved(reservation), now)
    return reservation


def copy(
    d: Decisions, source: int, target: int, wanted: Sequence[StoreItem], now: float = 0.0
) -> Reservation:
    """Copy resident parts to another tier at once."""
    reservation = d.reserve(target, wanted, tenant="t", now=now, source=source)
    if reservation.id:
        d.commit(reservation.id, reserved(reservation), now)
    return reservation


def look(d: Decisions, chain: Sequence[BlockKey], now: float = 0.0, **options: object) -> Found:
    """Look up and give the lease back at once."""
    found = d.lookup(query(chain, **options), now)  # type: ignore[arg-type]
    d.release(found.lease, now)
    return found
