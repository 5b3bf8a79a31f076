"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap

__all__ = ["Lru"]


class Lru(Policy):
    """Evicts the row whose last access is longest ago; rank = clock of that access."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._rows = RowHeap()

    def insert(self, row: int, nbytes: int, clock: int) -> None:
        """Start tracking a row that became resident (held)."""
        self._rows.insert(row, clock + 1)

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        self._rows.raise_rank(row, clock + 1)

    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""
        self._rows.release(row)

    def hold(self, row: int) -> None:
        """Make a tracked row not evictable. Idempotent."""
        self._rows.hold(row)

    def remove(self, row: int) -> None:
        """Stop tracking a row."""
        self._rows.remove(row)

    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable."""
        self._rows.raise_rank(row, 0)

    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None; changes nothing."""
        return self._rows.victim()

    def rank(self, row: int) -> float:
        """Clock of the last access, plus one; 0 for an expedited row."""
        return self._rows.rank(row)
