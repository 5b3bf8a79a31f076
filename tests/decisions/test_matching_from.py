"""Lookups from a block on: what is before it is in place already."""

from __future__ import annotations

import pytest

from tests.decisions import chains
from tests.decisions.test_matching import FULL, LATENT, STATE, WINDOW
from tierkv.decisions.types import EvictReason, GroupRule, MissReason
from tierkv.errors import ConfigError


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW, STATE), (LATENT, STATE)])
def test_what_is_in_place_is_neither_needed_nor_leased(groups: tuple[GroupRule, ...]) -> None:
    d = chains.decisions(10_000)
    chain = chains.keys(range(6))
    chains.store(d, 0, chains.items(chain, groups=groups))
    hole = chains.part(chain[1])
    d.invalidate(hole, 0, d.state(hole, 0.0).generation, EvictReason.DAMAGED, 1.0)
    assert chains.look(d, chain, groups=groups).blocks == 1, "a hole ends what begins before it"
    found = d.lookup(chains.query(chain, groups=groups, start=2), 2.0)
    assert (found.blocks, found.reason) == (6, None)
    assert {part.block for part in found.parts} == {2, 3, 4, 5}
    for block in range(2):
        for group in range(len(groups)):
            assert d.state(chains.part(chain[block], group), 2.0).leases == 0
    assert d.release(found.lease, 3.0) == ()
    again = d.lookup(chains.query(chain, groups=groups, start=6), 4.0)
    assert (again.blocks, again.tokens, again.parts, again.lease) == (6, 24, (), 0)
    short = d.lookup(chains.query(chain, groups=groups, start=1), 5.0)
    assert (short.blocks, short.tokens, short.reason) == (1, 4, MissReason.DAMAGED)
    assert d.leases() == 0
    for wrong in (-1, 7):
        with pytest.raises(ConfigError, match="from 0 to 6"):
            d.lookup(chains.query(chain, groups=groups, start=wrong), 6.0)
    d.check()


def test_what_is_in_place_counts_as_used() -> None:
    d = chains.decisions(1000)
    chain = chains.keys(range(600))
    chains.store(d, 0, chains.items(chain, 1, ttl=10.0))
    look = d.begin_lookup(chains.query(chain, ttl=100.0, start=500), 5.0)
    while not d.advance(look, 5.0):
        assert sum(d.state(chains.part(k), 5.0).leases for k in chain[:500]) == 0
    found = d.finish(look, 5.0)
    assert (found.blocks, len(found.parts)) == (600, 100)
    d.release(found.lease, 5.0)
    d.tick(50.0)
    assert chains.look(d, chain, 50.0, touch=False).blocks == 600, (
        "its first blocks live on with the others"
    )
    assert d.tick(1e3)[0]
    d.check()


def test_what_is_lost_before_finish_is_looked_up_anew_in_slices() -> None:
    d = chains.decisions(10_000)
    chain = chains.keys(range(900))
    chains.store(d, 0, chains.items(chain))
    look = d.begin_lookup(chains.query(chain, start=100), 1.0)
    while not d.advance(look, 1.0):
        pass
    bad = chains.part(chain[700])
    d.invalidate(bad, 0, d.state(bad, 1.0).generation, EvictReason.FAILED, 1.0)
    found = d.finish(look, 1.0)
    assert (found.blocks, len(found.parts), found.reason) == (700, 600, MissReason.FAILED)
    d.release(found.lease, 1.0)
    assert not d._at.busy
    d.check()
