"""Where every part is, and what follows for others: who may be evicted, who is cut off.

Keeps the tree of parts, the policies and the marks in step; takes no decision of its own.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from tierkv.decisions.expiry import Calendar
from tierkv.decisions.guarding import Guard
from tierkv.decisions.history import History
from tierkv.decisions.index import NO_ROW, ORPHAN, TIERS_OF, Index
from tierkv.decisions.ledger import Ledger
from tierkv.decisions.ruling import Ruled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.abc import Admission, Policy
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Drop, TenantLimits, TierLimits

__all__ = ["Standing"]

_SHARED: Final = -1
_RESIZE: Final = 0.1  # change of a tier's size in parts that its policies are told of


class Standing:
    """State shared by the deciding parts, and the consequences of a change.

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
        readable: Tiers, one bit each, whose copies lookups may count on.
        writable: Tiers, one bit each, into which copies may be demoted.
        gates: Admission of each tier; None where everything is admitted.
        ears: Those of them that want to hear of lookups.
        guards: What watches the promotions into each tier.
        watching: How many of them watch each row.
        scores: Importance of the rows that somebody scored.
        rules: Rules of each tier that has more than a policy.
        groups: Layer groups seen.
        moved: Told of each part of which a copy came or went, and None where tiers became readable
            or ceased to be; it must only take a note. None (nobody listens) costs nothing.
        step: What the clock of a chain's next block adds in a lookup: -1 touches leaves first.
    """

    __slots__ = (
        "_factories",
        "_faster",
        "_last",
        "_lookup",
        "_orphans",
        "_parts",
        "blocked",
        "busy",
        "calendar",
        "clock",
        "deferred",
        "ears",
        "epoch",
        "gates",
        "groups",
        "guards",
        "history",
        "holds",
        "index",
        "leaving",
        "ledger",
        "moved",
        "partitions",
        "readable",
        "ready",
        "rules",
        "scores",
        "step",
        "tiers",
        "watching",
        "writable",
    )

    def __init__(
        self,
        tiers: Sequence[TierLimits],
        policies: Sequence[Callable[[], Policy]],
        tenants: Mapping[str, TenantLimits] | None,
        default_limits: TenantLimits | None,
        history: int,
        gates: Sequence[Admission | None] = (),
        step: int = -1,
    ) -> None:
        self.tiers = range(len(tiers))
        self.readable = self.writable = (1 << len(tiers)) - 1
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
        first = [partitions[0][1] for partitions in self.partitions]
        self.rules = [policy.rules if isinstance(policy, Ruled) else () for policy in first]
        self.groups = 1
        self._factories = tuple(policies)
        self._lookup: list[dict[int, Policy]] = [{} for _ in tiers]
        self._last = 1 << (len(tiers) - 1)
        self._faster = range(len(tiers) - 1)
        self._parts: list[float] = [0.0 for _ in tiers]
        self.deferred: dict[int, list[Drop]] = {}
        self.ready: list[tuple[int, Drop]] = []
        self._orphans: deque[PartId] = deque()
        self.gates = tuple(gates) or (None,) * len(tiers)
        self.ears = tuple(gate for gate in self.gates if gate is not None and gate.listens)
        self.watching: dict[int, int] = {}
        self.guards = tuple(Guard(self.watching) for _ in tiers)
        self.scores: dict[int, float] = {}
        self.moved: Callable[[PartId | None], object] | None = None
        self.step = step

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
        gate = self.gates[tier]
        if gate is not None:
            gate.resize(parts)
        return parts

    # ------------------------------------------------------------------ consequences

    def settle(self, row: int, part: PartId) -> None:
        """Follow up on a copy that came or went: parent's counts, holes, empty rows."""
        index = self.index
        there = index.resident[row] | index.pending[row]
        if there or index.first[row] >= 0 or row in self.busy:
            self.sync(row)
            if index.resident[row]:
                self.refresh(row)
            elif not there and index.first[row] >= 0:
                self._orphans.append(part)
            return
        # it stands for nothing any more
        parent, shown = index.parent[row], index.shown[row]
        if shown:
            index.shown[row] = 0
            if parent >= 0:
                for tier in TIERS_OF[shown]:
                    index.children[tier][parent] -= 1
        if self.watching or self.scores:
            self.recycle(row, part)
        else:
            index.remove(row, part)
        if parent < 0:
            return
        if not index.resident[parent]:
            self.prune(parent)
        elif parent not in self.busy:
            self.refresh(parent)

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
        for tier in TIERS_OF[changed]:
            children, comes = index.children[tier], shown >> tier & 1
            count = children[parent] + (1 if comes else -1)
            children[parent] = count
            # the first child that comes, or the last that goes
            if count == comes and mask >> tier & 1:
                affected = True
        if affected and parent not in self.busy:
            self.refresh(parent)

    def refresh(self, row: int) -> None:
        """Bring the policies' view of what may be evicted in line with the rules."""
        index = self.index
        mask, wanted = index.resident[row], 0
        if mask and row not in self.busy:
            for tier in TIERS_OF[mask]:
                if not index.children[tier][row]:
                    wanted |= 1 << tier
        if wanted == mask == self._last and index.first[row] >= 0 and self._needed(row):
            self.blocked[row] = None
            wanted = 0
        elif self.blocked:
            self.blocked.pop(row, None)
        changed = wanted ^ index.free[row]
        if not changed:
            return
        index.free[row] = wanted
        tenant = index.tenant[row]
        for tier in TIERS_OF[changed]:
            policy = self._lookup[tier][tenant]
            if wanted >> tier & 1:
                policy.release(row)
            else:
                policy.hold(row)

    def _needed(self, row: int) -> bool:
        """Whether a row without children in the last tier has one elsewhere that is alive."""
        index = self.index
        if self.leaving:  # the counts leave out what is about to go
            return index.has_live_child(row)
        return any(index.children[tier][row] for tier in self._faster)

    def prune(self, row: int) -> None:
        """Remove a row that stands for nothing any more, and ancestors kept only for it."""
        index = self.index
        while row >= 0 and not (
            index.resident[row] or index.pending[row] or index.first[row] >= 0 or row in self.busy
        ):
            parent = index.parent[row]
            self.recycle(row, index.name(row))
            row = parent

    def recycle(self, row: int, part: PartId) -> None:
        """Let a row go: it will name another part."""
        if self.watching and row in self.watching:
            for guard in self.guards:
                guard.forget(row)
        if self.scores:
            self.scores.pop(row, None)
        self.index.remove(row, part)

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
