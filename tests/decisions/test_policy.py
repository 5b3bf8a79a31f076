"""The shipped policies against naive ones, and the queue below them."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.decisions.policy.heap import MAX_ROWS, RowHeap
from tierkv.decisions.policy.lrfu import Lrfu
from tierkv.decisions.policy.lru import Lru
from tierkv.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

OPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "touch", "release", "hold", "remove", "expedite"]),
        st.integers(0, 11),
    ),
    max_size=120,
)


@given(ops=OPS, far=st.booleans())
def test_lru_equals_a_list_in_order_of_use(ops: Sequence[tuple[str, int]], far: bool) -> None:
    """The same with rows far apart, which are kept in dicts until they are many."""
    policy = Lru()
    rank: dict[int, int] = {}
    free: set[int] = set()
    for clock, (op, small) in enumerate(ops):
        row = small * 50_000 if far else small
        if (op == "insert") == (row in rank):
            continue
        if op == "insert":
            policy.insert(row, 1, clock)
            rank[row] = clock + 1
        elif op == "touch":
            policy.touch(row, clock)
            rank[row] = clock + 1
        elif op == "release":
            policy.release(row)
            free.add(row)
        elif op == "hold":
            policy.hold(row)
            free.discard(row)
        elif op == "expedite":
            policy.expedite(row)
            rank[row] = 0
        else:
            policy.remove(row)
            del rank[row]
            free.discard(row)
        expected = min(free, key=lambda r: (rank[r], r), default=None)
        assert policy.victim() == expected
        assert len(policy) == len(rank)


@given(accesses=st.lists(st.integers(0, 4), min_size=5, max_size=80), life=st.integers(1, 40))
def test_lrfu_orders_by_the_decayed_sum_of_all_accesses(accesses: list[int], life: int) -> None:
    policy = Lrfu()
    policy.resize(life / 1.1)
    seen: dict[int, list[int]] = {}
    for clock, row in enumerate(accesses):
        if row in seen:
            policy.touch(row, clock)
        else:
            policy.insert(row, 1, clock)
            policy.release(row)
        seen.setdefault(row, []).append(clock)
    end = len(accesses)
    value = {
        row: sum(2.0 ** ((then - end) / life) for then in times) for row, times in seen.items()
    }
    # ranks are kept to 1/64 of an access: what is closer than a few of those may tie
    slack = 2.0 ** (len(accesses) / 64 / life) - 1 + 1e-9
    victim = policy.victim()
    assert victim is not None
    assert value[victim] <= min(value.values()) * (1 + slack)
    for row, worth in value.items():
        effective = end + life * log2(worth)
        assert policy.rank(row) - 1 == pytest.approx(effective, abs=len(accesses) / 64 + 1 / 64)


def test_lrfu_prefers_what_was_used_often() -> None:
    policy = Lrfu()
    policy.resize(10.0)
    policy.insert(0, 1, 0)
    policy.insert(1, 1, 1)
    policy.release(0)
    policy.release(1)
    for clock in range(2, 6):
        policy.touch(0, clock)
    policy.touch(1, 6)
    assert policy.victim() == 1, "once, though last"


def test_lrfu_measures_how_fast_its_clock_runs() -> None:
    """Every row is used once after it came, and the clock counts three for each of both."""
    policy = Lrfu()
    policy.resize(100.0)
    clock = 7_000_000
    for step in range(10_000):
        policy.insert(step, 1, clock)
        policy.touch(step, clock + 3)
        clock += 6
        if step == 300:
            assert policy.half_life == pytest.approx(330.0, rel=0.01)
    assert policy.half_life == pytest.approx(330.0, rel=0.01)
    policy.resize(50.0)
    assert policy.half_life == pytest.approx(165.0, rel=0.01)


def test_rows_of_a_small_partition_take_little_room() -> None:
    heap = RowHeap()
    for row in range(0, 3_000_000, 100_000):
        heap.track(row, row)
        heap.release(row)
    assert isinstance(heap._rank, dict)
    assert heap.victim() == 0
    with pytest.raises(CapacityError, match="at most"):
        heap.track(MAX_ROWS, 0)


def test_rows_that_go_by_other_ways_leave_no_entries_behind() -> None:
    heap = RowHeap()
    heap.track(0, 0)
    heap.release(0)
    for rank in range(1, 20_000):
        heap.track(1, rank)
        heap.release(1)
        heap.remove(1)
    assert len(heap._heap) < 5_000
    assert heap.victim() == 0
