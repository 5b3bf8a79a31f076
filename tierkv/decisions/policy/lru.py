"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap

__all__ = ["Lru"]


class Lru(RowHeap, Policy):
    """Evicts the row whose last access is longest ago; rank = clock of that access."""

    name: ClassVar[str] = "lru"

    def insert(self, row: int, nbytes: int, clock: int) -> None:
        """Start tracking a row that became resident (held)."""
        self.track(row, clock + 1)

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        self.raise_rank(row, clock + 1)

    def rank(self, row: int) -> float:
        """Clock of the last access, plus one; 0 for an expedited row."""
        return self.rank_of(row)
