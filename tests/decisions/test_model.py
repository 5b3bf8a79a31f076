"""The decision object against the naive one: equal results, every invariant after each step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.decisions import chains
from tests.decisions.naive import Naive
from tierkv.abc import StoredPart
from tierkv.blocks import BlockKey, PartId
from tierkv.decisions import matching
from tierkv.decisions.core import Decisions
from tierkv.decisions.log import LineLog, replay
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import (
    Demote,
    Drop,
    EvictReason,
    GroupRule,
    Reservation,
    SkipReason,
    StoreItem,
    TenantLimits,
    TierLimits,
)
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Sequence

TIERS = [
    TierLimits("host", 50, high=0.9, low=0.6),
    TierLimits("middle", 70, high=1.0, low=0.9),
    TierLimits("disk", 90, high=0.95, low=0.8, durable=True),
]
TENANTS = {
    "acme": TenantLimits(quota={"host": 40, "disk": 60}, reserved={"host": 15, "disk": 20}),
    "beta": TenantLimits(reserved={"middle": 20}, session_quota=60),
}
SPACES = {
    "acme": (GroupRule(GroupKind.FULL),),
    "beta": (GroupRule(GroupKind.FULL), GroupRule(GroupKind.SLIDING, 6)),
    "none": (GroupRule(GroupKind.STATE), GroupRule(GroupKind.LATENT)),
}
NAMES = st.sampled_from(sorted(SPACES))
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
TIER = st.integers(0, len(TIERS) - 1)
PICK = st.integers(0, 1000)
TTLS = st.sampled_from([None, None, 2.0, 5.0])


def same(got: Sequence[Drop], expected: Sequence[Drop]) -> None:
    """Same drops: cousins that go together, or expire together, come in any order."""
    assert sorted(got, key=repr) == sorted(expected, key=repr)


class Stage(RuleBasedStateMachine):
    """Both objects, what is open on them, and the calls that compare them."""

    def __init__(self) -> None:
        super().__init__()
        self.log = LineLog()
        self.real = Decisions(TIERS, policy=Lru, tenants=TENANTS, log=self.log)
        self.rows: dict[PartId, int] = {}
        self.naive = Naive(TIERS, TENANTS, self.row)
        self.now = 0.0
        self.open: dict[int, tuple[Reservation, list[StoreItem], list[int], str]] = {}
        self.leases: list[int] = []
        self.demotes: list[Demote] = []
        self.names: set[PartId] = set()
        self.shrunk = False

    def row(self, name: PartId) -> int:
        """Row that breaks ties; the call that is compared may have freed it already."""
        return self.real._at.index.rows.get(name, self.rows.get(name, -1))

    def remember(self) -> None:
        self.rows = dict(self.real._at.index.rows)

    def resident(self) -> list[tuple[PartId, int, int]]:
        return [(p, t, g) for t in range(len(TIERS)) for p, g, _ in self.real.parts(t)]

    def _reserve(
        self,
        tier: int,
        wanted: list[StoreItem],
        tenant: str,
        session: str,
        left: int | None,
        demand: bool,
        source: int | None,
    ) -> Reservation:
        call = partial(self.real.reserve, ahead=True)  # the naive object knows no thrash guard
        got = call(
            tier, wanted, tenant=tenant, now=self.now, session=session, demand=demand, source=source
        )
        slots, outcomes, drops, short = self.naive.reserve(
            tier, wanted, tenant, self.now, left, demand, source
        )
        assert list(got.outcomes) == outcomes
        same(got.drops, drops)
        assert got.short == short
        assert bool(got.id) == bool(slots)
        if got.id:
            self.naive.open[got.id] = (tier, source, slots)
            self.open[got.id] = (got, wanted, chains.reserved(got), tenant)
        self.remember()
        return got

    def _settle(
        self, handle: int, share: int, saved: int, fine: bool, fail: bool, why: SkipReason
    ) -> None:
        _, wanted, left, _ = self.open[handle]
        some = left[: max(1, len(left) * share // 10)]
        if fail:
            drops = self.real.rollback(handle, some, self.now, why)
            same(drops, self.naive.rollback(handle, some, self.now, why))
        else:
            charges = [max(1, wanted[i].nbytes - saved) for i in some]
            lossless = [wanted[i].lossless and fine for i in some]
            drops = self.real.commit(handle, some, self.now, charges, lossless)
            same(drops, self.naive.commit(handle, some, self.now, charges, lossless))
        del left[: len(some)]
        if not left:
            del self.open[handle]

    def _moves(self, got: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
        same(got[0], expected[0])
        assert list(got[1]) == list(expected[1])
        self.demotes += got[1]


class Machine(Stage):
    """The rules: every call, with every kind of ending."""

    # ---------------------------------------------------------------- stores

    @initialize(
        stored=st.lists(
            st.tuples(
                PATHS, st.integers(0, 1), st.integers(1, 6), st.integers(5, 25), st.booleans()
            ),
            max_size=6,
        )
    )
    def restart(self, stored: list[tuple[list[int], int, int, int, bool]]) -> None:
        parts, charges = [], []
        for path, group, generation, nbytes, expired in stored:
            chain = chains.keys(path, "none")
            strict = group == 1 and len(chain) > 1
            part = chains.part(chain[-1], group)
            self.names.add(part)
            parts.append(
                StoredPart(
                    part,
                    generation,
                    chain[-2] if strict else None,
                    BlockKey(b"r" * 32),
                    nbytes,
                    "none",
                    expires=1003.0 if expired else None,
                )
            )
            charges.append(nbytes)
        got = self.real.recover(2, parts, charges, self.now, 1000.0)
        same(got, self.naive.recover(2, parts, charges, self.now, 1000.0))

    @rule(
        tenant=NAMES,
        path=PATHS,
        tier=TIER,
        nbytes=st.integers(3, 30),
        quality=st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
        ttl=TTLS,
        session=st.booleans(),
        demand=st.sampled_from([True, True, True, False]),
        at_once=st.sampled_from([True, True, False]),
    )
    def reserve(
        self,
        tenant: str,
        path: list[int],
        tier: int,
        nbytes: int,
        quality: tuple[bool, bool],
        ttl: float | None,
        session: bool,
        demand: bool,
        at_once: bool,
    ) -> None:
        wanted = chains.items(
            chains.keys(path, tenant),
            nbytes,
            groups=SPACES[tenant],
            tenant=tenant,
            exact=quality[0],
            lossless=quality[1],
            ttl=ttl,
        )
        self.names.update(i.part for i in wanted)
        limits = TENANTS.get(tenant)
        left = limits.session_quota if limits and session else None
        got = self._reserve(tier, wanted, tenant, "s" if session else "", left, demand, None)
        if got.id and at_once:
            self._settle(got.id, 10, 0, True, False, SkipReason.FAILED)

    @precondition(lambda self: self.open)
    @rule(
        pick=PICK,
        share=st.integers(1, 10),
        saved=st.integers(0, 2),
        fine=st.sampled_from([True, True, False]),
        fail=st.sampled_from([False, False, False, True]),
        why=st.sampled_from([SkipReason.FAILED, SkipReason.CLOSED]),
    )
    def settle(
        self, pick: int, share: int, saved: int, fine: bool, fail: bool, why: SkipReason
    ) -> None:
        """Commit or roll back some or all of a reservation."""
        handle = sorted(self.open)[pick % len(self.open)]
        self._settle(handle, share, saved, fine, fail, why)

    @rule(pick=PICK, goal=TIER, demand=st.booleans(), size=st.integers(1, 3))
    def copy(self, pick: int, goal: int, demand: bool, size: int) -> None:
        resident = [x for x in self.resident() if x[1] != goal]
        if not resident:
            return
        source = resident[pick % len(resident)][1]
        chosen = [x for x in resident if x[1] == source][:size]
        sizes = {p: n for p, _, n in self.real.parts(source)}
        wanted = [StoreItem(p, None, BlockKey(b"r" * 32), sizes[p]) for p, _, _ in chosen]
        self._reserve(goal, wanted, "none", "", None, demand, source)

    # ---------------------------------------------------------------- lookups

    @rule(
        tenant=NAMES,
        path=PATHS,
        ends=st.tuples(st.integers(0, 5), st.integers(0, 3)),
        lossy=st.booleans(),
        ttl=TTLS,
        uses=st.tuples(st.booleans(), st.booleans()),
    )
    def lookup(
        self,
        tenant: str,
        path: list[int],
        ends: tuple[int, int],
        lossy: bool,
        ttl: float | None,
        uses: tuple[bool, bool],
    ) -> None:
        chain = chains.keys(path, tenant)
        query = chains.query(
            chain,
            groups=SPACES[tenant],
            tokens=len(chain) * chains.BLOCK - ends[1],
            lossy=lossy,
            ttl=ttl,
            touch=uses[0],
            lease=uses[1],
            start=min(ends[0], len(chain)),
        )
        found = self.real.lookup(query, self.now)
        assert found == self.naive.lookup(query, self.now, found.lease)
        assert bool(found.lease) == (uses[1] and bool(found.parts))
        if found.lease:
            self.leases.append(found.lease)

    @rule(tenant=NAMES, path=PATHS, how_far=st.integers(0, 2))
    def cancelled(self, tenant: str, path: list[int], how_far: int) -> None:
        """A caller that goes away leaves no trace (it only probes, so it moves no clock)."""
        query = chains.query(chains.keys(path, tenant), groups=SPACES[tenant], touch=False)
        look = self.real.begin_lookup(query, self.now)
        for _ in range(how_far):
            if self.real.advance(look, self.now):
                break
        self.real.check()
        self.real.abandon(look, self.now)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        same(self.real.release(lease, self.now), self.naive.release(lease))
        assert self.real.release(lease, self.now) == ()

    # ---------------------------------------------------------------- room, faults, time

    @rule(tier=TIER, nbytes=st.integers(1, 60), tenant=NAMES)
    def make_room(self, tier: int, nbytes: int, tenant: str) -> None:
        got = self.real.make_room(tier, nbytes, tenant=tenant, now=self.now)
        self._moves(got, self.naive.make_room(tier, nbytes, tenant, self.now))

    @precondition(lambda self: self.demotes)
    @rule(pick=PICK, outcome=st.sampled_from(["done", "done", "cancel", "drop"]))
    def demote(self, pick: int, outcome: str) -> None:
        demote = self.demotes.pop(pick % len(self.demotes))
        if outcome == "cancel":
            self.real.cancel_demote([demote], self.now)
            self.naive.cancel([demote])
            return
        if outcome == "done":
            item = StoreItem(demote.part, None, BlockKey(b"r" * 32), demote.nbytes)
            got = self._reserve(demote.target, [item], "none", "", None, True, demote.source)
            if got.id:
                del self.open[got.id]
                drops = self.real.commit(got.id, [0], self.now, [demote.nbytes], [True])
                naive = self.naive.commit(got.id, [0], self.now, [demote.nbytes], [True])
                same(drops, naive)
                self.remember()
        pair = [(demote.part, demote.generation)]
        reason = EvictReason.DEMOTED if outcome == "done" else EvictReason.CAPACITY
        drops = self.real.dropped(pair, demote.source, reason, self.now)
        same(drops, self.naive.dropped(pair, demote.source, reason, self.now))

    @rule(pick=PICK, older=st.sampled_from([0, 0, 0, 1]))
    def invalidate(self, pick: int, older: int) -> None:
        resident = self.resident()
        if resident:
            part, tier, generation = resident[pick % len(resident)]
            args = (part, tier, generation - older, EvictReason.DAMAGED, self.now)
            same(self.real.invalidate(*args), self.naive.invalidate(*args))

    @rule(tenant=NAMES, path=PATHS, reason=st.sampled_from([EvictReason.REMOVED]))
    def forget(self, tenant: str, path: list[int], reason: EvictReason) -> None:
        names = [chains.part(chains.keys(path, tenant)[-1], 0)]
        got = self.real.forget(names, reason, self.now)
        same(got, self.naive.forget(names, reason, self.now))

    @rule(tier=TIER, capacity=st.integers(20, 100))
    def resize(self, tier: int, capacity: int) -> None:
        got = self.real.set_capacity(tier, capacity, self.now)
        self._moves(got, self.naive.set_capacity(tier, capacity, self.now))
        self.shrunk = True

    @rule(seconds=st.integers(1, 4))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        self._moves(self.real.tick(self.now), self.naive.tick(self.now))

    # ---------------------------------------------------------------- always

    @invariant()
    def agrees(self) -> None:
        self.real.check()
        self.remember()
        for tier in range(len(TIERS)):
            assert self.real.used(tier) == self.naive.used(tier)
            assert self.real.reserved(tier) == self.naive.reserved(tier)
            if not self.shrunk:
                assert self.real.used(tier) + self.real.reserved(tier) <= TIERS[tier].capacity
            for tenant in SPACES:
                assert self.real.tenant_bytes(tenant, tier) == self.naive.usage(tenant, tier)
        for name in self.names:
            assert self.real.state(name, self.now) == self.naive.state(name, self.now)
        assert self.real.leases() == len(self.leases)

    def teardown(self) -> None:
        """At rest nothing is held, and the log of it all replays byte for byte."""
        for lease in self.leases:
            self.real.release(lease, self.now)
        for handle, (_, _, left, _) in self.open.items():
            self.real.rollback(handle, left, self.now)
        self.real.cancel_demote(self.demotes, self.now)
        _, demotes = self.real.tick(self.now)
        self.real.cancel_demote(demotes, self.now)
        self.real.check()
        assert not self.real._at.busy
        again = Decisions(TIERS, policy=Lru, tenants=TENANTS)
        assert list(replay(self.log.lines, again)) == self.log.lines
        assert [self.real.reserved(t) for t in range(len(TIERS))] == [0, 0, 0]


def test_equals_the_naive_model_in_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "SLICE", 2)
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=25))


def test_equals_the_naive_model() -> None:
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))


@pytest.mark.stress
def test_equals_the_naive_model_for_long() -> None:
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=150))
