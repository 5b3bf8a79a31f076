"""What the rules of compression know of each row: where its block begins, how old it is."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from tierkv.decisions.coding_rules import Age

if TYPE_CHECKING:
    from tierkv.decisions.index import Index

__all__ = ["Ages"]

_NEVER_TOLD: Final = Age(-1, -1)


class Ages:
    """Columns beside those of the index: 32 bytes a row, and one more a tier.

    Rows are recycled, and parts are stored anew: what is known belongs to one generation.
    """

    __slots__ = ("_generation", "_index", "_since", "_start", "_steps", "_tried")

    def __init__(self, index: Index, tiers: int) -> None:
        self._index = index
        self._generation = array("Q")
        self._since = array("d")
        self._start = array("q")
        self._steps = array("q")
        self._tried = [array("B") for _ in range(tiers)]

    def tell(self, row: int, start: int, steps: int, now: float) -> None:
        """Learn where a row's block begins, and its age in one session; the largest counts."""
        self._know(row, now)
        self._start[row] = start
        self._steps[row] = max(self._steps[row], steps)

    def of(self, row: int, now: float) -> tuple[Age, float]:
        """Age of a row in steps, and since when it is there: since now, if it was not known."""
        self._know(row, now)
        return Age(self._start[row], self._steps[row]), self._since[row]

    def peek(self, row: int, now: float) -> tuple[Age, float]:
        """As :meth:`of`, without noting anything; -1 is a row of which nothing is known."""
        if not self._known(row):
            return _NEVER_TOLD, now
        return Age(self._start[row], self._steps[row]), self._since[row]

    def tried(self, row: int, tier: int, rule: int) -> bool:
        """Whether a rule was the last one tried on a copy."""
        return self._known(row) and self._tried[tier][row] == rule + 1

    def note(self, row: int, tier: int, rule: int, now: float) -> None:
        """Note that a rule was tried on a copy."""
        self._know(row, now)
        self._tried[tier][row] = rule + 1

    def _known(self, row: int) -> bool:
        if not 0 <= row < len(self._generation):
            return False
        return self._generation[row] == self._index.generation[row]

    def _know(self, row: int, now: float) -> None:
        """Have columns for a row; begin anew if it stands for something else than before."""
        if row >= len(self._generation):
            more = self._index.size - len(self._generation)
            self._generation.extend([0] * more)
            self._since.extend([0.0] * more)
            self._start.extend([-1] * more)
            self._steps.extend([-1] * more)
            for column in self._tried:
                column.extend([0] * more)
        if not self._known(row):
            self._generation[row] = self._index.generation[row]
            self._since[row] = now
            self._start[row], self._steps[row] = _NEVER_TOLD
            for column in self._tried:
                column[row] = 0
