"""Least recently used among rows of equal keys, the smallest key first."""

from __future__ import annotations

from typing import Final

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap
from tierkv.decisions.policy.rows import Rows

__all__ = ["KeyedLru"]

_CLOCK_BITS: Final = 40
_CLOCK: Final = (1 << _CLOCK_BITS) - 1


class KeyedLru(RowHeap, Policy):
    """Rank = key of at most 21 bits, then the clock of the last access. 24 bytes a row."""

    def __init__(self) -> None:
        super().__init__()
        self._keys = Rows(1)

    def enter(self, row: int, key: int, clock: int) -> None:
        """Start tracking a row (held)."""
        key <<= _CLOCK_BITS
        self._keys.add(row, key)
        self.track(row, key | min(clock + 1, _CLOCK))

    def set_key(self, row: int, key: int) -> None:
        """Give a tracked row another key; an expedited one stays the next victim."""
        key <<= _CLOCK_BITS
        self._keys.cells[0][row] = key
        rank = self.rank_of(row)
        if rank:
            self.raise_rank(row, key | rank & _CLOCK)

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        self.raise_rank(row, self._keys.cells[0][row] | min(clock + 1, _CLOCK))

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row, why ever it left."""
        self._keys.discard(row)
        super().remove(row)

    def shift(self, row: int, accesses: float) -> None:
        """Move the last use of a row that is not expedited."""
        rank = self.rank_of(row)
        if rank:
            last = min(max(1, (rank & _CLOCK) + int(accesses)), _CLOCK)
            self.raise_rank(row, rank & ~_CLOCK | last)

    def rank(self, row: int) -> float:
        """Key, then the clock of the last access; 0 for an expedited row."""
        return self.rank_of(row)
