"""Least important first."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.decisions.policy.keyed import KeyedLru

__all__ = ["Importance"]

_STEPS: Final = 1 << 16
_UNKNOWN: Final = 0.5


class Importance(KeyedLru):
    """Evicts the row of the lowest score; among equals, the LRU one.

    The score of a part, from 0 to 1 and exact to 1 in 65,536, is told from outside (attention that
    a model paid to it, priority of its user); 0.5 if it was not. It stays until the part leaves.
    With no scores it is ``lru``.

    Only as good as the scores: what scores high and is never used again stays until everything
    below it is gone. 24 bytes a row. Hints shift rows among equals.
    """

    name: ClassVar[str] = "importance"

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held), of medium importance."""
        self.enter(row, int(_UNKNOWN * _STEPS), clock)

    def score(self, row: int, value: float) -> None:
        """Learn how important a tracked row is, from 0 to 1; values outside are clipped."""
        self.set_key(row, int(min(max(value, 0.0), 1.0) * _STEPS))
