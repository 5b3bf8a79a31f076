"""Where every part is, and what follows when a copy comes or goes.

The one place that keeps index, byte accounts, policies, reasons and the tree in step. It takes no
decision of its own: :mod:`storing`, :mod:`matching` and :mod:`evicting` do.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final

from tierkv.decisions.expiry import Calendar
from tierkv.decisions.history import MISS_OF_EVICTION, History
from tierkv.decisions.index import NO_ROW, ORPHAN, PRIVATE, Index
from tierkv.decisions.ledger import Ledger
from tierkv.decisions.types import Drop, EvictReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.abc import Policy
    from tierkv.blocks import PartId
    from tierkv.decisions.types import TenantLimits, TierLimits

__all__ = ["Placement"]

_SHARED: Final = -1
_RESIZE: Final = 0.1  # change of a tier's size in parts that its policies are told of


class Placement:
    """State shared by the deciding parts.

    Attributes:
        index: Columns of all parts.
        ledger: Byte accounts.
        history: Why parts are gone.
        calendar: Rows with a TTL.
        clock: Number of accesses so far.
        epoch: Grows whenever a copy that a lookup may have counted on is taken away.
        busy: How often each row is leased or held; such rows cannot be evicted.
        holds: The part of ``busy`` that copies under way and demotions account for.
        leaving: Tiers from which a row is proposed for demotion.
        partitions: Per tier, (tenant or -1, policy).
        deferred: Copies given up while a row is leased: they are freed after the last lease.
        ready: (tenant, copy) whose last lease has ended, to be handed out.
        blocked: Rows of the last tier kept only by children that live in other tiers.
    """

    __slots__ = (
        "_factories",
        "_last",
        "_levels",
        "_lookup",
        "_orphans",
        "_parts",
        "blocked",
        "busy",
        "calendar",
        "clock",
        "deferred",
        "epoch",
        "history",
        "holds",
        "index",
        "leaving",
        "ledger",
        "partitions",
        "ready",
        "tiers",
    )

    def __init__(
        self,
        tiers: Sequence[TierLimits],
        policies: Sequence[Callable[[], Policy]],
        tenants: Mapping[str, TenantLimits] | None,
        default_limits: TenantLimits | None,
        history: int,
    ) -> None:
        self.tiers = range(len(tiers))
        self.index = Index(len(tiers))
        self.ledger = Ledger(tiers, tenants, default_limits)
        self.history = History(history)
        self.calendar = Calendar()
        self.clock = 0
        self.epoch = 0
        self.busy: dict[int, int] = {}
        self.holds: dict[int, int] = {}
        self.leaving: dict[int, int] = {}
        self.blocked: dict[int, None] = {}
        self.partitions: list[list[tuple[int, Policy]]] = [[(_SHARED, make())] for make in policies]
        self._factories = tuple(policies)
        self._lookup: list[dict[int, Policy]] = [{} for _ in tiers]
        # per tier: its bit, the children column, the policy of each tenant
        self._levels = tuple(
            (tier, 1 << tier, self.index.children[tier], self._lookup[tier]) for tier in self.tiers
        )
        self._last = 1 << (len(tiers) - 1)
        self._parts: list[float] = [0.0 for _ in tiers]
        self.deferred: dict[int, list[Drop]] = {}
        self.ready: list[tuple[int, Drop]] = []
        self._orphans: deque[PartId] = deque()

    # ------------------------------------------------------------------ policies

    def policy(self, tenant: int, tier: int) -> Policy:
        """Policy that orders a tenant's parts in a tier."""
        found = self._lookup[tier].get(tenant)
        if found is None:
            if self.ledger.separate(tenant, tier):
                found = self._factories[tier]()
                if self._parts[tier]:
                    found.resize(self._parts[tier])
                self.partitions[tier].append((tenant, found))
            else:
                found = self.partitions[tier][0][1]
            self._lookup[tier][tenant] = found
        return found

    def measure(self, tier: int) -> float | None:
        """Tell the policies of a tier its size in mean-sized parts, if that has changed by 10 %.

        Returns:
            The new size, or None if it has hardly changed.
        """
        ledger = self.ledger
        if not ledger.entries[tier] or not ledger.used[tier]:
            return None
        parts = ledger.capacity[tier] * ledger.entries[tier] / ledger.used[tier]
        if abs(parts - self._parts[tier]) <= _RESIZE * self._parts[tier]:
            return None
        self._parts[tier] = parts
        for _, policy in self.partitions[tier]:
            policy.resize(parts)
        return parts

    def touch(self, row: int, clock: int, expiry: float) -> None:
        """Count an access of a resident row, and let it live until ``expiry`` at least."""
        index = self.index
        lookup, tenant, mask = self._lookup, index.tenant[row], index.resident[row]
        tier = 0
        while mask:
            if mask & 1:
                lookup[tier][tenant].touch(row, clock)
            mask >>= 1
            tier += 1
        index.touched[row] = clock
        if expiry > index.expiry[row]:
            index.expiry[row] = expiry

    # ------------------------------------------------------------------ leases and holds

    def pin(self, row: int) -> None:
        """Keep a row's copies; counted."""
        count = self.busy.get(row, 0)
        self.busy[row] = count + 1
        if not count:
            index, pinned = self.index, self.ledger.pinned
            mask, tier = index.resident[row], 0
            while mask:
                if mask & 1:
                    pinned[tier] += index.charge[tier][row]
                mask >>= 1
                tier += 1
            if index.free[row] or row in self.blocked:
                self.refresh(row)

    def unpin(self, row: int) -> None:
        """Undo one :meth:`pin`; the last one frees what waited for it."""
        count = self.busy[row] - 1
        if count:
            self.busy[row] = count
            return
        del self.busy[row]
        index, pinned = self.index, self.ledger.pinned
        mask, tier = index.resident[row], 0
        while mask:
            if mask & 1:
                pinned[tier] -= index.charge[tier][row]
            mask >>= 1
            tier += 1
        if self.deferred and row in self.deferred:
            for drop in self.deferred.pop(row):
                pinned[drop.tier] -= drop.nbytes
                self.ready.append((index.tenant[row], drop))
        if index.resident[row]:
            self.refresh(row)
        else:
            self.prune(row)

    def hold(self, row: int) -> None:
        """Pin a row for a copy or a demotion under way."""
        self.pin(row)
        self.holds[row] = self.holds.get(row, 0) + 1

    def unhold(self, row: int) -> None:
        """Undo one :meth:`hold`."""
        count = self.holds[row] - 1
        if count:
            self.holds[row] = count
        else:
            del self.holds[row]
        self.unpin(row)

    def set_leaving(self, row: int, tier: int, *, leaving: bool) -> None:
        """Mark a copy as proposed for demotion: its parent may follow before it is gone."""
        bit = 1 << tier
        mask = self.leaving.get(row, 0)
        nbytes = self.index.charge[tier][row]
        if leaving:
            self.leaving[row] = mask | bit
            self.ledger.leaving[tier] += nbytes
        else:
            self.ledger.leaving[tier] -= nbytes
            if mask == bit:
                del self.leaving[row]
            else:
                self.leaving[row] = mask & ~bit
        self.sync(row)

    def collect(self) -> list[Drop]:
        """Take the copies whose last lease has ended; their bytes are free from now on."""
        ready, self.ready = self.ready, []
        for tenant, drop in ready:
            self.ledger.discharge(drop.tier, tenant, drop.nbytes)
        return [drop for _, drop in ready]

    # ------------------------------------------------------------------ copies

    def place(self, row: int, tier: int, nbytes: int, *, lossless: bool, clock: int) -> None:
        """Make a copy resident whose bytes are counted already."""
        index, bit = self.index, 1 << tier
        tenant = index.tenant[row]
        index.resident[row] |= bit
        if lossless:
            index.lossless[row] |= bit
        index.charge[tier][row] = nbytes
        if row in self.busy:
            self.ledger.pinned[tier] += nbytes
        policy = self._lookup[tier].get(tenant) or self.policy(tenant, tier)
        policy.insert(row, nbytes, clock)
        if index.flags[row] & ORPHAN:
            policy.expedite(row)
        if not index.shown[row] & bit:
            self.sync(row)
        if not index.children[tier][row] or self.blocked:
            self.refresh(row)

    def drop(self, row: int, tier: int, reason: EvictReason, now: float) -> Drop | None:
        """Forget a resident copy at once.

        Returns:
            What the shell must free; None if a lease still reads it, then :meth:`collect` gives
            it out when the last lease has ended.
        """
        index, bit = self.index, 1 << tier
        nbytes, tenant, part = index.charge[tier][row], index.tenant[row], index.name(row)
        drop = Drop(part, tier, index.generation[row], nbytes, reason)
        if self.leaving and self.leaving.get(row, 0) & bit:
            self.set_leaving(row, tier, leaving=False)
            self.unhold(row)
        self._lookup[tier][tenant].remove(row)
        left = index.resident[row] & ~bit
        index.resident[row] = left
        index.lossless[row] &= ~bit
        index.free[row] &= ~bit
        index.charge[tier][row] = 0
        if self.blocked:
            self.blocked.pop(row, None)
        self.ledger.entries[tier] -= 1
        deferred = row in self.busy
        if deferred:
            self.deferred.setdefault(row, []).append(drop)
            if reason is not EvictReason.REPLACED:
                self.epoch += 1
        else:
            self.ledger.discharge(tier, tenant, nbytes)
        if not left and reason is not EvictReason.REPLACED:
            # tails come and go with every turn: they would crowd the history
            if not (index.flags[row] & PRIVATE and reason is EvictReason.REMOVED):
                self.history.note(part, MISS_OF_EVICTION[reason], tier, now)
        self.settle(row)
        return None if deferred else drop

    def settle(self, row: int) -> None:
        """Follow up on a copy that came or went: parent's counts, holes, empty rows."""
        index = self.index
        self.sync(row)
        if index.resident[row]:
            self.refresh(row)
        elif not index.pending[row]:
            if index.first[row] >= 0:
                self._orphans.append(index.name(row))
            elif row not in self.busy:
                self.prune(row)

    def refilled(self, row: int) -> None:
        """Note that a row without copies is being stored: its descendants may be whole again."""
        if self.index.first[row] >= 0:
            self._orphans.append(self.index.name(row))

    def sync(self, row: int) -> None:
        """Bring the parent's counts of children in line with where the row is."""
        index = self.index
        shown = index.resident[row] | index.pending[row]
        if self.leaving:
            shown &= ~self.leaving.get(row, 0)
        changed = shown ^ index.shown[row]
        if not changed:
            return
        index.shown[row] = shown
        parent = index.parent[row]
        if parent < 0:
            return
        mask = index.resident[parent]
        affected = mask == self._last  # a child anywhere can block a last copy there
        for _, bit, children, _ in self._levels:
            if changed & bit:
                if shown & bit:
                    children[parent] += 1
                    affected = affected or (bool(mask & bit) and children[parent] == 1)
                else:
                    children[parent] -= 1
                    affected = affected or (bool(mask & bit) and not children[parent])
        if affected and parent not in self.busy:
            self.refresh(parent)

    def refresh(self, row: int) -> None:
        """Bring the policies' view of what may be evicted in line with the rules."""
        index = self.index
        mask, wanted = index.resident[row], 0
        if mask and row not in self.busy:
            for _, bit, children, _ in self._levels:
                if mask & bit and not children[row]:
                    wanted |= bit
            if wanted == mask == self._last and index.first[row] >= 0 and self._stuck(row):
                self.blocked[row] = None
                wanted = 0
            elif self.blocked:
                self.blocked.pop(row, None)
        elif self.blocked:
            self.blocked.pop(row, None)
        changed = wanted ^ index.free[row]
        if not changed:
            return
        index.free[row] = wanted
        tenant = index.tenant[row]
        for _, bit, _, policies in self._levels:
            if changed & bit:
                if wanted & bit:
                    policies[tenant].release(row)
                else:
                    policies[tenant].hold(row)

    def _stuck(self, row: int) -> bool:
        """Whether the last copy may not go because a child has one in another tier."""
        resident, pending = self.index.resident, self.index.pending
        return any(resident[child] | pending[child] for child in self.index.kids(row))

    def prune(self, row: int) -> None:
        """Remove a row that stands for nothing any more, and ancestors kept only for it."""
        index = self.index
        while row >= 0 and not (
            index.resident[row] or index.pending[row] or index.first[row] >= 0 or row in self.busy
        ):
            parent = index.parent[row]
            index.remove(row)
            row = parent

    # ------------------------------------------------------------------ holes

    def whole(self, row: int) -> bool:
        """Whether a prefix can reach this part: it has a copy, and so has every ancestor."""
        index = self.index
        return bool(index.resident[row] | index.pending[row]) and not index.flags[row] & ORPHAN

    def spread(self, limit: int) -> None:
        """Carry holes and refills down the tree: orphans go first, whole parts do not.

        Handles about ``limit`` parts; the rest waits for the next call.
        """
        index = self.index
        while self._orphans and limit > 0:
            row = index.rows.get(self._orphans.popleft(), NO_ROW)
            if row < 0:
                continue
            mark = 0 if self.whole(row) else ORPHAN
            for child in index.kids(row):
                limit -= 1
                if index.flags[child] & ORPHAN == mark:
                    continue
                index.flags[child] ^= ORPHAN
                self._rerank(child, expedite=bool(mark))
                if index.first[child] >= 0:
                    self._orphans.append(index.name(child))

    def _rerank(self, row: int, *, expedite: bool) -> None:
        index = self.index
        for tier in self.tiers:
            if index.resident[row] >> tier & 1:
                policy = self._lookup[tier][index.tenant[row]]
                if expedite:
                    policy.expedite(row)
                else:
                    policy.touch(row, index.touched[row])

    @property
    def spreading(self) -> bool:
        """Whether consequences of holes or refills are still to be carried on."""
        return bool(self._orphans)

    # ------------------------------------------------------------------ time

    def live_until(self, row: int, expiry: float) -> None:
        """Set the time at which a newly stored row expires."""
        self.index.expiry[row] = expiry
        if expiry < inf:
            self.calendar.add(row, expiry)
