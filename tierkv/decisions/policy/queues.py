"""Policies that keep two queues, and remember who left them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap
from tierkv.decisions.policy.rows import Rows

__all__ = ["TwoQueues"]

_OTHER: Final = float(1 << 60)  # ranks of rows whose turn is after the other queue's


class TwoQueues(Policy):
    """Rows in one of two queues; a policy adds what moves them, and which queue gives next.

    A held row keeps its place and is passed over: each queue is a heap of its evictable rows.
    40 bytes a row.
    """

    def __init__(self) -> None:
        self._queues = (RowHeap(), RowHeap())
        self._rows = Rows(1)  # queue
        (self._place,) = self._rows.cells
        self._capacity = float("inf")
        self._peak = 0

    def __len__(self) -> int:
        return self._rows.count

    @property
    def bound(self) -> int:
        """Rows that the tier holds, as far as is known; what is remembered follows it."""
        return max(1, int(min(self._capacity, self._peak)))

    def resize(self, capacity_parts: float) -> None:
        """Learn how many mean-sized parts the tier holds."""
        self._capacity = capacity_parts
        self._peak = len(self)

    def hold(self, row: int) -> None:
        """Make a tracked row not evictable. Idempotent."""
        self._queues[self._place[row]].hold(row)

    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""
        self._queues[self._place[row]].release(row)

    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable."""
        self._queues[self._place[row]].expedite(row)

    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None; changes no answer."""
        return self._queues[self._source()].victim()

    def rank(self, row: int) -> float:
        """Clock of its place in its queue; the queue that gives next lies below the other."""
        place = self._place[row]
        rank = self._queues[place].rank_of(row)
        return rank if not rank or place == self._source() else rank + _OTHER

    def _enter(self, row: int, place: int, rank: int) -> None:
        self._queues[place].track(row, rank)
        self._rows.add(row, place)
        (self._place,) = self._rows.cells
        if len(self) > self._peak:
            self._peak = len(self)

    def _move(self, row: int, place: int, rank: int) -> None:
        source, target = self._queues[self._place[row]], self._queues[place]
        free = source.free(row)
        source.remove(row)
        target.track(row, rank)
        if free:
            target.release(row)
        self._place[row] = place

    def _leave(self, row: int) -> int:
        """Stop tracking a row; its queue."""
        place = self._place[row]
        self._queues[place].remove(row)
        self._rows.discard(row)
        return place

    def _source(self) -> int:
        """The queue that gives the next victim: one that has any, an expedited one first."""
        first, second = self._queues
        head, other = first.victim(), second.victim()
        if head is None or other is None:
            return 1 if head is None else 0
        if not first.rank_of(head):
            return 0
        if not second.rank_of(other):
            return 1
        return self._choose()

    @abstractmethod
    def _choose(self) -> int:
        """The queue that gives the next victim when both could."""
