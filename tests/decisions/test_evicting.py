"""Capacity and eviction: who goes, who stays, and that the accounts are right at each step."""

from __future__ import annotations

import random

import pytest

from tests.decisions import chains
from tierkv.decisions.core import Decisions
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import (
    Drop,
    EvictReason,
    MissReason,
    SkipReason,
    TenantLimits,
    TierLimits,
)

TIER_COUNTS = [1, 2]


def resident(d: Decisions, tier: int) -> int:
    return sum(nbytes for _, _, nbytes in d.parts(tier))


@pytest.mark.parametrize("policy", [Lru, Lrfu])
def test_f061_capacity_holds_with_nothing_else_set(policy: type[Lru | Lrfu]) -> None:
    d = chains.decisions(100, policy=policy)
    for number in range(50):
        got = chains.store(d, 0, chains.items(chains.keys([number])), float(number))
        assert got.outcomes[0].generation
        assert d.used(0) + d.reserved(0) <= 100
        assert d.used(0) == resident(d, 0)
    assert d.used(0) == 100


def test_f063_storing_again_counts_nothing_twice() -> None:
    d = chains.decisions(100)
    wanted = chains.items(chains.keys([1, 2]))
    for _ in range(1000):
        chains.store(d, 0, wanted)
        assert d.used(0) == 20
        assert d.reserved(0) == 0
    d.check()


@pytest.mark.parametrize("tiers", TIER_COUNTS)
def test_f064_accounts_are_the_sum_of_the_entries_at_each_step(tiers: int) -> None:
    rng = random.Random(3)
    d = chains.decisions(*[300] * tiers)
    now = 0.0
    for _ in range(1500):
        now += rng.random()
        tier = rng.randrange(tiers)
        wanted = chains.items(
            chains.keys([rng.randrange(9), rng.randrange(3)]),
            rng.randrange(1, 40),
            ttl=rng.choice([None, 2.0]),
            exact=rng.random() < 0.8,
        )
        action = rng.randrange(5)
        if action == 0:
            d.forget([i.part for i in wanted], EvictReason.REMOVED, now)
        elif action == 1:
            d.tick(now)
        elif action == 2:
            got = d.reserve(tier, wanted, tenant="t", now=now)
            if got.id:
                d.rollback(got.id, chains.reserved(got), now)
        else:
            chains.store(d, tier, wanted, now)
        for level in range(tiers):
            assert d.used(level) == resident(d, level) >= 0
            assert d.used(level) <= 300
    d.check()


def test_f065_k3_an_oversize_item_evicts_nothing() -> None:
    d = chains.decisions(100)
    small = [chains.keys([n]) for n in (1, 2)]
    for chain in small:
        chains.store(d, 0, chains.items(chain, 40))
    got = d.reserve(0, chains.items(chains.keys([3]), 101), tenant="t", now=1.0)
    assert chains.skips(got) == [SkipReason.TOO_LARGE]
    assert not got.drops
    assert [chains.look(d, chain).blocks for chain in small] == [1, 1]


def test_k3_an_item_that_leases_leave_no_room_for_evicts_nothing() -> None:
    d = chains.decisions(100)
    held, loose = chains.keys([1]), chains.keys([2])
    chains.store(d, 0, chains.items(held, 60))
    chains.store(d, 0, chains.items(loose, 30))
    d.lookup(chains.query(held), 1.0)
    got = d.reserve(0, chains.items(chains.keys([3]), 50), tenant="t", now=1.0)
    assert chains.skips(got) == [SkipReason.FULL]
    assert not got.drops
    assert chains.look(d, loose).blocks == 1


def test_f066_the_default_policy_evicts() -> None:
    tiers = [TierLimits("host", 50)]
    d = Decisions(tiers, policy=Lrfu)
    for number in range(20):
        assert chains.store(d, 0, chains.items(chains.keys([number]))).outcomes[0].generation
    assert d.used(0) == 50


@pytest.mark.parametrize("tiers", TIER_COUNTS)
def test_f068_k5_probes_renew_nothing_and_block_nothing(tiers: int) -> None:
    d = chains.decisions(*[50] * tiers)
    known = [chains.keys([n]) for n in range(5)]
    for chain in known:
        chains.store(d, tiers - 1, chains.items(chain))
    for round_ in range(200):
        for chain in known[:2]:
            d.lookup(chains.query(chain, touch=False, lease=False), float(round_))
    fresh = chains.keys([100])
    got = chains.store(d, tiers - 1, chains.items(fresh), 300.0)
    assert got.outcomes[0].generation
    assert [x.part for x in got.drops] == [chains.part(known[0][0])], "the oldest, probed or not"
    assert d.leases() == 0


def test_f069_k6_the_last_copy_is_not_dropped_on_a_false_belief() -> None:
    d = chains.decisions(20, 100)
    chain = chains.keys([1])
    chains.store(d, 0, chains.items(chain))
    chains.copy(d, 0, 1, chains.items(chain))
    generation = d.state(chains.part(chain[0]), 0.0).generation
    # the file on the slower tier was deleted behind our back, and a read found out
    d.invalidate(chains.part(chain[0]), 1, generation, EvictReason.FAILED, 1.0)
    got = d.reserve(0, chains.items(chains.keys([2]), 20), tenant="t", now=2.0)
    assert chains.skips(got) == [SkipReason.FULL]
    assert got.short > 0, "the copy is dirty again: it has to be written anew before it may go"
    assert chains.look(d, chain).blocks == 1
    drops, demotes = d.make_room(0, 20, tenant="t", now=3.0)
    assert not drops
    assert [x.part for x in demotes] == [chains.part(chain[0])]


def test_k6_a_failed_demotion_leaves_everything_as_it_was() -> None:
    d = chains.decisions(30, 100)
    chain = chains.keys([1, 2, 3])
    chains.store(d, 0, chains.items(chain))
    _, demotes = d.make_room(0, 20, tenant="t", now=1.0)
    assert [x.part for x in demotes] == [chains.part(chain[2]), chains.part(chain[1])]
    wanted = [i for i in chains.items(chain) if i.part in {x.part for x in demotes}]
    got = d.reserve(1, wanted, tenant="t", now=1.0, source=0)
    d.rollback(got.id, chains.reserved(got), 2.0)
    d.cancel_demote(demotes, 2.0)
    d.check()
    assert chains.look(d, chain).blocks == 3
    assert (d.used(0), d.used(1), d.reserved(1)) == (30, 0, 0)
    _, again = d.make_room(0, 20, tenant="t", now=3.0)
    assert again == demotes


def test_a_demotion_is_never_in_neither_tier() -> None:
    d = chains.decisions(30, 100)
    chain = chains.keys([1, 2, 3])
    chains.store(d, 0, chains.items(chain))
    _, demotes = d.make_room(0, 10, tenant="t", now=1.0)
    assert chains.look(d, chain).blocks == 3
    chains.copy(d, 0, 1, [i for i in chains.items(chain) if i.part == demotes[0].part])
    assert chains.look(d, chain).blocks == 3
    pairs = [(x.part, x.generation) for x in demotes]
    drops = d.dropped(pairs, 0, EvictReason.DEMOTED, 2.0)
    assert [(x.part, x.reason) for x in drops] == [(demotes[0].part, EvictReason.DEMOTED)]
    found = chains.look(d, chain)
    assert [p.tier for p in found.parts] == [0, 0, 1]
    d.check()


def test_f070_k7_a_newly_demoted_part_is_not_the_next_victim() -> None:
    d = chains.decisions(10, 30)
    old = [chains.keys([n]) for n in range(3)]
    for chain in old:
        chains.store(d, 1, chains.items(chain))
    moved = chains.keys([9])
    chains.store(d, 0, chains.items(moved))
    chains.copy(d, 0, 1, chains.items(moved), 1.0)  # evicts old[0]
    d.dropped([(chains.part(moved[0]), 4)], 0, EvictReason.DEMOTED, 1.0)
    got = chains.store(d, 1, chains.items(chains.keys([10])), 2.0)
    assert [x.part for x in got.drops] == [chains.part(old[1][0])]
    assert chains.look(d, moved, 3.0).blocks == 1


@pytest.mark.parametrize("tiers", TIER_COUNTS)
def test_f071_a_hundred_into_a_tier_for_ten(tiers: int) -> None:
    d = chains.decisions(*[100] * tiers)
    chain = chains.keys(range(100))
    got = d.reserve(tiers - 1, chains.items(chain), tenant="t", now=0.0)
    assert len(got.outcomes) == 100
    assert [bool(o.generation) for o in got.outcomes] == [True] * 10 + [False] * 90
    assert chains.skips(got)[10:12] == [SkipReason.FULL, SkipReason.NO_PARENT]
    d.commit(got.id, chains.reserved(got), 0.0)
    assert chains.look(d, chain).blocks == 10
    d.check()


def test_k5_eviction_goes_on_when_children_live_elsewhere() -> None:
    """The parent is only on disk, the child only in RAM: neither may block the disk for ever."""
    d = chains.decisions(100, 10)
    chain = chains.keys([1, 2])
    chains.store(d, 1, chains.items(chain[:1]))
    chains.store(d, 0, chains.items(chain, start=1))
    got = chains.store(d, 1, chains.items(chains.keys([9])), 1.0)
    assert got.outcomes[0].generation
    assert {(x.part, x.tier, x.reason) for x in got.drops} == {
        (chains.part(chain[1]), 0, EvictReason.ORPHANED),
        (chains.part(chain[0]), 1, EvictReason.CAPACITY),
    }
    d.check()


def test_k5_a_leased_child_elsewhere_keeps_its_parent() -> None:
    d = chains.decisions(100, 10)
    chain = chains.keys([1, 2])
    chains.store(d, 1, chains.items(chain[:1]))
    chains.store(d, 0, chains.items(chain, start=1))
    lease = d.lookup(chains.query(chain), 0.5).lease
    got = d.reserve(1, chains.items(chains.keys([9])), tenant="t", now=1.0)
    assert chains.skips(got) == [SkipReason.FULL]
    d.release(lease, 2.0)
    assert chains.store(d, 1, chains.items(chains.keys([9])), 3.0).outcomes[0].generation


def test_k8_a_flood_leaves_the_reserved_share_of_another_tenant() -> None:
    limits = {"acme": TenantLimits(reserved={"t0": 100})}
    d = chains.decisions(200, tenants=limits)
    mine = [chains.keys([n], "acme") for n in range(10)]
    for chain in mine:
        chains.store(d, 0, chains.items(chain, tenant="acme"), 0.0, "acme")
    for number in range(500):
        flood = chains.items(chains.keys([number], "noisy"), tenant="noisy")
        assert chains.store(d, 0, flood, 1.0 + number, "noisy").outcomes[0].generation
    assert d.tenant_bytes("acme", 0) == 100
    assert sum(chains.look(d, chain).blocks for chain in mine) == 10
    d.check()


def test_k8_what_a_tenant_uses_beyond_its_share_may_be_taken() -> None:
    limits = {"acme": TenantLimits(reserved={"t0": 50})}
    d = chains.decisions(100, tenants=limits)
    for number in range(10):
        mine = chains.items(chains.keys([number], "acme"), tenant="acme")
        chains.store(d, 0, mine, 0.0, "acme")
    for number in range(20):
        flood = chains.items(chains.keys([number], "noisy"), tenant="noisy")
        chains.store(d, 0, flood, 1.0, "noisy")
    assert d.tenant_bytes("acme", 0) == 50
    assert d.tenant_bytes("noisy", 0) == 50


def test_a_tenant_over_its_quota_loses_its_own_coldest() -> None:
    d = chains.decisions(100, tenants={"acme": TenantLimits(quota={"t0": 30})})
    other = chains.keys([1], "other")
    chains.store(d, 0, chains.items(other, tenant="other"), 0.0, "other")
    drops: list[Drop] = []
    for number in range(5):
        mine = chains.items(chains.keys([number], "acme"), tenant="acme")
        drops += chains.store(d, 0, mine, 1.0, "acme").drops
    assert [x.reason for x in drops] == [EvictReason.QUOTA] * 2
    assert d.tenant_bytes("acme", 0) == 30
    gone = chains.keys([0], "acme")
    assert chains.look(d, gone).reason is MissReason.QUOTA
    assert chains.look(d, other).blocks == 1


def test_quotas_refuse_what_cannot_be_made_to_fit() -> None:
    limits = TenantLimits(quota={"t0": 30}, session_quota=25)
    d = chains.decisions(100, tenants={"acme": limits})
    chain = chains.keys([1, 2, 3], "acme")
    wanted = chains.items(chain, tenant="acme")
    got = d.reserve(0, wanted, tenant="acme", now=0.0, session="s", session_bytes=0)
    assert chains.skips(got) == [None, None, SkipReason.SESSION_QUOTA]
    d.commit(got.id, [0, 1], 0.0)
    d.lookup(chains.query(chain), 0.0)
    big = chains.items(chains.keys([9], "acme"), 15, tenant="acme")
    refused = d.reserve(0, big, tenant="acme", now=1.0)
    assert chains.skips(refused) == [SkipReason.TENANT_QUOTA]
    huge = chains.items(chains.keys([8], "acme"), 31, tenant="acme")
    assert chains.skips(d.reserve(0, huge, tenant="acme", now=1.0)) == [SkipReason.TOO_LARGE]
    assert chains.look(d, chains.keys([9], "acme")).reason is MissReason.QUOTA


def test_leaves_go_first_and_roots_last() -> None:
    d = chains.decisions(60)
    trunk = chains.keys([0, 1, 2])
    branch = chains.keys([0, 1, 5, 6])
    chains.store(d, 0, chains.items(trunk))
    chains.store(d, 0, chains.items(branch))
    assert d.used(0) == 50
    order = []
    for number in range(5):
        got = chains.store(d, 0, chains.items(chains.keys([90 + number]), 20), 1.0)
        order += [x.part for x in got.drops if x.part in {chains.part(k) for k in trunk + branch}]
        d.check()
    assert order == [chains.part(k) for k in (trunk[2], branch[3], branch[2], trunk[1], trunk[0])]


def test_a_damaged_part_makes_a_hole_until_it_is_stored_again() -> None:
    d = chains.decisions(100)
    chain, other = chains.keys(range(4)), chains.keys([50])
    chains.store(d, 0, chains.items(chain))
    chains.store(d, 0, chains.items(other))
    hole = chains.part(chain[1])
    d.invalidate(hole, 0, d.state(hole, 1.0).generation, EvictReason.DAMAGED, 1.0)
    d.check()
    found = chains.look(d, chain, 2.0)
    assert (found.blocks, found.reason) == (1, MissReason.DAMAGED)
    # what is behind the hole goes before anything else, however old that is
    drops, _ = d.make_room(0, 70, tenant="t", now=3.0)
    assert [(x.part, x.reason) for x in drops] == [(chains.part(chain[3]), EvictReason.ORPHANED)]
    chains.store(d, 0, chains.items(chain[:2]), 4.0)
    d.check()
    assert chains.look(d, chain, 5.0).blocks == 3
    drops, _ = d.make_room(0, 70, tenant="t", now=6.0)
    assert [x.part for x in drops] == [chains.part(other[0])], "whole again: ranked by use"


def test_a_shrunk_tier_is_brought_down() -> None:
    d = chains.decisions(100)
    chain = chains.keys(range(10))
    chains.store(d, 0, chains.items(chain))
    drops, demotes = d.set_capacity(0, 35, 1.0)
    assert [x.reason for x in drops] == [EvictReason.SHRUNK] * 7
    assert not demotes
    assert d.used(0) == 30
    assert chains.look(d, chain).blocks == 3


def test_watermarks_make_room_ahead_of_need() -> None:
    tiers = [TierLimits("host", 100, high=0.8, low=0.5), TierLimits("disk", 1000)]
    d = Decisions(tiers, policy=Lru)
    chain = chains.keys(range(9))
    chains.store(d, 0, chains.items(chain))
    drops, demotes = d.tick(1.0)
    assert not drops
    assert [x.part for x in demotes] == [chains.part(k) for k in reversed(chain[5:])]
    assert d.tick(1.1)[1] == (), "what is on its way out is not asked for twice"
    chains.copy(d, 0, 1, [i for i in chains.items(chain) if i.part in {x.part for x in demotes}])
    d.dropped([(x.part, x.generation) for x in demotes], 0, EvictReason.DEMOTED, 2.0)
    assert d.used(0) == 50
    assert chains.look(d, chain).blocks == 9
    d.check()


def test_background_copies_never_push_out_what_is_hotter() -> None:
    d = chains.decisions(20, 100)
    cold, hot = chains.keys([1]), [chains.keys([n]) for n in (2, 3)]
    chains.store(d, 1, chains.items(cold))
    for chain in hot:
        chains.store(d, 0, chains.items(chain))
        chains.copy(d, 0, 1, chains.items(chain))
    wanted = chains.items(cold)
    got = d.reserve(0, wanted, tenant="t", now=1.0, demand=False, source=1)
    assert chains.skips(got) == [SkipReason.FULL]
    assert got.short == 0, "and nobody demotes for it"
    chains.look(d, cold, 2.0)
    got = d.reserve(0, wanted, tenant="t", now=3.0, demand=False, source=1)
    assert got.outcomes[0].generation
    assert [x.part for x in got.drops] == [chains.part(hot[0][0])]


def test_seven_thousand_leased_parts_at_the_cold_end_are_never_looked_at() -> None:
    d = Decisions([TierLimits("host", 80_000)], policy=Lru)
    cold = [chains.keys([n]) for n in range(7000)]
    for chain in cold:
        chains.store(d, 0, chains.items(chain))
        d.lookup(chains.query(chain, touch=False), 0.0)
    for number in range(1500):
        got = chains.store(d, 0, chains.items(chains.keys([10_000 + number])), 1.0)
        assert got.outcomes[0].generation
    assert sum(chains.look(d, chain, touch=False).blocks for chain in cold) == 7000
    heap = d._at.partitions[0][0][1]
    assert isinstance(heap, Lru)
    assert len(heap._heap) < 3000, "leased parts have left the queue"
