"""The plain caches around a policy: what they hold, and what leaves."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.decisions.policy.arc import Arc
from tierkv.decisions.policy.fifo import Fifo
from tierkv.decisions.policy.lru import Lru
from tierkv.testing.caching import ChainCache, ObjectCache


@given(
    accesses=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), max_size=60),
    capacity=st.integers(1, 12),
)
def test_lru_of_sizes_equals_a_list(accesses: list[tuple[int, int]], capacity: int) -> None:
    cache = ObjectCache(Lru(), capacity)
    plain: dict[int, int] = {}
    for ident, nbytes in accesses:
        there = ident in plain
        if there:
            plain[ident] = plain.pop(ident)
        elif nbytes <= capacity:
            while sum(plain.values()) + nbytes > capacity:
                del plain[next(iter(plain))]
            plain[ident] = nbytes
        assert cache.access(ident, nbytes) == there
        assert set(cache) == set(plain)
        assert cache.used == sum(plain.values())


def test_f065_an_object_larger_than_the_cache_evicts_nothing() -> None:
    cache = ObjectCache(Lru(), 10)
    cache.access(1, 4)
    cache.access(2, 4)
    assert not cache.access(3, 11)
    assert set(cache) == {1, 2}
    assert 3 not in cache


def test_a_removed_object_makes_room() -> None:
    cache = ObjectCache(Lru(), 2)
    cache.access(1)
    cache.access(2)
    cache.remove(1)
    cache.access(3)
    assert set(cache) == {2, 3}
    assert len(cache) == cache.used == 2


def test_a_policy_without_a_victim_is_told_on() -> None:
    class Stubborn(Lru):
        def victim(self) -> None:
            return None

    cache = ObjectCache(Stubborn(), 1)
    cache.access(1)
    with pytest.raises(AssertionError, match="lru names no victim among 2 rows"):
        cache.access(2)


def test_a_chain_hits_its_longest_prefix() -> None:
    cache = ChainCache(Lru(), 10)
    assert cache.request([1, 2, 3]) == 0
    assert cache.request([1, 2, 4]) == 2
    assert cache.request([1, 2, 4, 5]) == 3
    assert cache.request([9, 2]) == 0, "a name behind another root is not asked for alone"


def test_leaves_alone_leave() -> None:
    cache = ChainCache(Lru(), 4)
    cache.request([1, 2, 3])
    cache.request([1, 4])
    assert len(cache) == 4
    cache.request([1, 5])
    assert 3 not in cache, "the least recent leaf; its ancestors are older, but not leaves"
    assert {1, 2, 4, 5} == {i for i in range(1, 6) if i in cache}


def test_nothing_of_the_chain_leaves_that_is_asked_for() -> None:
    cache = ChainCache(Fifo(), 4)
    cache.request([1, 2, 3])
    cache.request([9])
    assert cache.request([1, 2, 4, 5]) == 2
    assert {1, 2, 4, 5} == {i for i in range(1, 10) if i in cache}, "2 lost its child 3, and stays"


def test_a_chain_that_finds_no_room_keeps_its_head() -> None:
    cache = ChainCache(Lru(), 3)
    assert cache.request([1, 2, 3, 4, 5]) == 0
    assert cache.request([1, 2, 3, 4, 5]) == 3
    assert cache.request([7, 8]) == 0
    assert len(cache) == 3


def test_what_is_there_is_always_whole_prefixes() -> None:
    rng = random.Random(3)
    chains = [[i, *(10 * i + j for j in range(1, rng.randrange(2, 9)))] for i in range(1, 9)]
    parent = {b: a for chain in chains for a, b in pairwise(chain)}
    cache = ChainCache(Arc(), 15)
    for _ in range(400):
        chain = rng.choice(chains)
        before = [block in cache for block in chain]
        assert cache.request(chain) == [*before, False].index(False)
        assert len(cache) <= 15
        assert all(parent[b] in cache for b in parent if b in cache)
