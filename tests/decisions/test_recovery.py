"""What a decision object makes of a durable tier after a restart."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.decisions import chains
from tierkv.abc import StoredPart
from tierkv.decisions.types import EvictReason

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey


def test_f062_reopening_with_half_the_capacity_evicts_at_once() -> None:
    chain = chains.keys(range(20))
    parts = [
        StoredPart(
            chains.part(key),
            generation + 1,
            chain[generation - 1] if generation else None,
            chains.root("t"),
            10,
        )
        for generation, key in enumerate(chain)
    ]
    d = chains.decisions(100)
    drops = d.recover(0, parts, [10] * 20, 0.0, 1000.0)
    d.check()
    assert d.used(0) == 100
    # leaves go first: what is left is a prefix
    assert {x.part for x in drops} == {chains.part(key) for key in chain[10:]}
    assert chains.look(d, chain).blocks == 10
    got = chains.store(d, 0, chains.items(chains.keys([7])))
    assert got.outcomes[0].generation == 21, "generations continue behind the largest one found"


def test_recovery_sorts_out_duplicates_orphans_and_the_expired() -> None:
    a, b = chains.keys([1, 2, 3]), chains.keys([7])
    root = chains.root("t")

    def stored(
        key: BlockKey, generation: int, parent: BlockKey | None, expires: float | None = None
    ) -> StoredPart:
        return StoredPart(chains.part(key), generation, parent, root, 10, "t", expires=expires)

    d = chains.decisions(100, 1000)
    parts = [stored(a[2], 5, a[1]), stored(a[0], 3, None), stored(a[0], 9, None)]
    parts += [stored(b[0], 6, None, expires=990.0)]
    drops = d.recover(1, parts, [10] * 4, 5.0, 1000.0)
    assert {(x.part, x.generation, x.reason) for x in drops} == {
        (chains.part(a[0]), 3, EvictReason.REPLACED),
        (chains.part(b[0]), 6, EvictReason.EXPIRED),
    }
    d.check()
    assert chains.look(d, a, 6.0).blocks == 1
    # the orphan is found again once its parent is stored
    chains.store(d, 1, chains.items(a[:2]), 7.0)
    assert chains.look(d, a, 8.0).blocks == 3
    assert d.tenant_bytes("t", 1) == 30
    d.check()


def test_d3_a_block_that_only_the_slower_tier_kept_closes_the_hole_in_the_faster_one() -> None:
    """The fast medium lost the second of four blocks; the slow one has them all."""
    chain = chains.keys(range(4))
    parts = [
        StoredPart(
            chains.part(key),
            number + 1,
            chain[number - 1] if number else None,
            chains.root("t"),
            10,
            "t",
        )
        for number, key in enumerate(chain)
    ]
    d = chains.decisions(1000, 1000)
    d.recover(0, [parts[0], *parts[2:]], [10] * 3, 0.0, 1000.0)
    d.check()
    d.recover(1, parts, [10] * 4, 0.0, 1000.0)
    d.check()
    assert chains.look(d, chain).blocks == 4
    # what stands on them can be stored: they are no orphans
    got = chains.store(d, 0, chains.items(chains.keys(range(5)), start=4))
    assert chains.skips(got) == [None]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_two_media_kept_the_books_are_right(seed: int) -> None:
    rng = random.Random(seed)
    chain = [chains.keys([n // 4, *range(n % 4)]) for n in range(12)]
    everything = [(path[-1], path[-2] if len(path) > 1 else None) for path in chain]
    capacities = rng.choice([(1000, 1000), (60, 1000), (1000, 60)])
    d = chains.decisions(*capacities)
    for tier in range(2):
        parts = [
            StoredPart(
                chains.part(key),
                rng.randrange(1, 30),
                parent,
                chains.root("t"),
                10,
                "t",
                expires=rng.choice([None, None, 990.0, 1010.0]),
            )
            for key, parent in everything
            for _ in range(rng.choice([0, 1, 1, 2]))
        ]
        rng.shuffle(parts)
        d.recover(tier, parts, [10] * len(parts), 5.0, 1000.0)
        d.check()
    for path in chain:
        found = chains.look(d, path, 6.0)
        chains.store(d, 0, chains.items(path, start=found.blocks), 7.0)
        d.check()
    d.tick(100.0)
    d.check()
