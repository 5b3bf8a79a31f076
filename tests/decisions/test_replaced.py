"""Copies of KV that was replaced, or of which another process has another kind."""

from __future__ import annotations

from tests.decisions import chains
from tierkv.abc import StoredPart
from tierkv.decisions.types import EvictReason


def test_i4_a_copy_of_derived_kv_never_takes_the_name_of_exact_kv() -> None:
    """Exact KV takes the place of derived KV while that is copied, and is gone before it is."""
    d = chains.decisions(1000, 1000)
    chain = chains.keys([1])
    part = chains.part(chain[0])
    chains.store(d, 0, chains.items(chain, exact=False))
    better = d.reserve(0, chains.items(chain), tenant="t", now=1.0)
    copy = d.reserve(1, chains.items(chain), tenant="t", now=1.0, source=0)
    d.commit(better.id, [0], 2.0)
    assert d.state(part, 2.0).exact
    d.forget([part], EvictReason.DAMAGED, 2.0)
    dropped = d.commit(copy.id, [0], 3.0)
    assert (1, EvictReason.REPLACED) in [(x.tier, x.reason) for x in dropped]
    assert d.state(part, 3.0).tiers == ()
    assert chains.look(d, chain, 3.0).blocks == 0
    d.check()


def test_i4_two_kinds_of_kv_under_one_number_do_not_pass_for_exact() -> None:
    """Each process that shares a medium counts its publications for itself."""
    for order in ((True, False), (False, True)):
        d = chains.decisions(1000, 1000)
        chain = chains.keys([1])
        for tier, exact in enumerate(order):
            stored = StoredPart(
                part=chains.part(chain[0]),
                generation=7,
                parent=None,
                root=chains.root("t"),
                nbytes=10,
                tenant="t",
                exact=exact,
                lossless=True,
                expires=None,
            )
            d.recover(tier, [stored], [10], now=0.0, wall=0.0)
        assert chains.look(d, chain).blocks == 0
        assert chains.look(d, chain, lossy=True).blocks == 1
        d.check()
