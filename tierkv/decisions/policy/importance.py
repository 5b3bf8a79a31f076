"""Least important first."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap
from tierkv.decisions.policy.rows import Rows

__all__ = ["Importance"]

_CLOCK_BITS: Final = 44
_CLOCK: Final = (1 << _CLOCK_BITS) - 1
_STEPS: Final = 1 << 16
_UNKNOWN: Final = 0.5


class Importance(RowHeap, Policy):
    """Evicts the row of the lowest score; among equals, the LRU one.

    The score of a part, from 0 to 1 and exact to 1 in 65,536, is told from outside (attention that
    a model paid to it, priority of its user); 0.5 if it was not. It stays until the part leaves.
    With no scores it is ``lru``.

    Only as good as the scores: what scores high and is never used again stays until everything
    below it is gone. 24 bytes a row. Hints shift rows among equals.
    """

    name: ClassVar[str] = "importance"

    def __init__(self) -> None:
        super().__init__()
        self._scores = Rows(1)

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held), of medium importance."""
        score = int(_UNKNOWN * _STEPS) << _CLOCK_BITS
        self._scores.add(row, score)
        self.track(row, score | clock + 1)

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        self.raise_rank(row, self._scores.cells[0][row] | clock + 1)

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row, why ever it left."""
        self._scores.discard(row)
        super().remove(row)

    def score(self, row: int, value: float) -> None:
        """Learn how important a tracked row is, from 0 to 1; values outside are clipped."""
        score = int(min(max(value, 0.0), 1.0) * _STEPS) << _CLOCK_BITS
        self._scores.cells[0][row] = score
        rank = self.rank_of(row)
        if rank:
            self.raise_rank(row, score | rank & _CLOCK)

    def shift(self, row: int, accesses: float) -> None:
        """Move the last use of a row that is not expedited."""
        rank = self.rank_of(row)
        if rank:
            last = min(max(1, (rank & _CLOCK) + int(accesses)), _CLOCK)
            self.raise_rank(row, rank & ~_CLOCK | last)

    def rank(self, row: int) -> float:
        """Score, then the clock of the last access; 0 for an expedited row."""
        return self.rank_of(row)
