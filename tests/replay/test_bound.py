"""Belady's bound equals what trying everything finds, and no policy beats it."""

from __future__ import annotations

import pytest

from tests.replay import chains
from tests.traces import samples
from tierkv.errors import ConfigError
from tierkv.replay import Setup, belady, replay
from tierkv.traces import open_trace


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_the_bound_equals_brute_force(seed: int, capacity: int) -> None:
    source = chains.tree(seed, 9, roots=2, depth=3)
    blocks = sum(len(r.keys) for r in source)
    bound = belady(source, capacity)
    assert round(bound.block_hit_ratio * blocks) == chains.best(source, capacity)
    assert bound.token_hit_ratio == bound.block_hit_ratio
    assert bound.capacity_blocks == capacity


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_no_policy_beats_the_bound(policy: str) -> None:
    for seed in range(20):
        source = chains.tree(seed, 60)
        for capacity in (2, 4, 8, 16):
            report = replay(source, Setup(capacity_blocks=capacity, policy=policy))
            assert report.block_hit_ratio <= belady(source, capacity).block_hit_ratio


def test_replies_are_kept_but_not_asked_for() -> None:
    source = chains.trace(
        chains.request(0.0, (11,), reply_keys=(112,)), chains.request(1.0, (11, 112, 1121))
    )
    assert belady(source, 2).block_hit_ratio == 2 / 4
    assert belady(source, 1).block_hit_ratio == 1 / 4


def test_partial_blocks_count_by_their_tokens() -> None:
    source = chains.trace(*(chains.request(t, (11, 112), tokens=20) for t in range(2)))
    assert belady(source, 2).token_hit_ratio == 20 / 40


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="negative"):
        belady(chains.trace(), -1)
    assert belady(chains.trace(), 1).token_hit_ratio == 0


@pytest.mark.stress
@pytest.mark.parametrize(
    ("name", "capacity", "ratio"),
    [
        ("mooncake_fast25_conversation.jsonl.zst", 1000, 0.1944),
        ("mooncake_fast25_conversation.jsonl.zst", 5859, 0.3601),
        ("mooncake_fast25_synthetic.jsonl.zst", 5859, 0.5600),
        ("agentic_lmcache_magagent.blocks64.jsonl.zst", 200, 0.7969),
    ],
)
def test_the_bound_on_public_traces(name: str, capacity: int, ratio: float) -> None:
    bound = belady(open_trace(samples.public(name)), capacity)
    assert bound.token_hit_ratio == pytest.approx(ratio, abs=6e-5)
