"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap

__all__ = ["Lru"]


class Lru(RowHeap, Policy):
    """Evicts the row whose last access is longest ago; rank = clock of that access.

    Hard to beat on agentic traffic, where a session comes back soon or never. On chat at tight
    capacity, long prompts that are used once push out what would have been used again. 16 bytes
    a row. Follows hints.
    """

    name: ClassVar[str] = "lru"

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held)."""
        self.track(row, clock + 1)

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        self.raise_rank(row, clock + 1)

    def shift(self, row: int, accesses: float) -> None:
        """Move the last use of a row that is not expedited."""
        rank = self.rank_of(row)
        if rank:
            self.raise_rank(row, max(1, rank + int(accesses)))

    def rank(self, row: int) -> float:
        """Clock of the last access, plus one; 0 for an expedited row."""
        return self.rank_of(row)
