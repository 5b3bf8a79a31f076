"""The cost model: what it learns, what it decides, and that it is pure."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decisions import chains
from tierkv.decisions.cost import (
    Costs,
    Line,
    LoadChoice,
    Run,
    Speed,
    choose,
    profile,
)
from tierkv.decisions.types import EvictReason, Found, FoundPart, MissReason

MIB = 1 << 20


def line(latency: float, bandwidth: float, batches: int = 8) -> Line:
    """What is learned of a tier that behaves exactly so."""
    out = Line()
    for number in range(batches):
        nbytes = (1 + 7 * (number % 2)) * MIB
        out.add(nbytes, latency + nbytes / bandwidth)
    return out


# ------------------------------------------------------------------ estimates


def test_latency_and_bandwidth_are_told_apart() -> None:
    learned = line(0.01, 200 * MIB)
    assert learned.latency == pytest.approx(0.01, rel=0.01)
    assert learned.bandwidth == pytest.approx(200 * MIB, rel=0.01)
    assert learned.seconds(8 * MIB) == pytest.approx(0.05, rel=0.01)
    # more than the largest batch takes several of them, each with its latency
    assert learned.seconds(16 * MIB) == pytest.approx(0.1, rel=0.05)


def test_batches_of_one_size_are_no_riddle() -> None:
    learned = Line()
    for _ in range(5):
        learned.add(MIB, 0.5)
    assert learned.seconds(MIB) == pytest.approx(0.5)
    assert learned.bandwidth == pytest.approx(2 * MIB)


def test_noise_averages_out() -> None:
    rng = random.Random(1)
    learned = Line()
    for _ in range(200):
        nbytes = rng.randrange(MIB, 32 * MIB)
        learned.add(nbytes, (0.002 + nbytes / (500 * MIB)) * rng.uniform(0.8, 1.25))
    assert learned.bandwidth == pytest.approx(500 * MIB, rel=0.15)
    assert learned.seconds(16 * MIB) == pytest.approx(0.034, rel=0.15)


def test_one_stall_is_no_slow_tier_but_two_are() -> None:
    learned = line(0.0, 100 * MIB)
    learned.add(8 * MIB, 30.0)
    assert learned.seconds(8 * MIB) < 0.25
    for _ in range(7):  # throttled for good: believed from the second batch on
        learned.add(8 * MIB, 30.0)
    assert learned.seconds(8 * MIB) > 10


def test_a_tier_that_is_fast_again_is_found_so() -> None:
    learned = line(0.0, MIB)
    for _ in range(30):
        learned.add(8 * MIB, 0.01)
    assert learned.seconds(8 * MIB) < 1


def test_a_slow_first_batch_does_not_make_a_tier_slow_for_minutes() -> None:
    """A disk that had to wake up: what is skipped is read once in 5 s only, to see whether."""
    learned = Line()
    learned.add(8 * MIB, 5.0)
    for _ in range(4):
        learned.add(8 * MIB, 0.01)
    assert learned.seconds(8 * MIB) < 0.02
    learned.add(8 * MIB, 0.001)  # what is quick once or twice proves nothing
    learned.add(8 * MIB, 0.001)
    assert learned.seconds(8 * MIB) > 0.004


def test_nothing_known_costs_nothing() -> None:
    assert Line().seconds(10**9) == 0
    assert Line().bandwidth == 0
    assert Speed().value == 0


@given(st.lists(st.tuples(st.integers(0, 1 << 34), st.floats(0, 1e4, allow_nan=False)), min_size=1))
def test_whatever_is_seen_the_estimates_are_sane(samples: list[tuple[int, float]]) -> None:
    learned = Line()
    for nbytes, seconds in samples:
        learned.add(nbytes, seconds)
        assert learned.latency >= 0
        assert learned.bandwidth >= 0
        assert 0 <= learned.seconds(MIB) < float("inf")
        assert learned.seconds(2 * MIB) >= learned.seconds(MIB)


def test_a_speed_prefers_what_is_recent_and_ignores_nonsense() -> None:
    speed = Speed()
    for _ in range(20):
        speed.add(1000, 1.0)
    for amount, per in ((0, 1.0), (5, 0.0), (-1, 1.0)):
        speed.add(amount, per)
    assert speed.value == pytest.approx(1000)
    assert speed.count == 20
    for _ in range(10):
        speed.add(2000, 1.0)
    assert 1800 < speed.value < 2000


# ------------------------------------------------------------------ load or recompute


def runs(*pairs: tuple[int, int, int], tokens: int = 16) -> list[Run]:
    """(blocks, tier, bytes a block); tier -1 for memory."""
    return [
        Run(blocks, blocks * tokens, ((tier, blocks * nbytes),) if tier >= 0 else ())
        for blocks, tier, nbytes in pairs
    ]


NAMES = ("host", "nvme", "file")


def test_a_fast_tier_is_loaded_whole() -> None:
    choice = choose(runs((64, 1, MIB)), {1: line(0, 1000 * MIB)}, NAMES, speed=1000)
    assert choice == LoadChoice(64, 1024, choice.seconds, 1.024)
    assert choice.seconds == pytest.approx(0.064, rel=0.1)


def test_f073_a_slow_tier_is_not_loaded_and_the_rule_is_named() -> None:
    """A hit of 40 s on disk against 0.9 s of recomputing."""
    choice = choose(runs((64, 1, MIB)), {1: line(0, 1.6 * MIB)}, NAMES, speed=1024 / 0.9)
    assert (choice.blocks, choice.tokens, choice.tier) == (0, 0, 1)
    assert choice.reason is MissReason.SLOWER
    assert choice.rule == "tier nvme: 64 blocks would take 40 s, recomputing them 0.9 s"


def test_what_is_in_memory_comes_although_the_rest_does_not_pay() -> None:
    choice = choose(runs((30, -1, 0), (64, 1, MIB)), {1: line(0, 2 * MIB)}, NAMES, speed=1000)
    assert (choice.blocks, choice.tokens) == (30, 480)
    assert choice.rule == "tier nvme: 64 more blocks would take 32 s, recomputing them 1.02 s"


def test_tiers_are_read_side_by_side() -> None:
    both = runs((64, 1, MIB), (64, 2, MIB))
    lines = {1: line(0, 100 * MIB), 2: line(0, 80 * MIB)}
    choice = choose(both, lines, NAMES, speed=10)
    assert choice.blocks == 128
    assert choice.seconds == pytest.approx(0.8, rel=0.05)


def test_no_speed_no_trimming_but_for_the_deadline() -> None:
    slow = {1: line(0, MIB)}
    assert choose(runs((64, 1, MIB)), slow, NAMES).blocks == 64
    choice = choose(runs((64, 1, MIB)), slow, NAMES, budget=10.5)
    assert 9 <= choice.blocks <= 10
    assert choice.reason is MissReason.DEADLINE
    assert choice.tokens == choice.blocks * 16
    assert "nvme" in choice.rule
    assert choose(runs((64, 1, MIB)), slow, NAMES, budget=0.0).blocks == 0
    assert choose(runs((64, -1, 0)), slow, NAMES, budget=0.0).blocks == 64


def test_a_tier_that_is_hardly_known_is_given_a_chance() -> None:
    assert choose(runs((64, 1, MIB)), {1: line(0, 1, 1)}, NAMES, speed=1e6).blocks == 64
    assert choose(runs((64, 1, MIB)), {}, NAMES, speed=1e6, budget=0.1).blocks == 64


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(-1, 2), st.integers(1, 4 * MIB)), max_size=6
    ),
    st.floats(0.1, 1e6),
    st.one_of(st.none(), st.floats(0, 50)),
    st.floats(1e3, 1e10),
    st.floats(1e3, 1e10),
)
def test_no_choice_is_slower_than_recomputing_or_than_the_best_one(
    pairs: list[tuple[int, int, int]],
    speed: float,
    budget: float | None,
    nvme: float,
    file: float,
) -> None:
    wanted = runs(*pairs)
    lines = {1: line(0.001, nvme), 2: line(0.1, file)}
    choice = choose(wanted, lines, NAMES, speed, budget)
    total = sum(run.tokens for run in wanted)
    slack = 1e-6 + 1e-9 * total / speed
    assert choice.seconds + (total - choice.tokens) / speed <= total / speed + slack
    assert choice.seconds <= choice.tokens / speed + slack
    assert choice.saved == pytest.approx(choice.tokens / speed)
    assert budget is None or choice.seconds <= budget
    if budget is None:
        for end in range(len(wanted) + 1):
            left = choose(wanted[:end], lines, NAMES)
            cost = left.seconds + (total - left.tokens) / speed
            assert choice.seconds + (total - choice.tokens) / speed <= cost + slack


def _found(parts: list[tuple[int, int, int]], blocks: int, tokens: int) -> Found:
    key = chains.keys([1])[0]
    name = key + b"\x00\x00"
    return Found(
        blocks,
        tokens,
        tuple(FoundPart(name, block, 0, tier, 1, n) for block, tier, n in parts),  # type: ignore[arg-type]
        0,
        None,
    )


def test_equal_blocks_are_one_run_and_a_short_tail_is_another() -> None:
    parts = [(block, 1, 100) for block in range(5)] + [(block, 2, 7) for block in range(5, 8)]
    assert profile(_found(parts, 8, 7 * 16 + 3), 16, {0}) == (
        Run(5, 80, ((1, 500),)),
        Run(2, 32, ((2, 14),)),
        Run(1, 3, ((2, 7),)),
    )


def test_a_long_prefix_makes_a_short_profile() -> None:
    parts = [(block, 1 + block % 2, 100 + block % 13) for block in range(10_007)]
    got = profile(_found(parts, 10_007, 10_007 * 16), 16, {0})
    assert len(got) <= 256
    assert sum(run.blocks for run in got) == 10_007
    assert sum(run.tokens for run in got) == 10_007 * 16
    assert sum(n for run in got for _, n in run.load) == sum(n for _, _, n in parts)


# ------------------------------------------------------------------ codecs


def test_a_codec_is_taken_where_it_makes_the_tier_faster_both_measured() -> None:
    costs = Costs(["host", "disk"])
    assert costs.wanted_chain(1, "planes", 4) == "raw"  # nothing is measured
    for _ in range(4):
        costs.sample(1, "read", 10 * MIB, 0.1, 0.0)  # 100 MiB/s
    assert costs.wanted_chain(1, "planes", 4) == "raw"
    for _ in range(3):
        costs.coded("planes", 15 * MIB, 10 * MIB, 15 / 200)  # ratio 1.5, 200 MiB/s a core
    assert costs.codec("planes").ratio == pytest.approx(1.5)
    assert costs.wanted_chain(1, "planes", 1) == "planes"  # min(150, 200) > 100
    for _ in range(30):
        costs.coded("planes", 15 * MIB, 10 * MIB, 15 / 50)  # 50 MiB/s a core
    assert costs.wanted_chain(1, "planes", 1) == "raw"  # min(150, 50) < 100
    assert costs.wanted_chain(1, "planes", 4) == "planes"  # min(150, 200) > 100
    for _ in range(60):
        costs.sample(1, "read", 10 * MIB, 0.005, 0.0)  # 2 GiB/s
    assert costs.wanted_chain(1, "planes", 4) == "raw"


def test_a_small_gain_changes_nothing() -> None:
    costs = Costs(["disk"])
    for _ in range(4):
        costs.sample(0, "read", 10 * MIB, 0.1, 0.0)
        costs.coded("planes", 105, 100, 1e-9)
    assert costs.wanted_chain(0, "planes", 1) == "raw"
    costs.set_chain(0, "planes")
    assert costs.wanted_chain(0, "planes", 1) == "planes"


# ------------------------------------------------------------------ lookups and evictions


def test_a_tier_that_is_out_is_passed_over_and_named() -> None:
    d = chains.decisions(1000, 1000)
    keys = chains.keys([1, 2, 3])
    chains.store(d, 1, chains.items(keys))
    chains.store(d, 0, chains.items(chains.keys([7])))
    d.failed(1, "read", 1.0, hung=True)
    found = d.lookup(chains.query(keys), 1.0)
    assert (found.blocks, found.reason) == (0, MissReason.FAILED)
    assert d.lookup(chains.query(chains.keys([7])), 1.0).blocks == 1
    assert d.admit(1, "read", 2.0)
    assert d.lookup(chains.query(keys), 2.0).blocks == 0  # nobody is a guinea pig
    d.sample(1, "read", 10, 0.1, 2.0)
    found = d.lookup(chains.query(keys), 2.0)
    assert found.blocks == 3


def test_the_next_slower_copy_is_found_where_a_tier_is_out() -> None:
    d = chains.decisions(1000, 1000, 1000)
    keys = chains.keys([1, 2])
    stored = chains.items(keys)
    chains.store(d, 1, stored)
    got = d.reserve(2, stored, tenant="", now=0.0, source=1)
    d.commit(got.id, [0, 1], 0.0)
    assert {p.tier for p in d.lookup(chains.query(keys), 0.0).parts} == {1}
    d.failed(1, "read", 0.0, hung=True)
    assert {p.tier for p in d.lookup(chains.query(keys), 0.0).parts} == {2}


def test_nothing_is_demoted_into_a_tier_that_is_out() -> None:
    d = chains.decisions(30, 1000)
    chains.store(d, 0, chains.items(chains.keys([1]), 10))
    chains.store(d, 0, chains.items(chains.keys([2]), 10))
    drops, demotes = d.make_room(0, 20, tenant="", now=0.0)
    assert (len(drops), len(demotes)) == (0, 1)
    d.cancel_demote(demotes, 0.0)
    for _ in range(5):
        d.failed(1, "write", 0.0)
    drops, demotes = d.make_room(0, 20, tenant="", now=0.0)
    assert [drop.reason for drop in drops] == [EvictReason.CAPACITY]
    assert demotes == ()
    d.tick(1.0)  # time for a probe: the tier is offered again
    assert len(d.make_room(0, 30, tenant="", now=1.0)[1]) == 1
