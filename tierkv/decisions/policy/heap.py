"""A priority queue over dense rows: packed integers in a binary heap, lazily corrected."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from tierkv.decisions.columns import STEP, IntColumn
from tierkv.errors import CapacityError

__all__ = ["MAX_ROWS", "RowHeap"]

_ROW_BITS: Final = 28
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
MAX_ROWS: Final = 1 << _ROW_BITS
"""Rows that a heap entry can name."""

_UNTRACKED: Final = -1
_SPARSE_COST: Final = 12  # a dict entry costs about as much as this many column cells
_SLACK: Final = 1024  # stale entries that are never worth a rebuild
_SMALL: Final = 4 * STEP  # so many rows are always kept in columns


class RowHeap:
    """Orders rows by an integer rank, smallest first; ties go to the smaller row.

    An entry is one int ``rank << 28 | row``: nothing the garbage collector must follow. An entry
    may be *stale*. A rank that grew leaves its entry where it is, and the entry is corrected when
    it comes to the top; a held row is dropped there and pushed again by :meth:`release`. So
    touching, holding and releasing cost O(1), and each such change is paid for at most once, in
    O(log n), by a later :meth:`victim`.

    A policy inherits from it and adds what a rank is. Ranks are kept in dense columns; while a
    partition has few rows among many, in dicts.
    """

    __slots__ = ("_columns", "_heap", "_queued", "_rank", "_size", "_sparse", "_tracked")

    def __init__(self) -> None:
        self._heap: list[int] = []
        # rank << 1 | evictable; the rank of the row's one valid heap entry
        self._columns = (IntColumn("q", 0xFF), IntColumn("q", 0xFF))
        self._rank: memoryview[int] | dict[int, int] = self._columns[0].view
        self._queued: memoryview[int] | dict[int, int] = self._columns[1].view
        self._sparse = False
        self._size = 0
        self._tracked = 0

    def __len__(self) -> int:
        return self._tracked

    def track(self, row: int, rank: int) -> None:
        """Start tracking ``row``, held.

        Raises:
            CapacityError: if the row number does not fit an entry.
        """
        if row >= self._size or self._sparse:
            self._make_room(row)
        self._rank[row] = rank << 1
        self._queued[row] = _UNTRACKED
        self._tracked += 1

    def _make_room(self, row: int) -> None:
        if row >= MAX_ROWS:
            raise CapacityError(f"row {row}: an index holds at most {MAX_ROWS} parts a process")
        worth = (self._tracked + 1) * _SPARSE_COST  # rows for which columns are no dearer
        if self._sparse:
            if worth > row:
                self._to_columns(row)
        elif row < _SMALL or 2 * worth > row:
            self._rank, self._queued = (column.grow(row + 1) for column in self._columns)
            self._size = len(self._rank)
        else:
            self._to_dicts()

    def _to_columns(self, row: int) -> None:
        ranks, queued = self._rank, self._queued
        assert isinstance(ranks, dict)
        size = max(row, *ranks) + 1
        self._rank, self._queued = (column.grow(size) for column in self._columns)
        self._size, self._sparse = len(self._rank), False
        for known, value in ranks.items():
            self._rank[known] = value
            self._queued[known] = queued[known]

    def _to_dicts(self) -> None:
        ranks, queued = self._rank, self._queued
        self._rank = {row: ranks[row] for row in range(self._size) if ranks[row] >= 0}
        self._queued = {row: queued[row] for row in self._rank}
        self._columns = (IntColumn("q", 0xFF), IntColumn("q", 0xFF))
        self._size, self._sparse = 0, True

    def rank_of(self, row: int) -> int:
        """Rank of a tracked row."""
        return self._rank[row] >> 1

    def raise_rank(self, row: int, rank: int) -> None:
        """Give a tracked row a rank; a smaller one than before costs a push, a larger nothing."""
        free = self._rank[row] & 1
        self._rank[row] = rank << 1 | free
        if free and rank < self._queued[row]:
            self._push(row, rank)

    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""
        value = self._rank[row]
        if value & 1:
            return
        self._rank[row] = value | 1
        queued = self._queued[row]
        rank = value >> 1
        if queued == _UNTRACKED or rank < queued:
            self._push(row, rank)

    def hold(self, row: int) -> None:
        """Make a tracked row not evictable. Idempotent."""
        self._rank[row] &= ~1

    def remove(self, row: int) -> None:
        """Stop tracking a row; its entry is discarded when it comes to the top."""
        heap = self._heap
        if heap and heap[0] & _ROW_MASK == row:
            heappop(heap)
        self._rank[row] = self._queued[row] = _UNTRACKED
        if isinstance(self._rank, dict) and isinstance(self._queued, dict):
            del self._rank[row], self._queued[row]
        self._tracked -= 1

    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable."""
        self.raise_rank(row, 0)

    def victim(self) -> int | None:
        """Return the evictable row of the smallest rank, or None; changes no answer."""
        heap, ranks, queued = self._heap, self._rank, self._queued
        sparse = self._sparse
        while heap:
            entry = heap[0]
            row = entry & _ROW_MASK
            if (sparse and row not in ranks) or queued[row] != entry >> _ROW_BITS:
                heappop(heap)
                continue
            value = ranks[row]
            if not value & 1:
                heappop(heap)
                queued[row] = _UNTRACKED
                continue
            rank = value >> 1
            if rank == queued[row]:
                return row
            queued[row] = rank
            heapreplace(heap, rank << _ROW_BITS | row)
        return None

    def _push(self, row: int, rank: int) -> None:
        if len(self._heap) > 2 * self._tracked + _SLACK:
            self._rebuild()
        self._queued[row] = rank
        heappush(self._heap, rank << _ROW_BITS | row)

    def _rebuild(self) -> None:
        """Drop entries of rows that went another way than by eviction (TTL, invalidation)."""
        ranks, queued = self._rank, self._queued
        kept: set[int] = set()
        for entry in self._heap:
            row = entry & _ROW_MASK
            if (not self._sparse or row in ranks) and queued[row] == entry >> _ROW_BITS:
                kept.add(entry)
        self._heap = list(kept)
        heapify(self._heap)
