"""Recounts everything that is kept incrementally, and compares."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tierkv.decisions.index import ORPHAN
from tierkv.decisions.ruling import Ruled

if TYPE_CHECKING:
    from tierkv.decisions.matching import Matcher
    from tierkv.decisions.placement import Placement
    from tierkv.decisions.storing import Storer

__all__ = ["check", "check_victims"]


def _expect(what: str, kept: object, counted: object) -> None:
    if kept != counted:
        raise AssertionError(f"{what}: kept {kept}, counted {counted}")


def check(at: Placement, matcher: Matcher, storer: Storer) -> None:
    """Raise AssertionError at the first difference between what is kept and what is counted."""
    _check_bytes(at, storer)
    _check_counts(at, matcher, storer)
    _check_tree(at)
    _check_policies(at)


def _check_bytes(at: Placement, storer: Storer) -> None:
    index, ledger = at.index, at.ledger
    waiting = [(index.tenant[row], drop) for row, ds in at.deferred.items() for drop in ds]
    pinned_waiting = list(waiting)
    waiting += at.ready
    by_tenant: Counter[tuple[int, int]] = Counter()
    for tier in at.tiers:
        rows = [r for r in index.rows.values() if index.resident[r] >> tier & 1]
        charge = index.charge[tier]
        name = f"tier {ledger.tiers[tier].name!r}"
        used = sum(charge[r] for r in rows) + sum(d.nbytes for _, d in waiting if d.tier == tier)
        _expect(f"{name}: used bytes", ledger.used[tier], used)
        _expect(f"{name}: entries", ledger.entries[tier], len(rows))
        pinned = sum(charge[r] for r in rows if r in at.busy)
        pinned += sum(d.nbytes for _, d in pinned_waiting if d.tier == tier)
        _expect(f"{name}: pinned bytes", ledger.pinned[tier], pinned)
        leaving = sum(charge[r] for r, mask in at.leaving.items() if mask >> tier & 1)
        _expect(f"{name}: leaving bytes", ledger.leaving[tier], leaving)
        for row in rows:
            by_tenant[index.tenant[row], tier] += charge[row]
        reserved = 0
        for row, where, nbytes, _ in storer.pending():
            if where == tier:
                reserved += nbytes
                by_tenant[index.tenant[row], tier] += nbytes
        _expect(f"{name}: reserved bytes", ledger.reserved[tier], reserved)
    for tenant, drop in waiting:
        by_tenant[tenant, drop.tier] += drop.nbytes
    for tenant in range(len(ledger.names)):
        for tier in at.tiers:
            what = f"bytes of tenant {ledger.names[tenant]!r} in tier {tier}"
            _expect(what, ledger.usage(tenant, tier), by_tenant[tenant, tier])


def _check_counts(at: Placement, matcher: Matcher, storer: Storer) -> None:
    index = at.index
    pending = dict.fromkeys(index.rows.values(), 0)
    holds: Counter[int] = Counter()
    for row, tier, _, source in storer.pending():
        _expect(f"row {row} is pending twice in tier {tier}", pending[row] >> tier & 1, 0)
        pending[row] |= 1 << tier
        holds[row] += source is not None
    for row, mask in at.leaving.items():
        holds[row] += mask.bit_count()
    for row, mask in pending.items():
        _expect(f"row {row}: pending", index.pending[row], mask)
    _expect("holds", at.holds, {row: n for row, n in holds.items() if n})
    busy = Counter(matcher.leased_rows())
    busy.update(holds)
    _expect("busy counts", at.busy, {row: n for row, n in busy.items() if n})
    live = set(index.rows.values())
    stray = set(at.busy) - live | set(at.deferred) - set(at.busy)
    _expect("rows in use that are not there", stray, set())


def _check_tree(at: Placement) -> None:
    index = at.index
    for part, row in index.rows.items():
        _expect(f"name of row {row}", index.name(row), part)
        kids = list(index.kids(row))
        for kid in kids:
            _expect(f"parent of row {kid}", index.parent[kid], row)
        for tier in at.tiers:
            shown = sum(index.shown[kid] >> tier & 1 for kid in kids)
            _expect(f"row {row}: children in tier {tier}", index.children[tier][row], shown)
        mask = (index.resident[row] | index.pending[row]) & ~at.leaving.get(row, 0)
        _expect(f"row {row}: shown", index.shown[row], mask)
        _expect(f"row {row}: lossless copies", index.lossless[row] & ~index.resident[row], 0)
        alive = index.resident[row] | index.pending[row] or kids or row in at.busy
        _expect(f"row {row} stands for something", bool(alive), True)
        if not at.spreading:
            parent = index.parent[row]
            orphan = parent >= 0 and not at.whole(parent)
            _expect(f"row {row}: orphan", bool(index.flags[row] & ORPHAN), orphan)
    total = sum(1 for row in range(index.size) if index.parent[row] >= 0)
    linked = sum(1 for row in index.rows.values() if index.parent[row] >= 0)
    _expect("rows with a parent", total, linked)


def _check_policies(at: Placement) -> None:
    index = at.index
    last = len(at.tiers) - 1
    for row in index.rows.values():
        mask, wanted = index.resident[row], 0
        for tier in at.tiers:
            if mask >> tier & 1 and row not in at.busy and not index.children[tier][row]:
                wanted |= 1 << tier
        kept = any(index.resident[k] | index.pending[k] for k in index.kids(row))
        blocked = wanted == mask == 1 << last and kept
        _expect(f"row {row}: blocked by children elsewhere", row in at.blocked, blocked)
        _expect(f"row {row}: evictable", index.free[row], 0 if blocked else wanted)


def check_victims(at: Placement) -> None:
    """Check that each policy offers a victim where one may go, and that it may.

    Apart from :func:`check`: some policies put their queues in order when they are asked for a
    victim, so that asking shows in later choices, and a log would not replay.

    Raises:
        AssertionError: if one does not.
    """
    index = at.index
    for tier in at.tiers:
        coldest = {index.tenant[row] for row in index.rows.values() if index.free[row] >> tier & 1}
        for owner, policy in at.partitions[tier]:
            mine = {t for t in coldest if at.policy(t, tier) is policy}
            orders = policy.policies if isinstance(policy, Ruled) else (policy,)
            for order in orders:
                row = order.victim()
                what = f"partition {owner} of tier {tier} ({order.name}) offers a victim"
                _expect(what, row is not None, bool(mine))
                if row is not None:
                    free = index.free[row] >> tier & 1
                    _expect(f"victim {row} of tier {tier} is free", free, 1)
