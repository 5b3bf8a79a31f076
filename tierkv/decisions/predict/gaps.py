"""How long sessions stay away, learned by class."""

from __future__ import annotations

from itertools import accumulate
from math import log2
from typing import Final

__all__ = ["Gaps"]

_PER_OCTAVE: Final = 4
_LOWEST: Final = -6 * _PER_OCTAVE  # 1/64 s
_BUCKETS: Final = 25 * _PER_OCTAVE  # up to six days
_FEWEST: Final = 32
_MOST: Final = 4096.0


def _place(gap: float) -> float:
    """Where a gap is on the axis of buckets."""
    return min(max(log2(max(gap, 1e-9)) * _PER_OCTAVE - _LOWEST, 0.0), float(_BUCKETS))


class Gaps:
    """Histogram of the gaps of one class, quarter octaves wide; old ones fade.

    Its hazard, the chance of coming back within a while given that one is still away, is what
    tells a class that is worth a prefetch from one that is not: on public traces of agents, one
    who waits for a tool comes back within 30 s with probability 0.72, one whose turn ended with
    0.13; after a minute with 0.30 and 0.06.
    """

    __slots__ = ("_back", "_gone", "_stale", "_sums")

    def __init__(self) -> None:
        self._back = [0.0] * _BUCKETS
        self._gone = 0.0
        self._sums = [0.0] * (_BUCKETS + 1)  # of those who were back before each edge
        self._stale = 0

    def left(self, weight: int = 1) -> None:
        """Count one that went away (or, with -1, that belongs to another class after all)."""
        self._gone = max(0.0, self._gone + weight)
        if self._gone >= _MOST:
            self._gone /= 2
            self._back = [count / 2 for count in self._back]
            self._stale = _BUCKETS * _BUCKETS

    def came(self, gap: float) -> None:
        """Count one that came back after ``gap`` seconds."""
        self._back[min(int(_place(gap)), _BUCKETS - 1)] += 1
        self._stale += 1

    def chance(self, away: float, width: float) -> float | None:
        """Probability of coming back within ``width`` seconds, for one still away after ``away``.

        Returns:
            None if too little is known of the class. Those who are away now count as not coming
            back, until they do.
        """
        if self._gone < _FEWEST:
            return None
        if self._stale * 16 > self._gone:
            self._sums = [0.0, *accumulate(self._back)]
            self._stale = 0
        before, after = self._before(away), self._before(away + width)
        still = max(self._gone - before, after - before, 1.0)
        return (after - before) / still

    def _before(self, gap: float) -> float:
        place = _place(gap)
        bucket = min(int(place), _BUCKETS - 1)
        return self._sums[bucket] + (place - bucket) * (self._sums[bucket + 1] - self._sums[bucket])
