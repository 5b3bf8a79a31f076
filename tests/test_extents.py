"""Free runs of pages: best fit, coalescing, splitting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.extents import Extent, PageRuns


def runs_of(*extents: tuple[int, int]) -> PageRuns:
    runs = PageRuns()
    for extent in extents:
        runs.give(Extent(*extent))
    return runs


def test_neighbours_merge_whatever_the_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1]):
        runs = runs_of(*[(10 * i, 10) for i in order])
        assert runs.runs() == [Extent(0, 30)]
        assert runs.free == runs.largest == 30


def test_best_fit_takes_the_shortest_that_fits() -> None:
    runs = runs_of((0, 10), (20, 4), (30, 6))
    assert runs.take(5) == Extent(30, 5)
    assert runs.take(4) == Extent(20, 4)
    assert runs.take(11) is None


def test_splitting_uses_few_extents() -> None:
    runs = runs_of((0, 3), (10, 5), (20, 4))
    assert runs.take_split(9) == [Extent(10, 5), Extent(20, 4)]
    assert runs.take_split(4) is None
    assert runs.free == 3


def test_first_and_last() -> None:
    runs = runs_of((6, 10), (30, 5))
    assert runs.take_first(8, border=8) == Extent(6, 2)
    assert runs.take_last(2) == Extent(33, 2)
    assert runs.free == 11
    assert PageRuns().take_last(1) is None


def test_double_give_is_refused() -> None:
    runs = runs_of((0, 10))
    for extent in (Extent(0, 10), Extent(0, 3), Extent(7, 3)):
        with pytest.raises(ValueError, match="free already"):
            runs.give(extent)
    assert runs.free == 10


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=120))
def test_pages_are_never_lost_nor_given_twice(steps: list[tuple[int, bool]]) -> None:
    total = 64
    runs = runs_of((0, total))
    out: list[Extent] = []
    for pages, give_back in steps:
        if give_back and out:
            runs.give(out.pop(pages % len(out)))
        else:
            out.extend(runs.take_split(pages) or [])
        free = {p for start, n in runs.runs() for p in range(start, start + n)}
        held = [p for start, n in out for p in range(start, start + n)]
        assert len(held) == len(set(held))
        assert free.isdisjoint(held)
        assert len(free) + len(held) == total
        assert runs.free == len(free)
        assert runs.largest == max((n for _, n in runs.runs()), default=0)
        # maximal runs: no two of them touch
        ends = [start + n for start, n in runs.runs()]
        assert not {start for start, _ in runs.runs()} & set(ends)
