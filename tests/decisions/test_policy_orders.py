"""Who leaves first under each policy, and what each of them learns."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import registry
from tierkv.decisions.policy.adaptive import _SHADOW_ROWS, Adaptive
from tierkv.decisions.policy.arc import Arc
from tierkv.decisions.policy.fifo import Fifo
from tierkv.decisions.policy.importance import Importance
from tierkv.decisions.policy.lfu import Lfu, LfuDecay
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.decisions.policy.lru2 import Lru2
from tierkv.decisions.policy.s3fifo import S3Fifo
from tierkv.decisions.policy.size_aware import Gdsf, SizeAware, _size_code
from tierkv.testing.caching import ObjectCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierkv.abc import Policy

NAMES = st.lists(st.integers(1, 20), max_size=150)


def filled(policy: Policy, rows: int = 4, nbytes: int = 1) -> None:
    for row in range(rows):
        policy.insert(row, nbytes, row, row + 1)
        policy.release(row)


def evicted(policy: Policy, idents: Mapping[int, int] | None = None) -> int:
    victim = policy.victim()
    assert victim is not None
    policy.remove(victim, evicted=True, ident=idents[victim] if idents else 0)
    return victim


def test_fifo_does_not_care_for_uses() -> None:
    policy = Fifo()
    filled(policy)
    for clock in range(10, 20):
        policy.touch(0, clock)
    assert [evicted(policy) for _ in range(4)] == [0, 1, 2, 3]


def test_lfu_evicts_what_was_used_least_then_last() -> None:
    policy = Lfu()
    filled(policy)
    for clock, row in enumerate((0, 0, 1, 3), 10):
        policy.touch(row, clock)
    assert [evicted(policy) for _ in range(4)] == [2, 1, 3, 0]


def test_lfu_keeps_for_ever_what_was_popular_once_and_decay_does_not() -> None:
    for policy, stays in ((Lfu(), True), (LfuDecay(), False)):
        cache = ObjectCache(policy, 10)
        for _ in range(20):
            cache.access(1)
        for name in range(100, 2_000):
            cache.access(name)
            cache.access(name)
        assert (1 in cache) == stays


@given(names=NAMES, capacity=st.integers(1, 12))
def test_lru2_equals_a_dict_of_the_last_two_uses(names: Sequence[int], capacity: int) -> None:
    cache = ObjectCache(Lru2(history=1000.0), capacity)
    past: dict[int, tuple[int, int]] = {}
    there: set[int] = set()
    for clock, name in enumerate(names):
        assert cache.access(name) == (name in there)
        past[name] = (past.get(name, (-1, -1))[1], clock)
        if name not in there and len(there) >= capacity:
            there.remove(min(there, key=past.__getitem__))
        there.add(name)
        assert set(cache) == there


@given(names=NAMES, capacity=st.integers(1, 25))
def test_s3fifo_equals_three_queues(names: Sequence[int], capacity: int) -> None:
    cache = ObjectCache(S3Fifo(), capacity)
    small, main, ghosts = deque[int](), deque[int](), deque[int]()
    uses: dict[int, int] = {}
    for name in names:
        assert cache.access(name) == (name in uses)
        if name in uses:
            uses[name] = min(3, uses[name] + 1)
            continue
        if name in ghosts:
            ghosts.remove(name)
            main.append(name)
        else:
            small.append(name)
        full = len(uses) == capacity
        while full:
            # the one that comes in is held: it is passed over
            first = next((n for n in small if n != name), None)
            other = next((n for n in main if n != name), None)
            if first is not None and (10 * len(small) >= capacity + 1 or other is None):
                small.remove(first)
                if uses[first] >= 2:
                    main.append(first)
                    uses[first] = 0
                    continue
                del uses[first]
                ghosts.append(first)
            else:
                assert other is not None
                main.remove(other)
                if uses[other]:
                    uses[other] -= 1
                    main.append(other)
                    continue
                del uses[other]
            full = False
        uses[name] = 0
        while len(ghosts) > capacity - capacity // 10:
            ghosts.popleft()
        assert set(cache) == set(uses)


@pytest.mark.parametrize("make", [Arc, S3Fifo, Lru2])
def test_a_scan_does_not_push_out_what_is_used_again(make: Callable[[], Policy]) -> None:
    """Long prompts that nobody repeats between the turns of a few conversations."""
    hits = {}
    for policy in (make(), Lru()):
        cache = ObjectCache(policy, 100)
        found = 0
        for turn in range(60):
            found += sum(cache.access(name) for name in range(1, 41))
            found += sum(cache.access(name) for name in range(1, 41))
            for name in range(120):
                cache.access(1_000 + 120 * turn + name)
        hits[policy.name] = found
    assert hits[make().name] > 1.8 * hits["lru"], hits


def test_arc_learns_from_both_ghosts() -> None:
    policy = Arc()
    cache = ObjectCache(policy, 4)
    for name in (1, 2, 1, 2, 3, 4, 5):
        cache.access(name)
    assert 3 not in cache, "the first queue had more than its share"
    cache.access(3)
    assert policy.target == 1.0
    for name in (4, 5, 3, 6, 7, 8):
        cache.access(name)
    before = policy.target
    gone = next(name for name in (1, 2) if name not in cache)
    cache.access(gone)
    assert policy.target < before


@pytest.mark.parametrize("make", [Arc, S3Fifo])
def test_held_rows_of_one_queue_let_the_other_give(make: Callable[[], Policy]) -> None:
    policy = make()
    filled(policy, 10)
    for clock in range(10, 30):
        policy.touch(clock % 5, clock)
    for row in range(5, 10):
        policy.hold(row)
    assert policy.victim() in range(5)
    for row in range(5):
        policy.hold(row)
    policy.release(7)
    assert policy.victim() == 7


def test_s3fifo_remembers_whom_the_small_queue_evicted() -> None:
    policy = S3Fifo()
    cache = ObjectCache(policy, 10)
    for name in range(1, 14):
        cache.access(name)
    assert 1 not in cache
    cache.access(1)
    for name in range(100, 200):
        cache.access(name)
    assert 1 in cache, "in the main queue, where nothing new pushes it out"


def test_size_aware_evicts_the_largest_then_the_oldest() -> None:
    policy = SizeAware()
    for row, nbytes in enumerate((100, 300, 101, 300)):
        policy.insert(row, nbytes, row, row + 1)
        policy.release(row)
    policy.touch(1, 10)
    policy.resized(0, 1_000)
    assert [evicted(policy) for _ in range(4)] == [0, 3, 1, 2]


@given(sizes=st.lists(st.integers(0, 1 << 44), min_size=2, max_size=2))
def test_size_codes_keep_the_order_of_sizes(sizes: list[int]) -> None:
    small, large = sorted(sizes)
    assert _size_code(small) <= _size_code(large) < 1 << 21
    if large - small > large >> 15:
        assert _size_code(small) < _size_code(large)


def test_an_expedited_row_gets_its_size_and_score_back() -> None:
    sized, scored = SizeAware(), Importance()
    for policy in (sized, scored):
        filled(policy, 3, nbytes=100)
    sized.resized(2, 500)
    scored.score(2, 0.1)
    for policy in (sized, scored):
        policy.expedite(0)
        policy.touch(0, 10)
        assert [evicted(policy) for _ in range(3)] == [2, 1, 0]


def test_gdsf_gives_the_most_hits_for_a_byte() -> None:
    """Ten small objects that are used as often as one large of the size of ten."""
    rng = random.Random(5)
    hits = {}
    for policy in (Gdsf(), Lru()):
        cache = ObjectCache(policy, 100_000)
        found = 0
        for _ in range(4_000):
            name = rng.randrange(1, 31)
            found += cache.access(name, 30_000 if name > 20 else 4_000)
        hits[policy.name] = found
    assert hits["gdsf"] > 1.5 * hits["lru"], hits


def test_gdsf_weighs_what_a_part_costs() -> None:
    policy = Gdsf()
    filled(policy, 3, nbytes=4096)
    policy.score(0, 1.0)
    policy.score(2, 0.1)
    assert [evicted(policy) for _ in range(3)] == [2, 1, 0]


def test_importance_goes_before_recency() -> None:
    policy = Importance()
    filled(policy)
    policy.score(0, 0.9)
    policy.score(3, 0.2)
    policy.score(1, 7.0)
    policy.touch(3, 50)
    assert [evicted(policy) for _ in range(4)] == [3, 2, 0, 1]


def recency(turns: int) -> list[int]:
    """Sessions of 20 blocks, three turns each, then never again; old ones were more popular."""
    return [s * 100 + b for s in range(1, turns) for _ in range(3) for b in range(20)]


def popularity(turns: int) -> list[int]:
    """The same hundred names, twice at first, then between twice as many that come once."""
    names = [name for name in range(1, 101) for _ in range(2)]
    once = iter(range(1_000_000, 2_000_000))
    for _ in range(turns):
        for name in range(1, 101):
            names += [name, next(once), next(once)]
    return names


def test_adaptive_follows_the_better_expert() -> None:
    """After a change of the traffic it changes over; one expert alone collapses in one half."""
    stream = [*popularity(60), *recency(200)]
    hits, followed = {}, set()
    for policy in (Adaptive((Lfu, Lru)), Lfu(), Lru()):
        cache = ObjectCache(policy, 150)
        found = 0
        for name in stream:
            found += cache.access(name)
            if isinstance(policy, Adaptive):
                followed.add(policy.following)
        hits[policy.name] = found
    assert followed == {"lfu", "lru"}
    assert hits["adaptive"] > max(hits["lfu"], hits["lru"]), hits


def test_the_shadows_of_adaptive_stay_small() -> None:
    policy = Adaptive()
    policy.resize(5_000.0)
    for row in range(5_000):
        policy.insert(row, 1, row, row * 0x9E3779B97F4A7C15 + 1)
        policy.release(row)
    sizes = [len(shadow.policy) for shadow in policy._shadows]  # type: ignore[arg-type]
    assert all(_SHADOW_ROWS / 4 < size <= _SHADOW_ROWS for size in sizes)
    policy.resize(100.0)
    for row in range(5_000):
        policy.touch(row, 5_000 + row)
    assert all(len(shadow.policy) <= 101 for shadow in policy._shadows)  # type: ignore[arg-type]


def test_lrfu_remembers_what_it_evicted() -> None:
    policy = Lrfu()
    policy.resize(100.0)
    filled(policy, 3)
    for clock in range(10, 15):
        policy.touch(0, clock)
    idents = {0: 1, 1: 2, 2: 3}
    assert [evicted(policy, idents) for _ in range(3)] == [1, 2, 0]
    for clock, (row, ident) in enumerate(((0, 50), (1, 1), (2, 51)), 20):
        policy.insert(row, 1, clock, ident)
        policy.release(row)
    assert [evicted(policy) for _ in range(3)] == [0, 2, 1], "1 was used often before it left"


def test_a_hint_to_lrfu_is_over_when_its_row_is_expedited() -> None:
    hinted, plain = Lrfu(), Lrfu()
    for policy in (hinted, plain):
        policy.resize(10.0)
        filled(policy, 3)
    hinted.shift(0, -1000.0)
    for policy in (hinted, plain):
        policy.expedite(0)
        policy.touch(0, 20)
        policy.touch(0, 21)
    assert hinted.rank(0) == plain.rank(0)


def test_every_policy_can_be_asked_for_by_name() -> None:
    for cls in (Adaptive, Arc, Fifo, Gdsf, Importance, Lfu, LfuDecay, Lrfu, Lru, Lru2, S3Fifo):
        assert registry.resolve("policies", cls.name) is cls
    assert registry.resolve("policies", SizeAware.name) is SizeAware
