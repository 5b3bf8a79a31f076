"""Who leaves a tier next, and what becomes of it: let go, or demoted first."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from tierkv.blocks import part_id, split_part
from tierkv.decisions.index import NO_ROW, ORPHAN, identify
from tierkv.decisions.ruling import Ruled
from tierkv.decisions.types import Demote, Drop, EvictReason

if TYPE_CHECKING:
    from tierkv.abc import Policy
    from tierkv.decisions.placement import Placement

__all__ = ["DROP", "KEEP", "Room", "Victims"]

DROP: Final = -1
"""Fate of a copy that may go at once."""
KEEP: Final = -2
"""Fate of a copy that is being copied, or is needed by children elsewhere."""
_FAMILY: Final = 64  # children looked at
_SESSION_BLOCKS: Final = 1024  # of one session that leave in one go


@dataclass(slots=True)
class Room:
    """One attempt to make room in a tier.

    Attributes:
        tier: Where.
        target: Free bytes wanted.
        tenant: Who asks; -1 for the tier itself.
        reason: Reason given for what is dropped.
        before: Only parts last used at or before this clock may go; None: any.
        propose: Whether dirty parts may be proposed for demotion.
        force: Whether dirty parts may be dropped, and reserved shares ignored.
        own: Whether only the tenant's own parts may go (its quota is the limit).
        limit: Most parts to handle.
        drops: What was dropped.
        demotes: What was proposed.
        dirty: Whether room is missing because dirty parts were in the way.
        rule: Number of the tier's rule at work; 0 where it has just a policy.
        missing: Bytes still missing when the last victim was picked.
    """

    tier: int
    target: int
    tenant: int = -1
    reason: EvictReason = EvictReason.CAPACITY
    before: int | None = None
    propose: bool = False
    force: bool = False
    own: bool = False
    limit: int = 2**62
    drops: list[Drop] = field(default_factory=list)
    demotes: list[Demote] = field(default_factory=list)
    dirty: bool = False
    rule: int = 0
    missing: int = 0


class Victims:
    """Picks victims and tells their fate; :class:`~tierkv.decisions.evicting.Evictor` searches."""

    __slots__ = ("_at",)

    def __init__(self, placement: Placement) -> None:
        self._at = placement

    # ------------------------------------------------------------------ who

    def coldest(self, room: Room) -> tuple[Policy, int] | None:
        """The next victim by the rule at work, and the policy that tracks it."""
        at, tier = self._at, room.tier
        if len(at.partitions[tier]) == 1 and not room.own:
            policy = at.partitions[tier][0][1]
            row = (_ordering(policy, room) if at.rules[tier] else policy).victim()
            return None if row is None else (policy, row)
        best: tuple[Policy, int] | None = None
        lowest = 0.0
        for owner, policy in at.partitions[tier]:
            if room.own and owner != room.tenant:
                continue
            ordering = _ordering(policy, room)
            row = ordering.victim()
            if row is None:
                continue
            if owner >= 0 and owner != room.tenant and not room.force:
                left = at.ledger.usage(owner, tier) - at.index.charge[tier][row]
                if left < at.ledger.protected(owner, tier):
                    continue
            rank = ordering.rank(row)
            if best is None or rank < lowest:
                best, lowest = (policy, row), rank
        return best

    def next_out(self, tier: int) -> int | None:
        """Ident of the part that would leave a tier first; None if nothing may."""
        found = self.coldest(Room(tier, 0))
        return None if found is None else identify(self._at.index.name(found[1]))

    # ------------------------------------------------------------------ what becomes of it

    def fate(self, row: int, room: Room, now: float) -> int:
        """``DROP``, ``KEEP``, or the tier to which the copy must be demoted first."""
        index, tier = self._at.index, room.tier
        if room.force or index.flags[row] & ORPHAN or index.expiry[row] <= now:
            return DROP
        at = self._at
        rules, last = at.rules[tier], len(at.tiers) - 1
        target = rules[room.rule].target if rules else None
        if target is not None:
            return self._fate_to(row, target, room, now)
        if tier == last:
            return DROP  # what children elsewhere keep is not offered there
        mask, lossless = index.resident[row], index.lossless[row]
        if mask >> (tier + 1) and (not lossless >> tier & 1 or lossless >> (tier + 1)):
            return DROP
        for slower in range(tier + 1, last + 1):
            if index.pending[row] >> slower & 1:
                return KEEP  # it is on its way
            if not mask >> slower & 1 and self._takes(row, slower, room, now):
                return slower
        return KEEP if mask == 1 << tier and index.has_live_child(row) else DROP

    def _fate_to(self, row: int, target: int, room: Room, now: float) -> int:
        """Fate by a rule that names a tier: there it must be, or go, as far as that takes it."""
        index, tier = self._at.index, room.tier
        bit, lossless = 1 << target, index.lossless[row]
        if index.pending[row] & bit:
            return KEEP
        if index.resident[row] & bit:
            worse = lossless >> tier & 1 and not lossless & bit
            return KEEP if worse else DROP
        if self._takes(row, target, room, now):
            return target
        if index.resident[row] >> (tier + 1):
            return DROP
        return KEEP if index.has_live_child(row) else DROP

    def _takes(self, row: int, target: int, room: Room, now: float) -> bool:
        """Whether a tier would take a demotion: it fits, the breaker and admission allow it."""
        at, index = self._at, self._at.index
        nbytes = index.charge[room.tier][row]
        if nbytes > at.ledger.capacity[target] or not at.writable >> target & 1:
            return False
        gate = at.gates[target]
        return gate is None or gate.admit(identify(index.name(row)), nbytes, now, demand=True)

    def drop(self, row: int, room: Room, now: float) -> int:
        """Let a victim go; the bytes that this frees."""
        index, reason = self._at.index, room.reason
        if index.expiry[row] <= now:
            reason = EvictReason.EXPIRED
        elif index.flags[row] & ORPHAN:
            reason = EvictReason.ORPHANED
        drop = self._at.drop(row, room.tier, reason, now)
        if drop is None:
            raise AssertionError(f"row {row} was offered as a victim while it is leased")
        room.drops.append(drop)
        room.limit -= 1
        return drop.nbytes

    def propose(self, row: int, target: int, room: Room) -> int:
        """Propose a victim for demotion; the bytes that this will free."""
        at, index = self._at, self._at.index
        nbytes = index.charge[room.tier][row]
        at.hold(row)
        at.set_leaving(row, room.tier, leaving=True)
        room.demotes.append(
            Demote(index.name(row), room.tier, target, index.generation[row], nbytes)
        )
        room.limit -= 1
        return nbytes

    def take(self, row: int, room: Room, now: float) -> int | None:
        """Let a victim go, or propose it; None if it has to stay for now."""
        fate = self.fate(row, room, now)
        if fate == DROP:
            return self.drop(row, room, now)
        if fate == KEEP or self._hands_over(room):
            return None
        if room.propose:
            return self.propose(row, fate, room)
        room.dirty = True
        return None

    def _hands_over(self, room: Room) -> bool:
        """Whether the rule leaves what is dirty to a later one: it just lets copies go."""
        rules = self._at.rules[room.tier]
        return room.rule + 1 < len(rules) and rules[room.rule].target is None

    # ------------------------------------------------------------------ sessions

    def take_session(self, row: int, room: Room, now: float) -> int | None:
        """As :meth:`take`, for all of the session that ``row`` is of, as far as it may leave.

        The decision object knows no names of sessions, but it knows the tree: a session is the
        branch that ends in a leaf, up to where another one (a later use, a lease, a child of
        somebody else's) holds on to what they share. Parts of the other groups go along with the
        block that they belong to. At most 1,024 blocks leave in one go.
        """
        at, index, bit = self._at, self._at.index, 1 << room.tier
        leaf = self._leaf(row, bit)
        branch = self._branch(leaf)
        last, total = index.touched[leaf], 0
        swaps = at.rules[room.tier][room.rule].target is not None
        for depth, member in enumerate(branch):
            # within one use a parent's clock is ahead by one part a group; more is a later use
            if depth and not self._cold(member, last + at.groups * (depth + 1) - 1, room):
                break
            if not index.free[member] & bit or room.limit <= 0:
                break
            key, group = split_part(index.name(member))
            kept_elsewhere = self.fate(member, room, now) != DROP or index.resident[member] != bit
            if swaps and depth and total >= room.missing and not kept_elsewhere:
                break  # nobody takes it, and it need not be lost
            gained = self.take(member, room, now)
            if gained is None:
                return total if depth else None
            total += gained
            for other in range(at.groups):
                mate = index.rows.get(part_id(key, other), NO_ROW) if other != group else NO_ROW
                newest = last + at.groups * len(branch)
                if mate >= 0 and index.free[mate] & bit and self._cold(mate, newest, room):
                    total += self.take(mate, room, now) or 0
        return total

    def _leaf(self, row: int, bit: int) -> int:
        """The end of the session that a part is of; the part itself where that is not clear.

        Parts of windows and states have no children of their own: those of the other groups of
        their block tell where the session goes on.
        """
        at, index = self._at, self._at.index
        key, group = split_part(index.name(row))
        for other in range(at.groups):
            node = index.rows.get(part_id(key, other), NO_ROW) if other != group else NO_ROW
            for _ in range(_SESSION_BLOCKS if node >= 0 else 0):
                only = self._only_child(node, bit)
                if only < 0:
                    break
                node = only
            late = node < 0 or index.touched[node] > index.touched[row] + at.groups
            if not late and index.free[node] & bit:
                return node
        return row

    def _only_child(self, row: int, bit: int) -> int:
        """The one child that is in a tier; -1 if there are none, or more, or many to look at."""
        index, found = self._at.index, NO_ROW
        for child in islice(index.kids(row), _FAMILY):
            if index.resident[child] & bit:
                if found >= 0:
                    return NO_ROW
                found = child
        return found

    def _branch(self, row: int) -> list[int]:
        """A leaf and what is above it."""
        parents, branch = self._at.index.parent, [row]
        while parents[row] >= 0 and len(branch) < _SESSION_BLOCKS:
            row = parents[row]
            branch.append(row)
        return branch

    def _cold(self, row: int, newest: int, room: Room) -> bool:
        touched = self._at.index.touched[row]
        return touched <= newest and (room.before is None or touched <= room.before)


def _ordering(policy: Policy, room: Room) -> Policy:
    return policy.policies[room.rule] if isinstance(policy, Ruled) else policy
