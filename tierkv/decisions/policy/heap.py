"""A priority queue over dense rows: packed integers in a binary heap, lazily corrected."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heappushpop
from typing import Final

from tierkv.decisions.policy.rows import ABSENT, MAX_ROWS, ROW_BITS, Rows

__all__ = ["MAX_ROWS", "NO_ENTRY", "RowHeap"]

_ROW_MASK: Final = MAX_ROWS - 1
_UNTRACKED: Final = ABSENT
NO_ENTRY: Final = -1
"""Entries are not negative."""
_SLACK: Final = 1024  # stale entries that are never worth a rebuild


class RowHeap:
    """Orders rows by an integer rank, smallest first; ties go to the smaller row.

    An entry is one int ``rank << 28 | row``: nothing the garbage collector must follow. An entry
    may be *stale*. A rank that grew leaves its entry where it is, and the entry is corrected when
    it comes to the top; a held row is dropped there and pushed again by :meth:`release`. So
    touching, holding and releasing cost O(1), and each such change is paid for at most once, in
    O(log n), by a later :meth:`victim`.

    The smallest entry may wait in front of the heap. Where a chain leaves from its end, each part
    that becomes evictable is the next to go, and none of them goes through the heap.

    A policy inherits from it and adds what a rank is, or holds one a queue. Ranks are from 0 to
    2^61; 16 bytes a row, and 8 to 16 for each entry.
    """

    __slots__ = ("_first", "_heap", "_queued", "_rank", "_rows")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._first = NO_ENTRY  # where there is one: none in the heap is smaller
        # rank << 1 | evictable; the rank of the row's one valid heap entry
        self._rows = Rows(2)
        self._rank, self._queued = self._rows.cells

    def __len__(self) -> int:
        return self._rows.count

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def track(self, row: int, rank: int) -> None:
        """Start tracking ``row``, held.

        Raises:
            CapacityError: if the row number does not fit an entry.
        """
        rows = self._rows
        if row >= rows.size or rows.sparse:
            rows.make_room(row)
            self._rank, self._queued = rows.cells
        self._rank[row] = rank << 1
        self._queued[row] = _UNTRACKED
        rows.count += 1

    def free(self, row: int) -> bool:
        """Whether a tracked row is evictable."""
        return bool(self._rank[row] & 1)

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

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row, why ever it left; its entry goes when it comes to the top."""
        if self._first & _ROW_MASK == row:
            self._first = NO_ENTRY
        rows = self._rows
        if rows.sparse:
            rows.discard(row)
            return
        self._rank[row] = self._queued[row] = _UNTRACKED
        rows.count -= 1

    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable."""
        self.raise_rank(row, 0)

    def victim(self) -> int | None:
        """Return the evictable row of the smallest rank, or None; changes no answer."""
        heap, ranks, queued = self._heap, self._rank, self._queued
        sparse, entry = self._rows.sparse, self._first
        while entry >= 0 or heap:
            if entry < 0:
                entry = heappop(heap)
            row, known = entry & _ROW_MASK, entry >> ROW_BITS
            if (sparse and row not in ranks) or queued[row] != known:
                entry = NO_ENTRY
                continue
            value = ranks[row]
            if not value & 1:
                queued[row] = _UNTRACKED
                entry = NO_ENTRY
                continue
            rank = value >> 1
            if rank == known:
                self._first = entry
                return row
            queued[row] = rank
            entry = heappushpop(heap, rank << ROW_BITS | row)
        self._first = NO_ENTRY
        return None

    def _push(self, row: int, rank: int) -> None:
        if len(self._heap) > 2 * self._rows.count + _SLACK:
            self._rebuild()
        self._queued[row] = rank
        entry, first, heap = rank << ROW_BITS | row, self._first, self._heap
        if first >= 0:
            if entry < first:
                entry, self._first = first, entry
        elif not heap or entry < heap[0]:
            self._first = entry
            return
        heappush(heap, entry)

    def _rebuild(self) -> None:
        """Drop entries of rows that went another way than by eviction (TTL, invalidation)."""
        ranks, queued, sparse = self._rank, self._queued, self._rows.sparse
        kept: set[int] = set()
        for entry in self._heap:
            row = entry & _ROW_MASK
            if (not sparse or row in ranks) and queued[row] == entry >> ROW_BITS:
                kept.add(entry)
        self._heap = list(kept)
        heapify(self._heap)
