"""Policies that look at what a part takes up."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap
from tierkv.decisions.policy.keyed import KeyedLru
from tierkv.decisions.policy.rows import Rows

__all__ = ["Gdsf", "SizeAware"]

_MANTISSA: Final = 16
_LARGEST: Final = (1 << 21) - 1  # more than the code of any size
_UNIT: Final = 1 << 30  # bytes; a part of that size and cost 1 weighs 1
_PER_ACCESS: Final = 10  # bits below a weight that count accesses: ties go to the older
_COST: Final = 1024  # fixed point of costs
_MAX_RANK: Final = (1 << 61) - 1


def _size_code(nbytes: int) -> int:
    """A number of 21 bits in the order of sizes: exact to 128 KiB, to 1 in 65,536 above."""
    exponent = max(0, nbytes.bit_length() - _MANTISSA - 1)
    return min((exponent << _MANTISSA) + (nbytes >> exponent), _LARGEST)


class SizeAware(KeyedLru):
    """Evicts the row that takes most bytes in the tier; among equals, the LRU one.

    What frees the room with the fewest evictions: where parts differ much in size (models of
    several layouts, groups, compressed beside raw) and each counts the same. Bad where they hardly
    differ, as compressed parts of one layout: what compresses badly then leaves first, used
    or not. 24 bytes a row. Hints shift rows among equals.
    """

    name: ClassVar[str] = "size_aware"

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held)."""
        self.enter(row, _LARGEST - _size_code(nbytes), clock)

    def resized(self, row: int, nbytes: int) -> None:
        """Learn that the copy of a tracked row takes so many bytes now."""
        self.set_key(row, _LARGEST - _size_code(nbytes))


class Gdsf(RowHeap, Policy):
    """Greedy-Dual-Size with frequency (Cherkasova, HPL-98-69R1, 1998; Cao and Irani, USITS 1997).

    Evicts the row of the smallest ``L + uses * cost / bytes``, where L is that of the last one
    evicted: what was not used since ages against what comes. ``cost`` is what a part's importance
    was set to, 0.5 if it was not: with the cost of computing it anew, relative to the dearest part,
    it saves the most computation for a byte; without, it gives the most hits for a byte.

    Good where sizes differ much. With equal sizes and costs it is LFU with ageing, 0 to 1 point
    above ``lru`` on chat. A cost that grows with depth in the prompt loses up to 8 points there:
    deep blocks come back, but only if all before them stay. 40 bytes a row. Hints are ignored.
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self) -> None:
        super().__init__()
        self._known = Rows(3)  # uses; weight at cost 1; cost
        self._age = 0

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held), used once."""
        self._known.add(row, 1, max(1, _UNIT // max(1, nbytes)), _COST // 2)
        self.track(row, self._now(row, clock))

    def touch(self, row: int, clock: int) -> None:
        """Count an access of a tracked row."""
        self._known.cells[0][row] += 1
        self.raise_rank(row, self._now(row, clock))

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row; an evicted one sets the age."""
        if evicted:
            self._age = max(self._age, self.rank_of(row))
        self._known.discard(row)
        super().remove(row)

    def score(self, row: int, value: float) -> None:
        """Set the cost of a tracked row, from 0 to 1."""
        self._weigh(row, 2, int(_COST * min(max(value, 0.0), 1.0)))

    def resized(self, row: int, nbytes: int) -> None:
        """Learn that the copy of a tracked row takes so many bytes now."""
        self._weigh(row, 1, max(1, _UNIT // max(1, nbytes)))

    def rank(self, row: int) -> float:
        """Age plus worth; 0 for an expedited row."""
        return self.rank_of(row)

    def _weigh(self, row: int, field: int, value: int) -> None:
        before = self._worth(row)
        self._known.cells[field][row] = value
        rank = self.rank_of(row)
        if rank:
            self.raise_rank(row, min(max(1, rank - before) + self._worth(row), _MAX_RANK))

    def _worth(self, row: int) -> int:
        uses, weight, cost = (cells[row] for cells in self._known.cells)
        return (uses * weight * cost // _COST) << _PER_ACCESS

    def _now(self, row: int, clock: int) -> int:
        self._age = max(self._age, clock) + 1
        return min(self._age + self._worth(row), _MAX_RANK)
