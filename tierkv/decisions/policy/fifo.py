"""First in, first out."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap

__all__ = ["Fifo"]


class Fifo(RowHeap, Policy):
    """Evicts the row that was stored first, used since or not; the baseline of the others.

    Touching costs nothing but a look. Good where nothing is used twice. In a plain cache it is one
    to three points of hit rate behind ``lru`` on chat; where only leaves may leave, what is used
    again is mostly held, and 0 to 0.2 remain. 16 bytes a row. Hints are ignored.
    """

    name: ClassVar[str] = "fifo"

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held)."""
        self.track(row, clock + 1)

    def touch(self, row: int, clock: int) -> None:
        """Put an expedited row at the end of the queue, as if it were new; else nothing."""
        if not self.rank_of(row):
            self.raise_rank(row, clock + 1)

    def rank(self, row: int) -> float:
        """Clock of its arrival, plus one; 0 for an expedited row."""
        return self.rank_of(row)
