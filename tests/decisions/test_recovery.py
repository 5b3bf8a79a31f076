"""What a decision object makes of a durable tier after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
