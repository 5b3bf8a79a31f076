"""Least recently / frequently used (Lee et al., IEEE Trans. Computers 50(12), 2001)."""

from __future__ import annotations

from math import log1p
from typing import ClassVar, Final

from tierkv.abc import Policy
from tierkv.decisions.policy.heap import RowHeap

__all__ = ["Lrfu"]

_FRACTION: Final = 64  # ranks are fixed-point: 1/64 of an access
_LN2: Final = 0.6931471805599453
_DEFAULT_HALF_LIFE: Final = 1024.0  # until the first resize


class Lrfu(RowHeap, Policy):
    """Evicts the row with the smallest sum of past accesses, each halved every ``H`` accesses.

    LRFU's value CRF(t) = sum 2^(-(t - t_i) / H) decays for all rows alike, so their order
    changes by accesses alone. It is kept as the *effective access time* e with
    CRF(t) = 2^(-(t - e) / H): an access at t makes it
    ``max(e, t) + H * log2(1 + 2^(-|e - t| / H))``. H = accesses that the tier can hold, the
    setting that was best or near it on public serving traces.
    """

    name: ClassVar[str] = "lrfu"

    def __init__(self) -> None:
        super().__init__()
        self._half_life = _DEFAULT_HALF_LIFE

    @property
    def half_life(self) -> float:
        """Accesses after which one access counts half."""
        return self._half_life

    def resize(self, capacity_parts: float) -> None:
        """Set the half-life to the number of mean-sized parts that the tier holds."""
        self._half_life = max(1.0, float(capacity_parts))

    def insert(self, row: int, nbytes: int, clock: int) -> None:
        """Start tracking a row that became resident (held)."""
        self.track(row, (clock + 1) * _FRACTION)

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        last = self.rank_of(row)
        now = (clock + 1) * _FRACTION
        unit = self._half_life * _FRACTION
        newest, gap = (last, last - now) if last > now else (now, now - last)
        gain = unit * log1p(2.0 ** (-gap / unit)) / _LN2 if last else 0.0
        self.raise_rank(row, newest + int(gain))

    def rank(self, row: int) -> float:
        """Effective access time in accesses; 0 for an expedited row."""
        return self.rank_of(row) / _FRACTION
