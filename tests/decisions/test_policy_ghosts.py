"""What is remembered of parts that left: against plain dicts, and what it costs."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.decisions.policy.arc import Arc
from tierkv.decisions.policy.ghosts import GhostClocks, Ghosts, GhostTable
from tierkv.decisions.policy.rows import MAX_ROWS, Rows
from tierkv.decisions.policy.s3fifo import S3Fifo
from tierkv.errors import CapacityError
from tierkv.testing.caching import ObjectCache

if TYPE_CHECKING:
    from collections.abc import Sequence

OPS = st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "drop"]), st.integers(1, 40)))
SPREAD = 0x9E3779B97F4A7C15
NAME = (1 << 64) - 1


@given(ops=OPS, limit=st.integers(0, 25), factor=st.sampled_from([1, 64, SPREAD]))
def test_ghosts_equal_an_ordered_dict(
    ops: Sequence[tuple[str, int]], limit: int, factor: int
) -> None:
    ghosts, plain = Ghosts(limit), OrderedDict[int, int]()
    for number, (op, small) in enumerate(ops):
        name = small * factor & NAME
        if op == "add":
            ghosts.add(name, number)
            plain.pop(name, None)
            plain[name] = number
            if len(plain) > limit:
                plain.popitem(last=False)
        elif op == "pop":
            assert ghosts.pop(name) == plain.pop(name, None)
        elif plain:
            ghosts.drop_oldest()
            plain.popitem(last=False)
        assert len(ghosts) == len(plain)
        assert {n for n in range(1, 41) if n * factor & NAME in ghosts} == {
            n for n in range(1, 41) if n * factor & NAME in plain
        }
    for name, number in list(plain.items()):
        ghosts.drop_oldest()
        assert ghosts.pop(name) is None, f"{number} was the oldest"


def test_a_lowered_limit_takes_effect_little_by_little() -> None:
    ghosts = Ghosts(100)
    for name in range(1, 101):
        ghosts.add(name)
    ghosts.limit = 10
    sizes = []
    for name in range(101, 201):
        ghosts.add(name)
        sizes.append(len(ghosts))
    assert sizes[:3] == [99, 98, 97]
    assert sizes[-1] == 10


def test_the_oldest_can_be_dropped_from_none() -> None:
    ghosts = Ghosts(3)
    ghosts.drop_oldest()
    assert len(ghosts) == 0


def bytes_of(thing: Any, slots: Sequence[str]) -> int:
    return sum(memoryview(getattr(thing, slot)).nbytes for slot in slots if hasattr(thing, slot))


def test_a_ghost_takes_less_than_64_bytes() -> None:
    ghosts, table = Ghosts(5_000), GhostTable()
    for number in range(20_000):
        ghosts.add(number * SPREAD & NAME)
        table.put(number * SPREAD & NAME, number, 1_000)
    arrays = ("_names", "_values", "_older", "_newer", "_after", "_heads")
    assert len(ghosts) == 5_000
    assert 32 * 5_000 <= bytes_of(ghosts, arrays) <= 33 * 5_000
    assert table.capacity == 4_000
    assert bytes_of(table, arrays) == 16 * 4_000


@given(
    names=st.lists(st.integers(1, 60), max_size=80),
    sets=st.integers(1, 12),
    factor=st.sampled_from([1, 4, SPREAD]),
)
def test_the_table_gives_back_what_was_put_or_nothing(
    names: Sequence[int], sets: int, factor: int
) -> None:
    table = GhostTable()
    last: dict[int, int] = {}
    for value, small in enumerate(names):
        name = small * factor & NAME
        table.put(name, value, sets)
        last[name] = value
        assert table.pop(name) == value, "the newest is always known"
        assert table.pop(name) is None
        table.put(name, value, sets)
    known = {name: table.pop(name) for name in last}
    assert all(value in (None, last[name]) for name, value in known.items())
    assert table.capacity <= 4 * sets
    if len(last) <= 4:
        assert all(value is not None for value in known.values())


def test_a_full_set_forgets_the_smallest_number() -> None:
    table = GhostTable()
    for name, value in ((1, 50), (2, 10), (3, 30), (4, 40), (5, 20)):
        table.put(name, value, 1)
    assert [table.pop(name) for name in range(1, 6)] == [50, None, 30, 40, 20]


def test_nothing_is_lost_when_the_table_grows() -> None:
    table = GhostTable()
    for name in range(1, 1_000):
        table.put(name * SPREAD & NAME, name, name)
    known = [name for name in range(1, 1_000) if table.pop(name * SPREAD & NAME) == name]
    assert len(known) > 990, "a set of four is seldom full at one entry a set"


@given(
    names=st.lists(st.integers(1, 60), max_size=80),
    rows=st.integers(1, 60),
    factor=st.sampled_from([1, 4, SPREAD]),
    start=st.sampled_from([1, 1 << 32, 1 << 50]),
)
def test_clocks_come_back_or_nothing_does(
    names: Sequence[int], rows: int, factor: int, start: int
) -> None:
    clocks = GhostClocks(4)
    last: dict[int, int] = {}
    for clock, small in enumerate(names, start):
        name = small * factor & NAME
        clocks.grow(rows)
        clocks.put(name, clock)
        last[name] = clock
        assert clocks.pop(name, clock, 0) == clock, "the newest is always known"
        assert clocks.pop(name, clock, 0) == 0
        clocks.put(name, clock)
    for small in range(1, 61):
        name = small * factor & NAME
        assert clocks.pop(name, start + len(names), 0) in (0, last.get(name))


@given(now=st.integers(1, 1 << 50), gap=st.integers(-999, (1 << 32) - 1001))
def test_a_clock_may_be_a_little_ahead_or_much_behind(now: int, gap: int) -> None:
    clocks = GhostClocks(1)
    clock = max(1, now - gap)
    clocks.put(NAME, clock)
    assert clocks.pop(NAME, now, 1_000) == clock


def test_clocks_take_8_bytes_for_each_of_one_or_two_a_row() -> None:
    clocks = GhostClocks(1)
    for number in range(1, 3_000):
        clocks.grow(number)
        clocks.put(number * SPREAD & NAME, number)
        assert number <= clocks.mask + 1 == GhostClocks(number).mask + 1 <= max(2 * number, 16)
    assert clocks.cells.nbytes == 8 * (clocks.mask + 1)


def test_clocks_survive_when_their_table_grows() -> None:
    clocks = GhostClocks(1)
    for number in range(1, 1_000):
        clocks.grow(number)
        clocks.put(number * SPREAD & NAME, number)
    known = [n for n in range(1, 1_000) if clocks.pop(n * SPREAD & NAME, 1_000, 0) == n]
    assert len(known) > 400, "of those that a place of their own was left to"


def test_a_name_is_hardly_ever_taken_for_another() -> None:
    """Whether names are hashes or mere numbers."""
    for factor in (1, SPREAD):
        clocks = GhostClocks(100)
        for number in range(1, 2_000):
            clocks.put(number * factor & NAME, number)
        assert not any(clocks.pop(n * factor & NAME, 2_000, 0) for n in range(2_000, 20_000))
        assert not clocks.pop(0, 2_000, 0), "the name of what has none"


@pytest.mark.parametrize("make", [Arc, S3Fifo])
def test_policies_remember_no_more_names_than_they_hold_rows(make: type[Arc | S3Fifo]) -> None:
    policy = make()
    cache = ObjectCache(policy, 100)
    for name in range(1, 2_000):
        cache.access(name)
        if name % 3 == 0:
            cache.access(name // 2 + 1)
    ghosts = policy._ghosts if isinstance(policy._ghosts, tuple) else (policy._ghosts,)
    assert 50 < sum(len(queue) for queue in ghosts) <= 100
    policy.resize(20.0)
    cache.capacity = 20
    for name in range(2_000, 2_200):
        cache.access(name)
    assert sum(len(queue) for queue in ghosts) <= 20


@given(rows=st.lists(st.integers(0, 60), max_size=60), scale=st.sampled_from([1, 1_000, 50_000]))
def test_rows_equal_a_dict(rows: Sequence[int], scale: int) -> None:
    store, plain = Rows(2), dict[int, tuple[int, int]]()
    for number, small in enumerate(rows):
        row = small * scale
        if row in plain:
            store.discard(row)
            del plain[row]
        else:
            store.add(row, number, -number)
            plain[row] = number, -number
        assert len(store) == len(plain)
        assert {r for r in range(0, 61 * scale, scale) if r in store} == set(plain)
        assert all((store.cells[0][r], store.cells[1][r]) == plain[r] for r in plain)


def test_rows_refuse_a_number_that_is_too_large() -> None:
    with pytest.raises(CapacityError, match="at most"):
        Rows(1).add(MAX_ROWS, 0)


def test_many_rows_of_many_come_back_to_columns() -> None:
    store = Rows(1)
    store.add(1_000_000, 1)
    assert store.sparse
    for row in range(100_000):
        store.add(row, row)
    assert not store.sparse
    assert store.cells[0][1_000_000] == 1
