"""The queue below the policies, asked now and then, against a search of all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tierkv.decisions.policy.heap import RowHeap

if TYPE_CHECKING:
    from collections.abc import Sequence

OPS = st.lists(
    st.tuples(
        st.sampled_from(["track", "release", "release", "hold", "rank", "remove", "ask"]),
        st.integers(0, 7),
        st.integers(0, 30),
    ),
    max_size=80,
)


def _smallest(ranks: dict[int, int], free: set[int]) -> int | None:
    return min(free, key=lambda row: (ranks[row], row), default=None)


@given(ops=OPS, far=st.booleans())
def test_the_queue_offers_what_a_search_finds(
    ops: Sequence[tuple[str, int, int]], far: bool
) -> None:
    """Whether somebody asked between two changes or not: only then stale entries are put right."""
    heap, ranks, free = RowHeap(), dict[int, int](), set[int]()
    for op, small, rank in ops:
        row = small * 50_000 if far else small
        if op == "ask":
            assert heap.victim() == _smallest(ranks, free)
        elif op == "track":
            if row not in ranks:
                heap.track(row, rank)
                ranks[row] = rank
        elif row in ranks:
            _change(heap, op, row, rank)
            if op == "rank":
                ranks[row] = rank
            free = free | {row} if op == "release" else free - {row} if op != "rank" else free
            if op == "remove":
                del ranks[row]
    while free:
        first = heap.victim()
        assert first is not None
        assert first == _smallest(ranks, free)
        heap.remove(first)
        free.remove(first)
    assert heap.victim() is None


def _change(heap: RowHeap, op: str, row: int, rank: int) -> None:
    if op == "rank":
        heap.raise_rank(row, rank)
    else:
        {"release": heap.release, "hold": heap.hold, "remove": heap.remove}[op](row)


def test_a_chain_that_leaves_from_its_end_passes_by_the_heap() -> None:
    heap = RowHeap()
    for row in range(100, 200):  # ends of other chains, used later
        heap.track(row, row)
        heap.release(row)
    for row in range(50):
        heap.track(row, row)
    waiting = len(heap._heap)
    for row in range(50):
        heap.release(row)
        assert heap.victim() == row
        assert len(heap._heap) == waiting + 1  # the end that was next before
        heap.remove(row)
