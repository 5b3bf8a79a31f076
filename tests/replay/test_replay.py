"""A replay decides as the engine does, counts what happened, and adds up the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.replay import chains
from tests.replay.chains import SIZE, request, trace
from tests.traces import samples
from tierkv.blocks import BlockKey, part_id
from tierkv.errors import ConfigError
from tierkv.replay import CostModel, Report, Setup, belady, replay
from tierkv.replay.moves import name_of
from tierkv.traces import Trace, TraceHeader, open_trace

BLOCK = SIZE * chains.HEADER.bytes_per_token
SLOW = CostModel(bandwidth=BLOCK, prefill=SIZE, layers=4, first_token=0.0)
"""A block is read in one second and computed in one second."""


def plain(report: Report) -> dict[str, object]:
    """Everything but how long it took here."""
    return {k: v for k, v in report.to_plain().items() if k != "cpu_s"}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 3, 6, 12, 40])
def test_lru_equals_a_plain_one(seed: int, capacity: int) -> None:
    source = chains.tree(seed, 120, roots=4, width=3)
    report = replay(source, Setup(capacity_blocks=capacity, policy="lru"))
    assert report.hit_blocks == chains.naive_lru(source, capacity)
    assert report.hit_tokens == report.hit_blocks * SIZE
    assert report.requests == 120
    assert report.by_tier[0].capacity_blocks == capacity
    evicted = sum(report.by_tier[0].evictions.values())
    held = report.by_tier[0].written_bytes // BLOCK - evicted
    assert 0 <= held <= capacity


def test_a_replay_is_the_same_whenever_it_runs() -> None:
    source = chains.tree(1, 200)
    setup = Setup(
        capacity_blocks=(6, 20), policy="lrfu", admission="second_use", prefetch="arrival,chain"
    )
    assert plain(replay(source, setup)) == plain(replay(source, setup))


def test_what_is_asked_for_again_after_it_left_is_counted() -> None:
    source = trace(request(0, (11,)), request(1, (12,)), request(2, (11,)), request(3, (11,)))
    report = replay(source, Setup(capacity_blocks=1, policy="lru"))
    assert (report.hit_blocks, report.evicted_before_reuse) == (1, 1)
    assert report.by_tier[0].evictions == {"capacity": 2}
    # of a chain that does not fit, the head is kept
    long = tuple(int("1" * n) for n in range(2, 8))
    report = replay(trace(request(0, long), request(1, long)), Setup(capacity_blocks=2))
    assert (report.hit_blocks, report.skipped) == (2, {"full": 2, "no_parent": 6})


def test_a_partial_block_counts_by_its_tokens() -> None:
    source = trace(*(request(t, (11, 112), tokens=SIZE + 5) for t in range(2)))
    report = replay(source, Setup(capacity_blocks=9))
    assert (report.hit_blocks, report.hit_tokens, report.tokens) == (2, SIZE + 5, 2 * SIZE + 10)
    assert report.token_hit_ratio == 0.5


def test_replies_are_found_by_the_next_turn() -> None:
    source = trace(request(0, (11,), reply_keys=(112,)), request(1, (11, 112, 1121)))
    report = replay(source, Setup(capacity_blocks=9))
    assert (report.blocks, report.hit_blocks) == (4, 2)


def test_requests_without_blocks_cost_their_time_alone() -> None:
    report = replay(trace(request(0, (), tokens=SIZE)), Setup(capacity_blocks=1, model=SLOW))
    assert (report.ttft.total, report.hit_blocks) == (1.0, 0)
    empty = replay(trace(), Setup(capacity_blocks=1))
    assert (empty.requests, empty.token_hit_ratio, empty.ttft.mean) == (0, 0.0, 0.0)


# --------------------------------------------------------------------------- several tiers


def test_new_blocks_are_copied_onwards_and_come_back() -> None:
    source = trace(request(0, (11,)), request(10, (12,)), request(20, (11,)), request(30, (11,)))
    report = replay(source, Setup(capacity_blocks=(1, None), policy="lru", model=SLOW))
    fast, slow = report.by_tier
    assert report.hit_blocks == 2
    assert (fast.hit_blocks, slow.hit_blocks, report.demand_loads) == (1, 1, 1)
    assert (slow.written_bytes, slow.read_bytes) == (2 * BLOCK, BLOCK)
    assert report.ssd_writes == 2 * BLOCK
    assert (fast.written_bytes, fast.evictions) == (3 * BLOCK, {"capacity": 2})
    assert slow.capacity_blocks is None
    assert report.evicted_before_reuse == 0
    assert report.fast_token_hit_ratio == pytest.approx(1 / 4)


def test_without_write_through_what_must_leave_is_demoted() -> None:
    source = trace(*(request(t, (11 + t,)) for t in range(4)), request(9, (11,)))
    setup = Setup(capacity_blocks=(2, None), policy="lru", write_through=False)
    report = replay(source, setup)
    fast, slow = report.by_tier
    assert fast.evictions.pop("demoted") == 2
    assert slow.written_bytes == 2 * BLOCK
    assert (report.hit_blocks, slow.hit_blocks) == (1, 1)


def test_watermarks_make_room_ahead_of_need() -> None:
    source = trace(*(request(t, (11 + t,)) for t in range(8)))
    report = replay(source, Setup(capacity_blocks=(10, None), high=0.5, low=0.2))
    left = 8 - sum(report.by_tier[0].evictions.values())
    assert 2 <= left <= 5


def test_admission_keeps_out_what_is_used_once() -> None:
    source = trace(
        *(request(t, (11 + t,)) for t in range(5)), request(9, (11,)), request(10, (11,))
    )
    report = replay(source, Setup(capacity_blocks=(9, None), admission=("all", "second_use")))
    assert report.by_tier[1].written_bytes < 5 * BLOCK
    refused = replay(source, Setup(capacity_blocks=9, admission="second_use"))
    assert refused.skipped["refused"] > 0
    assert refused.hit_blocks >= 1
    # what was refused never left: it was not there
    assert refused.evicted_before_reuse == 0


# --------------------------------------------------------------------------- time


def _twice(gap: float = 10.0) -> Trace:
    keys = (11, 112, 1121, 11211)
    return trace(request(0, keys), request(gap, (5, 51, 511, 5111)), request(2 * gap, keys))


def test_prefill_takes_its_time_and_requests_wait_for_the_server() -> None:
    report = replay(_twice(1.0), Setup(capacity_blocks=99, model=SLOW))
    # arrivals at 0, 1 and 2; four seconds each for the first two, none for the third
    assert report.ttft.total == 4 + 7 + 6
    assert (report.ttft.p50, report.stall.total) == (6, 0)


def test_loads_stall_what_computing_does_not_hide() -> None:
    two = Setup(capacity_blocks=(4, None), policy="lru", model=SLOW)
    report = replay(_twice(), two)
    assert (report.demand_loads, report.stall.total) == (4, 4.0)
    keys = (11, 112, 1121, 11211)
    more = (*keys, 112111, 1121111)
    longer = trace(*list(_twice())[:2], request(20, more))
    # two blocks to compute while four are loaded; a quarter of the last layer is left
    assert replay(longer, two).stall.total == pytest.approx(4 + 2 / 4 - 2)
    apart = replace(two, model=replace(SLOW, overlap=False))
    assert replay(longer, apart).stall.total == pytest.approx(4.0)


def test_a_load_at_arrival_is_hidden_by_the_queue() -> None:
    keys = (11, 112, 1121, 11211)
    source = trace(request(0, keys), request(10, (5, 51, 511, 5111)), request(10.5, keys))
    late = Setup(capacity_blocks=(8, None), policy="lru", model=SLOW)
    assert replay(source, late).stall.total == 0.0  # still in the fast tier
    source = trace(
        request(0, keys),
        *(request(t, (t, 10 * t + 1, 100 * t + 11)) for t in (5, 6, 7)),
        request(50, (8, 81, 811, 8111)),
        request(50.0, keys),
    )
    now = replay(source, late)
    early = replay(source, replace(late, prefetch="arrival"))
    assert now.stall.total == 4.0
    assert early.stall.total == 0.0
    counts = early.prefetch["arrival"]
    assert (counts["issued"], counts["used"], counts["wasted"]) == (4, 4, 0)
    assert early.by_tier[1].read_bytes == now.by_tier[1].read_bytes


def test_a_prefetch_that_came_too_late_is_waited_for_and_not_repeated() -> None:
    keys = (11, 112, 1121, 11211)
    source = trace(
        request(0, keys),
        *(request(t, (t, 10 * t + 1, 100 * t + 11)) for t in (5, 6, 7)),
        request(50, (9, 91)),
        request(50.5, keys),
    )
    setup = Setup(capacity_blocks=(8, None), policy="lru", model=SLOW, prefetch="arrival")
    report = replay(source, setup)
    counts = report.prefetch["arrival"]
    # the server is free at 52: one block is there, one under way, two have not begun
    assert (counts["used"], counts["late"]) == (1, 1)
    assert report.demand_loads == 3
    assert report.by_tier[1].read_bytes == 4 * BLOCK
    assert report.stall.total == pytest.approx(50.5 + 4 - 52)


def test_hints_are_told_only_if_wanted() -> None:
    def reports(stop: str | None) -> list[dict[str, object]]:
        source = chains.tree(3, 300, roots=6, width=3)
        told = [replace(r, stop_reason=stop if i % 2 else "end_turn") for i, r in enumerate(source)]
        setups = [Setup(capacity_blocks=9, policy="lru", hints=flag) for flag in (True, False)]
        return [plain(replay(Trace.of(source.header, told), setup)) for setup in setups]

    told, ignored = reports("tool_use")
    assert ignored == plain(
        replay(chains.tree(3, 300, roots=6, width=3), Setup(capacity_blocks=9, policy="lru"))
    )
    assert told["requests"] == ignored["requests"]


def test_the_gap_closed() -> None:
    source = chains.tree(5, 300, roots=5, width=3)
    lru = replay(source, Setup(capacity_blocks=12, policy="lru"))
    bound = belady(source, 12)
    assert lru.against(lru, bound).gap_closed == 0.0
    perfect = replace(lru, token_hit_ratio=bound.token_hit_ratio)
    assert perfect.against(lru, bound).gap_closed == pytest.approx(1.0)
    roomy = replay(source, Setup(capacity_blocks=999, policy="lru"))
    assert roomy.against(roomy, belady(source, 999)).gap_closed is None


# --------------------------------------------------------------------------- setups


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "capacity_blocks or capacity_bytes"),
        ({"capacity_blocks": 1, "capacity_bytes": 1}, "and not both"),
        ({"capacity_blocks": []}, "1 to 8 tiers"),
        ({"capacity_blocks": (1, 2), "policy": ("lru",)}, "2 tiers need one policy or as many"),
        ({"capacity_blocks": 1, "touch_order": "random"}, "touch_order"),
        ({"capacity_blocks": 1, "low": 0.9, "high": 0.5}, "low <= high"),
        ({"capacity_blocks": 1, "tick": 0}, "positive tick"),
        ({"capacity_blocks": -1}, "cannot be negative"),
    ],
)
def test_setups_that_make_no_sense(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Setup(**options).capacities(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["policy", "admission", "prefetch"])
def test_unknown_names_are_told(name: str) -> None:
    setup = replace(Setup(capacity_blocks=(1, 2)), **{name: "nonsense"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nonsense"):
        replay(chains.tree(1, 2), setup)


def test_models_that_make_no_sense() -> None:
    model = CostModel()
    cases: tuple[dict[str, Any], ...] = (
        *({"bandwidth": 0}, {"bandwidth": ()}),
        *({"prefill": -1}, {"layers": 0}),
    )
    for wrong in cases:
        with pytest.raises(ConfigError, match="positive"):
            replace(model, **wrong)
    with pytest.raises(ConfigError, match="negative"):
        CostModel(first_token=-1)
    model = CostModel(bandwidth=(1.0, 2.0))
    assert [model.rate(tier) for tier in range(3)] == [1.0, 2.0, 2.0]


def test_sizes_are_bytes_or_text() -> None:
    setup = Setup(capacity_bytes=("64KiB", None))
    assert setup.capacities(99)[0] == 65536
    report = replay(chains.tree(1, 5), setup)
    assert report.by_tier[0].capacity_blocks == 65536 // BLOCK
    assert [t.name for t in report.by_tier] == ["host", "nvme"]
    named = replay(chains.tree(1, 5), replace(setup, names=("a", "file")))
    assert [t.name for t in named.by_tier] == ["a", "file"]
    assert named.ssd_writes == named.by_tier[1].written_bytes > 0


def test_blocks_of_several_sizes_take_their_own_bytes() -> None:
    header = TraceHeader(SIZE, 64)
    source = Trace.of(
        header, [request(0, (11,)), replace(request(1, (12,)), block_tokens=2 * SIZE)]
    )
    assert replay(source, Setup(capacity_blocks=9)).by_tier[0].written_bytes == 3 * BLOCK


@pytest.mark.stress
def test_public_traces_give_the_known_ratios() -> None:
    conversation = open_trace(samples.public("mooncake_fast25_conversation.jsonl.zst")).loaded()
    lru = replay(conversation, Setup(capacity_blocks=5859, policy="lru"))
    assert lru.token_hit_ratio == pytest.approx(0.1387, abs=5e-5)
    synthetic = open_trace(samples.public("mooncake_fast25_synthetic.jsonl.zst")).loaded()
    lru = replay(synthetic, Setup(capacity_blocks=5859, policy="lru"))
    assert lru.token_hit_ratio == pytest.approx(0.3151, abs=5e-5)


def test_blocks_are_named_as_the_engine_names_them() -> None:
    for key in (0, 5, 2**64 - 1):
        plain_key = BlockKey(key.to_bytes(32, "little"))
        assert name_of(key) == part_id(plain_key, 0)
        assert int.from_bytes(name_of(key)[:8], "little") == key  # what ghosts remember
