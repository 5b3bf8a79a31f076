"""The replica index: the longest prefix that every rank could load."""

from __future__ import annotations

import random
import sys
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decisions import chains
from tierkv.blocks import part_id
from tierkv.decisions.types import EvictReason, GroupRule
from tierkv.errors import LayoutError
from tierkv.layout import GroupKind
from tierkv_adapters.serving.replicas import ReplicaIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, PartId

FULL = GroupRule(GroupKind.FULL)
LATENT = GroupRule(GroupKind.LATENT)
STATE = GroupRule(GroupKind.STATE)
BLOCK = chains.BLOCK


def window(tokens: int) -> GroupRule:
    return GroupRule(GroupKind.SLIDING, tokens)


RULES = st.lists(
    st.one_of(st.sampled_from([FULL, LATENT, STATE]), st.integers(1, 14).map(window)),
    min_size=1,
    max_size=3,
)


def naive(
    keys: Sequence[Sequence[BlockKey]],
    groups: Sequence[GroupRule],
    held: Sequence[set[PartId]],
    start: int,
) -> int:
    """The definition, read out: try every length, look at every token that a layer looks at."""

    def usable(blocks: int) -> bool:
        for names, has in zip(keys, held, strict=True):
            for group, rule in enumerate(groups):
                if rule.kind is GroupKind.STATE:
                    needed = {blocks - 1}
                elif rule.kind is GroupKind.SLIDING:
                    assert rule.window is not None
                    end = blocks * BLOCK
                    needed = {t // BLOCK for t in range(max(0, end - rule.window + 1), end)}
                else:
                    needed = set(range(start, blocks))
                if any(part_id(names[block], group) not in has for block in needed):
                    return False
        return True

    longest = min(len(names) for names in keys)
    return next((n for n in range(longest, start, -1) if usable(n)), start)


def case(
    seed: int, ranks: int, blocks: int, groups: Sequence[GroupRule], density: float
) -> tuple[list[list[BlockKey]], list[set[PartId]]]:
    dice = random.Random(seed)
    keys = [chains.keys(range(blocks), f"rank {rank}") for rank in range(ranks)]
    held = [
        {part_id(k, g) for k in names for g in range(len(groups)) if dice.random() < density}
        for names in keys
    ]
    return keys, held


@given(
    groups=RULES,
    ranks=st.integers(1, 3),
    blocks=st.integers(0, 12),
    start=st.integers(0, 13),
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
)
def test_it_finds_what_the_definition_says(
    groups: list[GroupRule], ranks: int, blocks: int, start: int, seed: int, density: float
) -> None:
    keys, held = case(seed, ranks, blocks, groups, density)
    index = ReplicaIndex(ranks)
    for rank, parts in enumerate(held):
        index.apply(rank, [(part, 1) for part in parts])
    assert index.match(keys, groups, BLOCK, start=start) == naive(keys, groups, held, start)


@given(
    groups=RULES,
    blocks=st.integers(1, 12),
    lost=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=5),
)
def test_it_agrees_with_the_lookup_of_the_engine(
    groups: list[GroupRule], blocks: int, lost: list[tuple[int, int]]
) -> None:
    decisions = chains.decisions(1 << 20)
    names = chains.keys(range(blocks))
    chains.store(decisions, 0, chains.items(names, groups=groups))
    for block, group in lost:
        if block < blocks and group < len(groups):
            part = part_id(names[block], group)
            generation = decisions.state(part, 0.0).generation
            decisions.invalidate(part, 0, generation, EvictReason.DAMAGED, 0.0)
    index = ReplicaIndex(1)
    index.apply(
        0,
        [
            (part, 1)
            for name in names
            for group in range(len(groups))
            if decisions.state(part := part_id(name, group), 0.0).tiers
        ],
    )
    assert (
        index.match([names], groups, BLOCK) == chains.look(decisions, names, groups=groups).blocks
    )


def test_ranks_agree_on_one_boundary_not_on_the_shortest_of_their_best() -> None:
    groups = [FULL, STATE]
    keys = [chains.keys(range(6), "a"), chains.keys(range(6), "b")]
    index = ReplicaIndex(2)
    for rank, states in enumerate([(2, 4), (2, 3)]):
        index.apply(rank, [(part_id(key, 0), 1) for key in keys[rank]])
        index.apply(rank, [(part_id(keys[rank][block], 1), 1) for block in states])
    # alone they could load 5 and 4 blocks; with 4, the first has no state at the boundary
    assert index.match(keys, groups, BLOCK) == 3
    assert index.match(keys, groups, BLOCK, start=3) == 3


def test_any_ranks_miss_shrinks_the_answer_and_a_lost_rank_holds_nothing() -> None:
    keys = [chains.keys(range(8), str(rank)) for rank in range(3)]
    index = ReplicaIndex(3)
    for rank, names in enumerate(keys):
        index.apply(rank, [(part_id(key, 0), 1) for key in names])
        assert index.is_complete() is False
        index.complete(rank)
    assert index.is_complete()
    assert index.match(keys, [FULL], BLOCK) == 8
    index.apply(1, [(part_id(keys[1][5], 0), 0)])
    assert index.match(keys, [FULL], BLOCK) == 5
    assert index.match(keys, [FULL], BLOCK, start=6) == 8, "what is in place is not asked for"
    index.lost(2)
    assert not index.is_complete()
    assert (index.match(keys, [FULL], BLOCK), index.parts(2)) == (0, 0)
    index.apply(2, [(part_id(key, 0), 1) for key in keys[2]])
    assert index.match(keys, [FULL], BLOCK) == 5


def test_the_slowest_tier_of_a_load_is_told() -> None:
    keys = [chains.keys(range(4), "a"), chains.keys(range(4), "b")]
    groups = [FULL, window(BLOCK + 1)]
    index = ReplicaIndex(2)
    for rank, names in enumerate(keys):
        index.apply(rank, [(part_id(key, group), 0b011) for key in names for group in (0, 1)])
    assert index.source(keys, groups, BLOCK, 4) == 0b001, "each from the fastest that has it"
    index.apply(1, [(part_id(keys[1][0], 1), 0b100)])
    assert index.source(keys, groups, BLOCK, 4) == 0b001, "out of the window: not read"
    index.apply(1, [(part_id(keys[1][1], 0), 0b110)])
    assert index.source(keys, groups, BLOCK, 4) == 0b010
    assert index.source(keys, groups, BLOCK, 4, start=2) == 0b001
    assert index.tiers(1, part_id(keys[1][1], 0)) == 0b110
    index.apply(0, [(part_id(keys[0][3], 1), 0)])
    assert index.source(keys, groups, BLOCK, 4) == 0
    assert index.source(keys, groups, BLOCK, 4, start=4) == 0


def test_keys_of_too_few_ranks_are_refused() -> None:
    index = ReplicaIndex(2)
    with pytest.raises(LayoutError, match="one list of block keys for each rank"):
        index.match([[]], [FULL], BLOCK)
    with pytest.raises(LayoutError, match="one list of block keys for each rank"):
        index.source([[]], [FULL], BLOCK, 0)
    with pytest.raises(LayoutError, match="at least one rank"):
        ReplicaIndex(0)
    assert "2 ranks" in repr(index)


def test_each_part_of_a_long_window_is_looked_at_once() -> None:
    class Counting(dict[bytes, int]):
        looks = 0

        def __contains__(self, part: object) -> bool:
            self.looks += 1
            return super().__contains__(part)

    blocks = 400
    names = chains.keys(range(blocks))
    index = ReplicaIndex(1)
    counting = Counting()
    index._held[0] = counting  # type: ignore[assignment]
    # the two states never agree, and the window is asked again after every step down
    index.apply(0, [(part_id(key, 0), 1) for key in names])
    for group in (1, 2):
        index.apply(0, [(part_id(key, group), 1) for key in names[group - 1 :: 2]])
    assert index.match([names], [window(BLOCK * 100), STATE, STATE], BLOCK) == 0
    assert counting.looks <= 4 * (blocks + 1)


def test_a_part_costs_little_memory() -> None:
    parts = [dice.to_bytes(32, "little") + b"\0\0" for dice in range(20_000)]
    index = ReplicaIndex(1)
    changes = [(part, 1) for part in parts]
    tracemalloc.start()
    try:
        index.apply(0, changes)  # type: ignore[arg-type]
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # the dictionary's share; the name itself comes with the change
    assert taken / len(parts) < 120
    assert sys.getsizeof(parts[0]) <= 80
