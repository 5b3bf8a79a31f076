"""Lookups: coverage of every group kind, leases, slices, reasons."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decisions import chains
from tierkv.decisions import matching
from tierkv.decisions.core import Decisions
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.types import (
    EvictReason,
    GroupRule,
    MissReason,
    SkipReason,
    TierLimits,
)
from tierkv.errors import ClosedError
from tierkv.layout import GroupKind

FULL = GroupRule(GroupKind.FULL)
WINDOW = GroupRule(GroupKind.SLIDING, 6)  # blocks of 4 tokens: 5 tokens back reach two blocks
STATE = GroupRule(GroupKind.STATE)
LATENT = GroupRule(GroupKind.LATENT)


def test_f018_tokens_of_a_partial_tail_count_only_if_it_is_there() -> None:
    d = chains.decisions(1000)
    chain = chains.keys(range(6))
    chains.store(d, 0, chains.items(chain[:5]))
    assert chains.look(d, chain, tokens=22).tokens == 20
    chains.store(d, 0, chains.items(chain, start=5, private=True))
    assert chains.look(d, chain, tokens=22).tokens == 22
    assert chains.look(d, chain[:5]).tokens == 20


def test_f019_a_stored_block_is_not_stored_again() -> None:
    d = chains.decisions(1000)
    chain = chains.keys(range(3))
    chains.store(d, 0, chains.items(chain))
    again = d.reserve(0, chains.items(chain), tenant="t", now=1.0)
    assert again.id == 0
    assert [o.generation for o in again.outcomes] == [0, 0, 0]
    assert chains.skips(again) == [None, None, None]


def test_f020_what_a_match_promised_stays_while_it_is_leased() -> None:
    d = chains.decisions(50)
    chain = chains.keys(range(5))
    chains.store(d, 0, chains.items(chain))
    found = d.lookup(chains.query(chain), 0.0)
    refused = d.reserve(0, chains.items(chains.keys([9])), tenant="t", now=1.0)
    assert chains.skips(refused) == [SkipReason.FULL]
    for part in found.parts:
        state = d.state(part.part, 1.0)
        assert (state.generation, state.leases) == (part.generation, 1)
    # a copy that turns out damaged shortens the next match; it raises nothing
    bad = found.parts[3]
    assert d.invalidate(bad.part, 0, bad.generation, EvictReason.DAMAGED, 2.0) == ()
    assert chains.look(d, chain, 2.0).blocks == 3
    drops = d.release(found.lease, 3.0)
    assert [(x.part, x.reason) for x in drops] == [(bad.part, EvictReason.DAMAGED)]
    d.check()


def test_f021_a_part_being_stored_is_no_hit_and_not_stored_twice() -> None:
    d = chains.decisions(100)
    chain = chains.keys([1])
    got = d.reserve(0, chains.items(chain), tenant="t", now=0.0)
    found = chains.look(d, chain)
    assert (found.blocks, found.reason) == (0, MissReason.PENDING)
    second = d.reserve(0, chains.items(chain), tenant="t", now=0.0)
    assert chains.skips(second) == [SkipReason.IN_FLIGHT]
    d.commit(got.id, [0], 1.0)
    assert chains.look(d, chain).blocks == 1


@pytest.mark.parametrize("end", ["release", "abandon"])
def test_f047_ten_thousand_lookups_without_a_load_leave_all_evictable(end: str) -> None:
    d = chains.decisions(100)
    chain = chains.keys(range(10))
    chains.store(d, 0, chains.items(chain))
    for number in range(10_000):
        if end == "release":
            d.release(d.lookup(chains.query(chain[:3]), float(number)).lease, float(number))
        else:
            look = d.begin_lookup(chains.query(chain[:3]), float(number))
            d.advance(look, float(number))
            d.abandon(look, float(number))
    assert d.leases() == 0
    d.check()
    got = chains.store(d, 0, chains.items(chains.keys([99]), 100), 1e5)
    assert len(got.drops) == 10


def test_one_part_is_held_as_a_lookup_would_find_it() -> None:
    d = chains.decisions(30, 1000)
    keys = chains.keys([1])
    part = chains.part(keys[0])
    assert d.hold_part(part, 0.0) is None
    chains.store(d, 0, chains.items(keys, 10, ttl=5.0))
    generation = d.state(part, 0.0).generation
    held = d.hold_part(part, 0.0)
    assert held is not None
    assert held[1:] == (0, generation)
    assert d.leases() == 1
    d.check()
    chains.store(d, 0, chains.items(chains.keys([2, 3, 4]), 10))
    assert 0 in d.state(part, 0.0).tiers, "what is held stays"
    assert d.release(held[0], 0.0) == ()
    assert d.hold_part(part, 6.0) is None, "its time is over"
    assert d.leases() == 0
    d.check()


def test_f048_the_hit_ratio_does_not_decay() -> None:
    d = chains.decisions(100)
    sessions = [chains.keys([n, n + 1]) for n in range(15)]  # 300 bytes for 100
    hits: list[int] = []
    for round_ in range(1000):
        chain = sessions[(round_ * 7) % 15 if round_ % 3 else round_ % 4]
        found = d.lookup(chains.query(chain), float(round_))
        hits.append(found.blocks)
        chains.store(d, 0, chains.items(chain), float(round_))
        d.release(found.lease, float(round_))
    first, last = sum(hits[100:220]), sum(hits[-120:])
    assert first > 0
    assert abs(first - last) <= 0.02 * first + 1
    assert d.leases() == 0


def test_f049_a_negative_count_is_an_exception() -> None:
    d = chains.decisions(100)
    chain = chains.keys([1])
    chains.store(d, 0, chains.items(chain))
    lease = d.lookup(chains.query(chain), 0.0).lease
    row = d._at.index.rows[chains.part(chain[0])]
    d.release(lease, 1.0)
    assert d.release(lease, 1.0) == (), "a second release is harmless"
    with pytest.raises(KeyError):
        d._at.unpin(row)
    with pytest.raises(AssertionError, match="below zero"):
        d._at.ledger.discharge(0, 0, 11)
    d = chains.decisions(100)
    d._at.ledger.used[0] = 5
    with pytest.raises(AssertionError, match="used bytes"):
        d.check()


def test_ended_handles_are_refused() -> None:
    d = chains.decisions(100)
    chain = chains.keys([1])
    got = d.reserve(0, chains.items(chain), tenant="t", now=0.0)
    d.commit(got.id, [0], 0.0)
    with pytest.raises(ClosedError):
        d.commit(got.id, [0], 0.0)
    with pytest.raises(ClosedError):
        d.rollback(got.id, [0], 0.0)
    look = d.begin_lookup(chains.query(chain), 0.0)
    with pytest.raises(ClosedError, match="not done"):
        d.finish(look, 0.0)
    d.advance(look, 0.0)
    d.release(d.finish(look, 0.0).lease, 0.0)
    with pytest.raises(ClosedError):
        d.advance(look, 0.0)
    d.abandon(look, 0.0)
    d.check()


# --------------------------------------------------------------------------- coverage


@given(
    missing=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=6),
    tail=st.integers(0, 3),
    window=st.integers(1, 20),
    slice_=st.integers(1, 9),
    start=st.sampled_from([0, 0, 1, 3, 7, 8]),
)
def test_a_match_is_the_largest_loadable_prefix(
    missing: set[tuple[int, int]], tail: int, window: int, slice_: int, start: int
) -> None:
    groups = (FULL, GroupRule(GroupKind.SLIDING, window), STATE)
    d = chains.decisions(10_000)
    chain = chains.keys(range(8))
    tokens = 32 - tail
    chains.store(d, 0, chains.items(chain, groups=groups))
    for block, group in missing:
        d.forget([chains.part(chain[block], group)], EvictReason.REMOVED, 0.0)

    def loadable(blocks: int) -> bool:
        end = tokens if blocks == 8 else 4 * blocks
        full = all((b, 0) not in missing for b in range(start, blocks))
        covered = {t // 4 for t in range(max(0, end - (window - 1)), end)}
        sliding = all((b, 1) not in missing for b in covered if b >= start)
        return full and sliding and (blocks == start or (blocks - 1, 2) not in missing)

    expected = max(n for n in range(start, 9) if loadable(n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "SLICE", slice_)
        found = d.lookup(chains.query(chain, groups=groups, tokens=tokens, start=start), 1.0)
    d.check()
    assert found.blocks == expected
    assert found.tokens == (tokens if expected == 8 else 4 * expected)
    assert (found.reason is None) == (expected == 8)
    end = found.tokens
    needed = {(b, 0) for b in range(start, expected)}
    if expected > start:
        needed |= {(t // 4, 1) for t in range(max(0, end - (window - 1)), end) if t // 4 >= start}
        needed.add((expected - 1, 2))
    got = [(p.block, p.group) for p in found.parts]
    assert set(got) == needed
    assert all(a < b for a, b in pairwise(got)), "ordered by block, then group"
    leased = {p.part for p in found.parts}
    for block in range(8):
        for group in range(3):
            name = chains.part(chain[block], group)
            assert d.state(name, 1.0).leases == (name in leased)
    d.release(found.lease, 2.0)
    assert not d._at.busy


def test_state_and_window_parts_need_no_ancestors() -> None:
    groups = (LATENT, WINDOW, STATE)
    d = chains.decisions(10_000)
    chain = chains.keys(range(6))
    chains.store(d, 0, chains.items(chain, groups=groups))
    old = [chains.part(chain[b], g) for b in range(4) for g in (1, 2)]
    drops = d.dropped([(p, d.state(p, 0.0).generation) for p in old], 0, EvictReason.CAPACITY, 1.0)
    assert len(drops) == 8
    assert chains.look(d, chain, groups=groups).blocks == 6
    shorter = chains.look(d, chain[:4], groups=groups)
    assert (shorter.blocks, shorter.reason) == (0, MissReason.EVICTED)
    d.check()


# --------------------------------------------------------------------------- fidelity, time


def test_exact_sessions_never_get_lossy_or_derived_parts() -> None:
    d = chains.decisions(1000)
    lossy, derived = chains.keys([1]), chains.keys([2])
    chains.store(d, 0, chains.items(lossy, lossless=False))
    chains.store(d, 0, chains.items(derived, exact=False))
    for chain in (lossy, derived):
        found = chains.look(d, chain)
        assert (found.blocks, found.reason) == (0, MissReason.FIDELITY)
        assert chains.look(d, chain, lossy=True).blocks == 1
        got = d.reserve(0, chains.items(chain), tenant="t", now=1.0)
        drops = d.commit(got.id, [0], 1.0)
        assert [x.reason for x in drops] == [EvictReason.REPLACED]
        assert chains.look(d, chain).blocks == 1
        worse = chains.items(chain, exact=False)
        assert d.reserve(0, worse, tenant="t", now=2.0).outcomes[0].generation == 0
        assert chains.look(d, chain).blocks == 1
    assert d.used(0) == 20
    d.check()


def test_the_fastest_acceptable_copy_is_found() -> None:
    d = chains.decisions(100, 100)
    chain = chains.keys([1])
    chains.store(d, 1, chains.items(chain))
    got = d.reserve(0, chains.items(chain, lossless=False), tenant="t", now=0.0, source=1)
    d.commit(got.id, [0], 0.0, lossless=[False])
    assert [p.tier for p in chains.look(d, chain).parts] == [1]
    assert [p.tier for p in chains.look(d, chain, lossy=True).parts] == [0]


def test_ttl_runs_on_the_given_clock() -> None:
    d = chains.decisions(1000)
    timed, shared = chains.keys([1]), chains.keys([2])
    chains.store(d, 0, chains.items(timed, ttl=10.0), 100.0)
    chains.store(d, 0, chains.items(shared, ttl=10.0), 100.0)
    assert chains.look(d, timed, 105.0, ttl=10.0).blocks == 1  # lives until 115
    assert chains.look(d, shared, 105.0).blocks == 1  # a session without TTL: for ever
    chains.look(d, timed, 114.0, ttl=100.0, touch=False)
    held = d.lookup(chains.query(timed, ttl=1.0), 114.5)
    found = chains.look(d, timed, 116.0)
    assert (found.blocks, found.reason) == (0, MissReason.EXPIRED)
    assert d.tick(117.0) == ((), ()), "the lease holder may still load it"
    d.release(held.lease, 118.0)
    drops, _ = d.tick(119.0)
    assert [(x.part, x.reason) for x in drops] == [(chains.part(timed[0]), EvictReason.EXPIRED)]
    assert chains.look(d, shared, 1e6).blocks == 1
    assert d.state(chains.part(timed[0]), 120.0).reason is MissReason.EXPIRED
    d.check()


def test_reasons_are_remembered_up_to_a_bound() -> None:
    d = chains.decisions(10, history=5)
    names = [chains.keys([n]) for n in range(20)]
    for chain in names:
        chains.store(d, 0, chains.items(chain))
    reasons = [chains.look(d, chain).reason for chain in names]
    assert reasons[-1] is None
    assert reasons[14:19] == [MissReason.EVICTED] * 5
    assert set(reasons[:14]) == {MissReason.NEVER_STORED}
    state = d.state(chains.part(names[15][0]), 3.0)
    assert (state.reason, state.tier, state.ago) == (MissReason.EVICTED, 0, 3.0)


# --------------------------------------------------------------------------- slices


def test_long_lookups_come_in_slices() -> None:
    d = chains.decisions(10_000)
    chain = chains.keys(range(600))
    chains.store(d, 0, chains.items(chain))
    look = d.begin_lookup(chains.query(chain), 1.0)
    assert not d.advance(look, 1.0)
    assert sum(d.state(chains.part(k), 1.0).leases for k in chain) == 256
    assert not d.advance(look, 1.0)
    assert d.advance(look, 1.0)
    assert d.finish(look, 1.0).blocks == 600


def test_what_is_lost_between_slices_shortens_the_match() -> None:
    d = chains.decisions(10_000)
    chain = chains.keys(range(600))
    chains.store(d, 0, chains.items(chain))
    look = d.begin_lookup(chains.query(chain), 1.0)
    d.advance(look, 1.0)
    bad = chains.part(chain[100])
    generation = d.state(bad, 1.0).generation
    assert d.invalidate(bad, 0, generation, EvictReason.DAMAGED, 1.0) == (), "leased by the slice"
    while not d.advance(look, 2.0):
        d.check()
    found = d.finish(look, 2.0)
    assert (found.blocks, found.reason) == (100, MissReason.DAMAGED)
    assert sum(d.state(chains.part(k), 1.0).leases for k in chain) == 100
    d.release(found.lease, 3.0)
    drops, _ = d.tick(4.0)
    assert not drops or drops[0].part == bad
    d.check()


def test_what_is_lost_before_finish_shortens_the_match() -> None:
    d = chains.decisions(1000)
    chain = chains.keys(range(6))
    chains.store(d, 0, chains.items(chain))
    look = d.begin_lookup(chains.query(chain), 1.0)
    assert d.advance(look, 1.0)
    bad = chains.part(chain[2])
    d.invalidate(bad, 0, d.state(bad, 1.0).generation, EvictReason.FAILED, 1.0)
    found = d.finish(look, 1.0)
    assert (found.blocks, found.reason) == (2, MissReason.FAILED)
    d.release(found.lease, 1.0)
    assert not d._at.busy
    d.check()


def test_lru_touches_leaves_first() -> None:
    d = Decisions([TierLimits("host", 60)], policy=Lru)
    a, b = chains.keys([1, 2, 3]), chains.keys([4, 5, 6])
    chains.store(d, 0, chains.items(a))
    chains.store(d, 0, chains.items(b))
    chains.look(d, a, 1.0)
    drops, _ = d.make_room(0, 40, tenant="t", now=2.0)
    gone = [chains.part(k) for k in (b[2], b[1], b[0], a[2])]
    assert [x.part for x in drops] == gone
