"""A decision object and a plain mirror of it, walked side by side.

The mirror does not foretell who is evicted, so that it fits every policy and every admission. It
takes over what it is told (drops, outcomes) and checks what must hold whoever decides: bytes,
leases, last copies, prefixes, progress.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.decisions import chains
from tierkv.decisions.checking import check_victims
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import LineLog, replay
from tierkv.decisions.types import EvictReason, SkipReason, TierLimits

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tierkv.abc import Admission, Policy
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Demote, Drop, Outcome, StoreItem

TIERS = [
    TierLimits("fast", 60, high=0.9, low=0.6),
    TierLimits("middle", 90, high=1.0, low=0.9),
    TierLimits("slow", 140, durable=True),
]
LAST = len(TIERS) - 1
NAMES = ("tool_use", "end_turn")


@dataclass
class Open:
    """One reservation."""

    tier: int
    source: int | None
    items: Sequence[StoreItem]
    left: dict[int, Outcome]


@dataclass
class Copy:
    nbytes: int
    visible: bool = True


@dataclass
class Mirror:
    """Who is where, as far as the object has told."""

    policy: Callable[[], Policy]
    admission: Callable[[], Admission] | None = None
    plain: bool = True  # no rules that let last copies go
    thorough: int = 1  # the object checks itself every so many steps
    logged: bool = True
    copies: dict[tuple[PartId, int, int], Copy] = field(default_factory=dict)
    open: dict[int, Open] = field(default_factory=dict)
    leases: dict[int, list[tuple[PartId, int, int]]] = field(default_factory=dict)
    demotes: list[Demote] = field(default_factory=list)
    shrunk: set[int] = field(default_factory=set)
    now: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        self.log = LineLog()
        self.core = self.make()
        if self.logged:
            self.core.attach(self.log)
        self.capacity = [tier.capacity for tier in TIERS]

    def make(self) -> Decisions:
        return Decisions(TIERS, policy=self.policy, admission=self.admission, history=50)

    # ------------------------------------------------------------------ what is told

    def held(self, part: PartId, tier: int) -> int | None:
        """Generation of the copy that lookups should find in a tier."""
        found = [g for (p, t, g), c in self.copies.items() if (p, t) == (part, tier) and c.visible]
        assert len(found) < 2
        return found[0] if found else None

    def dropped(self, drops: Sequence[Drop]) -> None:
        """Take over what was forgotten."""
        leased = {key for keys in self.leases.values() for key in keys}
        for drop in drops:
            copy = self.copies.pop((drop.part, drop.tier, drop.generation), None)
            assert copy is not None, f"{drop} was not there"  # K2
            assert copy.nbytes == drop.nbytes
            assert drop[:3] not in leased, f"{drop} is leased"  # C2
            if self.plain and drop.reason is EvictReason.CAPACITY and drop.tier < LAST:
                others = [t for t in range(LAST + 1) if self.held(drop.part, t) is not None]
                fits = any(drop.nbytes <= self.capacity[t] for t in range(drop.tier + 1, LAST + 1))
                open_ = any(
                    self.core.costs.breaker(t, "write").closed
                    for t in range(drop.tier + 1, LAST + 1)
                )
                refused = self.admission is not None
                assert others or not fits or not open_ or refused, f"{drop}: the last copy"  # K6

    def after(self) -> None:
        """What must hold after every call."""
        core = self.core
        for tier in range(len(TIERS)):
            used = sum(copy.nbytes for (_, t, _), copy in self.copies.items() if t == tier)
            assert core.used(tier) == used  # K2
            reserved = sum(
                held.items[number].nbytes
                for held in self.open.values()
                if held.tier == tier
                for number in held.left
            )
            assert core.reserved(tier) == reserved
            if used + reserved <= self.capacity[tier]:
                self.shrunk.discard(tier)
            assert tier in self.shrunk or used + reserved <= self.capacity[tier]  # K1
        self.steps += 1
        if self.steps % self.thorough == 0:
            core.check()

    # ------------------------------------------------------------------ calls

    def store(self, path: Sequence[int], tier: int, nbytes: int) -> None:
        wanted = chains.items(chains.keys(path), nbytes=nbytes)
        quiet = not self.leases and not self.open and not self.demotes
        taken = self.core.reserve(tier, wanted, tenant="t", now=self.now)
        self._reserved(tier, None, wanted, taken.id, taken.outcomes, taken.drops)
        skips = {o.skip for o in taken.outcomes}
        if nbytes > self.capacity[tier]:
            assert SkipReason.TOO_LARGE in skips or not any(o.generation for o in taken.outcomes)
            assert len(wanted) > 1 or not taken.drops or skips == {None}  # K3
        elif tier == LAST and quiet and self.admission is None and len(wanted) == 1:
            assert skips == {None}  # K5: nothing is in the way

    def copy(
        self, path: Sequence[int], source: int, tier: int, *, demand: bool, ahead: bool
    ) -> None:
        if source == tier:
            return
        wanted = []
        for item in chains.items(chains.keys(path)):
            held = self.held(item.part, source)
            if held is not None:
                nbytes = self.copies[item.part, source, held].nbytes
                wanted.append(item._replace(nbytes=nbytes))
        if wanted:
            taken = self.core.reserve(
                tier,
                wanted,
                tenant="t",
                now=self.now,
                source=source,
                demand=demand,
                ahead=ahead and not demand,
            )
            self._reserved(tier, source, wanted, taken.id, taken.outcomes, taken.drops)

    def _reserved(
        self,
        tier: int,
        source: int | None,
        wanted: Sequence[StoreItem],
        handle: int,
        outcomes: Sequence[Outcome],
        drops: Sequence[Drop],
    ) -> None:
        self.dropped(drops)
        left = {n: o for n, o in enumerate(outcomes) if o.generation}
        assert bool(handle) == bool(left)
        if handle:
            self.open[handle] = Open(tier, source, wanted, left)
        self.after()

    def settle(self, pick: int, saved: int, *, fail: bool) -> None:
        if not self.open:
            return
        handle = sorted(self.open)[pick % len(self.open)]
        held = self.open[handle]
        some = sorted(held.left)[: 1 + pick % 3]
        outcomes = {number: held.left.pop(number) for number in some}
        if not held.left:
            del self.open[handle]
        if fail:
            self.dropped(self.core.rollback(handle, some, self.now))
            self.after()
            return
        charges = [max(1, held.items[number].nbytes - saved) for number in some]
        drops = self.core.commit(handle, some, self.now, charges)
        for number, nbytes in zip(some, charges, strict=True):
            part, generation = held.items[number].part, outcomes[number].generation
            olds = [t for t in range(LAST + 1) if (self.held(part, t) or 0) < generation]
            for tier in olds if held.source is None else ():
                older = self.held(part, tier)  # a newer one takes the place of every copy
                if older is not None:
                    self.copies[part, tier, older].visible = False
            newer = any((self.held(part, t) or 0) > generation for t in range(LAST + 1))
            self.copies[part, held.tier, generation] = Copy(nbytes, visible=not newer)
        self.dropped(drops)
        self.after()

    def look(self, path: Sequence[int], *, keep: bool) -> None:
        chain = chains.keys(path)
        found = self.core.lookup(chains.query(chain), self.now)
        there = 0
        for key in chain:
            tiers = [
                t
                for t in range(len(TIERS))
                if self.held(chains.part(key), t) is not None
                and self.core.costs.breaker(t, "read").closed
            ]
            if not tiers:
                break
            part = found.parts[there] if there < len(found.parts) else None
            assert part is not None
            assert part.tier == tiers[0]
            there += 1
        assert found.blocks == there  # I8
        if found.lease:
            self.leases[found.lease] = [
                (part.part, part.tier, part.generation) for part in found.parts
            ]
            if not keep:
                self.release(0, lease=found.lease)
        self.after()

    def release(self, pick: int, lease: int | None = None) -> None:
        if not self.leases:
            return
        lease = sorted(self.leases)[pick % len(self.leases)] if lease is None else lease
        del self.leases[lease]
        self.dropped(self.core.release(lease, self.now))
        self.after()

    def make_room(self, tier: int, nbytes: int) -> None:
        drops, demotes = self.core.make_room(tier, nbytes, tenant="t", now=self.now)
        self.dropped(drops)
        self.demotes += demotes
        self.after()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        drops, demotes = self.core.tick(self.now)
        self.dropped(drops)
        self.demotes += demotes
        self.after()

    def demote(self, pick: int, *, cancel: bool) -> None:
        """Perform a proposal, or take it back."""
        if not self.demotes:
            return
        demote = self.demotes.pop(pick % len(self.demotes))
        stale = self.held(demote.part, demote.source) != demote.generation
        if not cancel and not stale:
            item = chains.items([demote.part[:32]], nbytes=demote.nbytes)[0]  # type: ignore[list-item]
            taken = self.core.reserve(
                demote.target, [item], tenant="t", now=self.now, source=demote.source
            )
            self._reserved(
                demote.target, demote.source, [item], taken.id, taken.outcomes, taken.drops
            )
            if taken.id:
                self.open[taken.id].left.clear()
                del self.open[taken.id]
                drops = self.core.commit(taken.id, [0], self.now)
                key = (demote.part, demote.target, demote.generation)
                self.copies[key] = Copy(demote.nbytes)
                self.dropped(drops)
                gone = [(demote.part, demote.generation)]
                self.dropped(self.core.dropped(gone, demote.source, EvictReason.DEMOTED, self.now))
                self.after()
                return
        self.core.cancel_demote([demote], self.now)
        self.after()

    def resize(self, tier: int, share: int) -> None:
        self.capacity[tier] = TIERS[tier].capacity * (5 + share % 11) // 10
        self.shrunk.add(tier)  # until what is in use, or dirty, has left
        drops, demotes = self.core.set_capacity(tier, self.capacity[tier], self.now)
        self.dropped(drops)
        self.demotes += demotes
        self.after()

    def lose(self, pick: int, *, forget: bool) -> None:
        """A copy is damaged, or all copies of a part are cleared by its owner."""
        if not self.copies:
            return
        part, tier, generation = sorted(self.copies)[pick % len(self.copies)]
        if forget:
            drops = self.core.forget([part], EvictReason.REMOVED, self.now)
        else:
            drops = self.core.invalidate(part, tier, generation, EvictReason.DAMAGED, self.now)
        for (p, t, g), copy in self.copies.items():
            if p == part and (forget or (t, g) == (tier, generation)):
                copy.visible = False
        self.dropped(drops)
        self.after()

    def tell(self, path: Sequence[int], pick: int) -> None:
        """Hints and importance move nobody's bytes."""
        chain = chains.keys(path)
        if pick % 2:
            self.core.hint(chain, 1, self.now, stop_reason=NAMES[pick // 2 % 2])
        else:
            self.core.score([chains.part(key) for key in chain], pick % 100 / 100, self.now)
        self.after()

    def fault(self, tier: int, *, works: bool) -> None:
        """A tier fails, or works: its breaker opens, or closes."""
        for direction in ("read", "write"):
            if works:
                self.core.sample(tier, direction, 100, 0.01, self.now)
            else:
                for _ in range(5):
                    self.core.failed(tier, direction, self.now)
        self.after()

    # ------------------------------------------------------------------ the end

    def rest(self) -> None:
        """Give everything back: nothing is held then, and the log replays byte for byte."""
        for lease in sorted(self.leases):
            self.release(0, lease=lease)
        while self.open:
            self.settle(0, 0, fail=True)
        while self.demotes:
            self.demote(0, cancel=True)
        self.core.check()
        assert not self.core._at.busy  # M1
        assert self.core.leases() == 0
        check_victims(self.core._at)
        if self.logged:
            assert list(replay(self.log.lines, self.make())) == self.log.lines


def wander(mirror: Mirror, order: random.Random) -> None:
    """One random step."""
    pick = order.getrandbits(20)
    path = [order.randrange(3) for _ in range(order.randint(1, 4))]
    tier, other = order.randrange(len(TIERS)), order.randrange(len(TIERS))
    step = order.choices(range(11), (16, 16, 14, 14, 8, 6, 6, 8, 1, 3, 4))[0]
    if step == 0:
        size = order.randint(61, 160) if order.random() < 0.05 else order.randint(3, 25)
        mirror.store(path, tier, size)
    elif step == 1:
        ahead = order.random() < 0.3
        mirror.copy(path, tier, other, demand=order.random() < 0.5, ahead=ahead)
    elif step == 2:
        mirror.settle(pick, order.randint(0, 4), fail=order.random() < 0.2)
    elif step == 3:
        mirror.look(path, keep=order.random() < 0.3)
    elif step == 4:
        mirror.release(pick)
    elif step == 5:
        mirror.make_room(tier, order.randint(1, 60))
    elif step == 6:
        mirror.tick(order.random() * 3)
    elif step == 7:
        mirror.demote(pick, cancel=order.random() < 0.2)
    elif step == 8:
        mirror.resize(tier, pick)
    elif step == 9:
        mirror.lose(pick, forget=order.random() < 0.3)
    elif order.random() < 0.8:
        mirror.tell(path, pick)
    else:
        mirror.fault(tier, works=order.random() < 0.6)
