"""Copies that come and go, leases and holds that keep them.

The one place that changes index, byte accounts, policies and reasons together. It takes no
decision of its own: :mod:`reserving`, :mod:`storing`, :mod:`matching` and :mod:`evicting` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.decisions.history import MISS_OF_EVICTION
from tierkv.decisions.index import IDENT, NO_ROW, ORPHAN, PRIVATE, TIERS_OF
from tierkv.decisions.standing import Standing
from tierkv.decisions.types import Drop, EvictReason, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId

__all__ = ["Placement"]

_new: Final = tuple.__new__  # a named tuple's own constructor takes twice as long
# looked up once: in its class, a member takes as long as a call
_CAPACITY: Final = EvictReason.CAPACITY
_DEMOTED: Final = EvictReason.DEMOTED
_QUOTA: Final = EvictReason.QUOTA
_REPLACED: Final = EvictReason.REPLACED
_SHRUNK: Final = EvictReason.SHRUNK
_EVICTED: Final = MissReason.EVICTED


class Placement(Standing):
    """Where every part is; what the deciding parts act upon."""

    __slots__ = ()

    # ------------------------------------------------------------------ uses

    def touch(self, row: int, clock: int, expiry: float) -> None:
        """Count an access of a resident row, and let it live until ``expiry`` at least."""
        index = self.index
        lookup, tenant = self._lookup, index.tenant[row]
        for tier in TIERS_OF[index.resident[row]]:
            lookup[tier][tenant].touch(row, clock)
        index.touched[row] = clock
        if expiry > index.expiry[row]:
            index.expiry[row] = expiry
        if index.fresh[row]:
            self._used(row)
        if row in self.watching:
            for guard in self.guards:
                guard.asked(row)

    def _used(self, row: int) -> None:
        """Note the first use of promoted copies."""
        mask, self.index.fresh[row] = self.index.fresh[row], 0
        for tier in TIERS_OF[mask]:
            self.guards[tier].used += 1

    def shift(self, row: int, accesses: float) -> None:
        """Take a row's last use to lie so many accesses later, for those who order by it."""
        tenant = self.index.tenant[row]
        for tier in TIERS_OF[self.index.resident[row]]:
            self._lookup[tier][tenant].shift(row, accesses)

    def score(self, row: int, value: float) -> None:
        """Tell how important a row is, now and wherever it will be."""
        self.scores[row] = value
        tenant = self.index.tenant[row]
        for tier in TIERS_OF[self.index.resident[row]]:
            self._lookup[tier][tenant].score(row, value)

    # ------------------------------------------------------------------ leases and holds

    def pin(self, row: int) -> None:
        """Keep a row's copies; counted."""
        if row in self.busy:
            self.busy[row] += 1
            return
        self.busy[row] = 1
        index, pinned = self.index, self.ledger.pinned
        for tier in TIERS_OF[index.resident[row]]:
            pinned[tier] += index.charge[tier][row]
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
        mask, leaf = index.resident[row], False
        for tier in TIERS_OF[mask]:
            pinned[tier] -= index.charge[tier][row]
            leaf = leaf or not index.children[tier][row]
        if self.deferred and row in self.deferred:
            for drop in self.deferred.pop(row):
                pinned[drop.tier] -= drop.nbytes
                self.ready.append((index.tenant[row], drop))
        if leaf:
            self.refresh(row)
        elif not mask:
            self.prune(row)

    def hold(self, row: int) -> None:
        """Pin a row for a copy or a demotion under way."""
        self.pin(row)
        holds = self.holds
        holds[row] = holds[row] + 1 if row in holds else 1

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
        if not self.ready:
            return []
        ready, self.ready = self.ready, []
        for tenant, drop in ready:
            self.ledger.discharge(drop.tier, tenant, drop.nbytes)
        return [drop for _, drop in ready]

    # ------------------------------------------------------------------ copies

    def expect(self, part: PartId, parent: int, tenant: int, tier: int) -> int:
        """Make a row for a part that is being written into a tier, below ``parent`` (or none)."""
        index = self.index
        row = index.add(part, NO_ROW, tenant)
        index.pending[row] = index.shown[row] = 1 << tier
        if parent >= 0:
            index.link(row, parent)
            if index.resident[parent] and parent not in self.busy:
                self.refresh(parent)
        return row

    def place(
        self, row: int, part: PartId, tier: int, nbytes: int, lossless: bool, clock: int
    ) -> None:
        """Make a copy resident whose bytes are counted already."""
        index, bit = self.index, 1 << tier
        tenant = index.tenant[row]
        index.resident[row] |= bit
        if lossless:
            index.lossless[row] |= bit
        index.charge[tier][row] = nbytes
        if row in self.busy:
            self.ledger.pinned[tier] += nbytes
        policies = self._lookup[tier]
        policy = policies[tenant] if tenant in policies else self.policy(tenant, tier)
        start, group = IDENT(part)
        policy.insert(row, nbytes, clock, start ^ group)
        if group >= self.groups:
            self.groups = group + 1
        if self.scores and row in self.scores:
            policy.score(row, self.scores[row])
        if index.flags[row] & ORPHAN:
            policy.expedite(row)
        if not index.shown[row] & bit:
            self.sync(row)
        if not index.children[tier][row] or self.blocked:
            self.refresh(row)
        if self.moved is not None:
            self.moved(part)

    def drop(self, row: int, tier: int, reason: EvictReason, now: float) -> Drop | None:
        """Forget a resident copy at once.

        Returns:
            What the shell must free; None if a lease still reads it, then :meth:`collect` gives
            it out when the last lease has ended.
        """
        index, bit = self.index, 1 << tier
        nbytes, tenant, part = index.charge[tier][row], index.tenant[row], index.name(row)
        drop = _new(Drop, (part, tier, index.generation[row], nbytes, reason))
        if self.leaving and self.leaving.get(row, 0) & bit:
            self.set_leaving(row, tier, leaving=False)
            self.unhold(row)
        # looked up by identity: hashing an enum costs more than the rest of this line
        plain = reason is _CAPACITY
        evicted = plain or reason is _DEMOTED or reason is _QUOTA or reason is _SHRUNK
        policy = self._lookup[tier][tenant]
        if evicted:
            start, group = IDENT(part)
            policy.remove(row, evicted=True, ident=start ^ group)
        else:
            policy.remove(row)
        if index.fresh[row] & bit:
            index.fresh[row] &= ~bit
            if evicted:
                self.guards[tier].left(row)
        left = index.resident[row] & ~bit
        index.resident[row] = left
        if left:
            index.lossless[row] &= left
            index.free[row] &= left
        else:
            index.lossless[row] = index.free[row] = 0
        if self.blocked:
            self.blocked.pop(row, None)
        self.ledger.entries[tier] -= 1
        deferred = row in self.busy
        if deferred:
            self.deferred.setdefault(row, []).append(drop)
            if reason is not _REPLACED:
                self.epoch += 1
        else:
            self.ledger.discharge(tier, tenant, nbytes)
        if not left and self.history.limit:
            if plain:  # by far the most frequent
                self.history.note(part, _EVICTED, tier, now)
            elif reason is not _REPLACED:
                self._depart(row, part, tier, reason, now)
        if self.moved is not None:
            self.moved(part)
        self.settle(row, part)
        return None if deferred else drop

    def _depart(self, row: int, part: PartId, tier: int, reason: EvictReason, now: float) -> None:
        # tails come and go with every turn: they would crowd the history
        if reason is not EvictReason.REMOVED or not self.index.flags[row] & PRIVATE:
            self.history.note(part, MISS_OF_EVICTION[reason], tier, now)

    # ------------------------------------------------------------------ faults and owners

    def invalidate(
        self, part: PartId, tier: int, generation: int, reason: EvictReason, now: float
    ) -> list[Drop]:
        """See :meth:`Decisions.invalidate`."""
        index = self.index
        drops = self.collect()
        row = index.rows.get(part, NO_ROW)
        if row >= 0 and index.resident[row] >> tier & 1 and index.generation[row] == generation:
            drop = self.drop(row, tier, reason, now)
            drops += [drop] if drop is not None else []
        return drops

    def forget(self, parts: Sequence[PartId], reason: EvictReason, now: float) -> list[Drop]:
        """See :meth:`Decisions.forget`."""
        index = self.index
        drops = self.collect()
        for part in parts:
            for tier in self.tiers:
                row = index.rows.get(part, NO_ROW)
                if row >= 0 and index.resident[row] >> tier & 1:
                    drop = self.drop(row, tier, reason, now)
                    drops += [drop] if drop is not None else []
        return drops
