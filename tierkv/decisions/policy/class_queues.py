"""Rows in queues by class; the class whose oldest row is worth least gives the next victim."""

from __future__ import annotations

from abc import abstractmethod
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final

from tierkv.abc import Policy
from tierkv.decisions.policy.rows import ROW_BITS, Rows

__all__ = ["CLASS", "CLASS_BITS", "NOWHERE", "ClassQueues"]

CLASS_BITS: Final = 8
CLASS: Final = (1 << CLASS_BITS) - 1
"""Mask of the class in what is packed as ``number << CLASS_BITS | class``."""
NOWHERE: Final = -1
"""No row, and no entry."""

_ROW: Final = (1 << ROW_BITS) - 1
_SLACK: Final = 1024  # stale entries that are never worth a rebuild


class ClassQueues(Policy):
    """A queue for each class, in order of last use; a policy says what a row of one is worth.

    Each queue is a heap of ``rank << ROW_BITS | row``, lazily corrected as in
    :class:`~tierkv.decisions.policy.heap.RowHeap`. What the first row of a queue is worth is kept
    until the row may be another one, or its worth is due to change with time.

    Args:
        classes: Classes that there may be, 256 at most.
        at_first: Those that there are until :meth:`_have_classes` is called.
    """

    def __init__(self, classes: int, at_first: int) -> None:
        self._rows = Rows(4)
        # last use; rank << 1 | evictable; rank << 8 | class of the valid entry; class
        self._last, self._state, self._queued, self._class = self._rows.cells
        self._heaps: list[list[int]] = [[] for _ in range(classes)]
        self._entries = 0
        self._heads: list[int] = []  # oldest evictable row of each class
        self._worth: list[float] = []  # of that row
        self._due: list[float] = []  # clock from which on it is another
        self._have_classes(at_first)
        self._next_due = inf
        self._stale: set[int] = set()  # classes whose head may be another
        self._now = 0

    def __len__(self) -> int:
        return self._rows.count

    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""
        state = self._state[row]
        if not state & 1:
            self._state[row] = state | 1
            queued = self._queued[row]
            if (
                queued < 0
                or queued & CLASS != self._class[row]
                or state >> 1 < queued >> CLASS_BITS
            ):
                self._push(row)

    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable."""
        self._rerank(row, 0)

    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None; changes no answer."""
        self._settle()
        least = min(self._worth)
        return None if least == inf else self._heads[self._worth.index(least)]

    @abstractmethod
    def _value(self, kind: int, rank: int) -> tuple[float, float]:
        """Worth of a row of that class and rank, and the clock from which on it is another."""

    def _have_classes(self, count: int) -> None:
        """Let there be so many classes; no fewer than before."""
        more = count - len(self._worth)
        self._heads += [NOWHERE] * more
        self._worth += [inf] * more
        self._due += [inf] * more

    def _classify(self, row: int, kind: int) -> None:
        """Put a tracked row into a class."""
        if kind != self._class[row]:
            self._moved(row)
            self._class[row] = kind
            if self._state[row] & 1:
                self._push(row)

    def _rerank(self, row: int, rank: int) -> None:
        """Give a tracked row another place in its queue; rank 0 goes first."""
        free = self._state[row] & 1
        self._state[row] = rank << 1 | free
        self._moved(row)
        if free and rank < self._queued[row] >> CLASS_BITS:
            self._push(row)

    def _moved(self, row: int) -> None:
        """Something about a row changed: if it is its class's next to go, look again."""
        queued = self._queued[row]
        if queued >= 0 and self._heads[queued & CLASS] == row:
            self._stale.add(queued & CLASS)

    def _push(self, row: int) -> None:
        if self._entries > 2 * len(self) + _SLACK:
            self._rebuild()
        kind, rank = self._class[row], self._state[row] >> 1
        self._queued[row] = rank << CLASS_BITS | kind
        entry = rank << ROW_BITS | row
        heap = self._heaps[kind]
        heappush(heap, entry)
        self._entries += 1
        if heap[0] == entry:
            self._stale.add(kind)

    def _rebuild(self) -> None:
        """Drop entries of rows that went another way than by eviction, or changed class."""
        self._entries = 0
        for kind, heap in enumerate(self._heaps):
            heap[:] = {entry for entry in heap if self._valid(kind, entry)}
            heapify(heap)
            self._entries += len(heap)

    def _valid(self, kind: int, entry: int) -> bool:
        row = entry & _ROW
        wanted = entry >> ROW_BITS << CLASS_BITS | kind
        return (not self._rows.sparse or row in self._rows) and self._queued[row] == wanted

    def _settle(self) -> None:
        """Bring the worth of every class's next row up to date."""
        if self._now >= self._next_due:
            self._next_due = inf
            self._stale.update(kind for kind in range(len(self._heaps)) if self._heaps[kind])
        for kind in self._stale:
            rank = self._top(kind)
            if rank < 0:
                self._worth[kind] = self._due[kind] = inf
            else:
                self._worth[kind], self._due[kind] = self._value(kind, rank)
        if self._stale:
            self._stale.clear()
            self._next_due = min(self._due)

    def _top(self, kind: int) -> int:
        """Find the next row of a class to go; its rank, or -1 if there is none."""
        heap, state, queued = self._heaps[kind], self._state, self._queued
        while heap:
            entry = heap[0]
            row = entry & _ROW
            if not self._valid(kind, entry):
                self._entries -= 1
                heappop(heap)
            elif not state[row] & 1:
                self._entries -= 1
                heappop(heap)
                queued[row] = NOWHERE
            elif state[row] >> 1 != entry >> ROW_BITS:
                rank = state[row] >> 1
                queued[row] = rank << CLASS_BITS | kind
                heapreplace(heap, rank << ROW_BITS | row)
            else:
                self._heads[kind] = row
                return entry >> ROW_BITS
        self._heads[kind] = NOWHERE
        return -1
