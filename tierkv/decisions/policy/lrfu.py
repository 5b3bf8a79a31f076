"""Least recently / frequently used (Lee et al., IEEE Trans. Computers 50(12), 2001)."""

from __future__ import annotations

from math import exp, log, log1p
from typing import ClassVar, Final

from tierkv.abc import Policy
from tierkv.decisions.policy.ghosts import PRIME, GhostClocks
from tierkv.decisions.policy.heap import NO_ENTRY, RowHeap
from tierkv.decisions.policy.rows import ABSENT, ROW_BITS

__all__ = ["Lrfu"]

_FRACTION_BITS: Final = 6  # ranks are fixed-point: 1/64 of an access
_FRACTION: Final = 1 << _FRACTION_BITS
_STATE_BITS: Final = _FRACTION_BITS + 1  # below whole accesses in what RowHeap keeps of a row
_ROW: Final = (1 << ROW_BITS) - 1
_MOST_AHEAD: Final = 16.0  # half-lives that an effective time may be ahead of the clock
_LN2: Final = log(2.0)
_DEFAULT_HALF_LIFE: Final = 1024.0  # until the first resize
_PER_PART: Final = 1.1  # accesses in a half-life
_FIRST_WINDOW: Final = 256  # accesses after which the pace of the clock is measured
_LAST_WINDOW: Final = 4096  # each window has twice the accesses of the one before, up to these


class Lrfu(RowHeap, Policy):
    """Evicts the row with the smallest sum of past accesses, each halved every ``H`` accesses.

    LRFU's value CRF(t) = sum 2^(-(t - t_i) / H) decays for all rows alike, so their order
    changes by accesses alone. It is kept as the *effective access time* e with
    CRF(t) = 2^(-(t - e) / H): an access at t makes it
    ``max(e, t) + H * log2(1 + 2^(-|e - t| / H))``. H = a tenth more accesses of its own than the
    tier holds parts: best or near it on public serving traces. The clock runs faster than that (a
    block that is missed and then stored counts twice, blocks of other tenants count too): by how
    much is measured as it goes. The value of an evicted part is remembered, for one or two parts a
    row, and goes on decaying until the part returns.

    A good default: on chat 0.1 to 1.5 points above ``lru`` at every capacity, on agentic traffic
    2.9 above to 0.3 below. 16 bytes a row and 8 to 16 of history, 100 for a row under a hint.
    Follows hints.
    """

    name: ClassVar[str] = "lrfu"

    def __init__(self) -> None:
        super().__init__()
        self._parts = _DEFAULT_HALF_LIFE
        self._set_half_life(_DEFAULT_HALF_LIFE)
        self._window, self._left = 0, 1  # accesses after which to measure, and those still to come
        self._window_start = -1
        self._ghosts: GhostClocks | None = None  # until something was evicted
        self._shifts: dict[int, int] = {}

    @property
    def half_life(self) -> float:
        """What the clock moves on until one access counts half."""
        return self._half_life

    def resize(self, capacity_parts: float) -> None:
        """Set the half-life to so many mean-sized parts as the tier holds, and a tenth more."""
        pace = self._half_life / self._parts
        self._parts = max(1.0, _PER_PART * capacity_parts)
        self._set_half_life(pace * self._parts)

    # What a store costs beside the core's own work: so these do at once what RowHeap's methods do.

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held); what was known of it counts."""
        self._left -= 1
        if self._left <= 0:
            self._measure(clock)
        rows, ghosts = self._rows, self._ghosts
        if row >= rows.size or rows.sparse:
            self.track(row, (clock + 1) << _FRACTION_BITS)
        else:
            self._rank[row] = (clock + 1) << _STATE_BITS  # and no entry: remove() left it so
            rows.count += 1
        if ghosts is not None and ghosts.cells[(ident & ghosts.mask) << 1] == ident % PRIME:
            ahead = int(_MOST_AHEAD * self._half_life)
            before = ghosts.pop(ident, clock + 1, ahead) << _FRACTION_BITS
            if before:
                self.raise_rank(row, self._add(before, (clock + 1) << _FRACTION_BITS))

    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""
        self._left -= 1
        state = self._rank[row]
        last, now = state >> 1, (clock + 1) << _FRACTION_BITS
        if self._shifts and row in self._shifts:
            self.raise_rank(row, self._add(last - self._shifts.pop(row), now))
        else:
            self._rank[row] = (self._add(last, now) if last else now) << 1 | state & 1

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row; remember its value if it was evicted."""
        rows, ranks, ghosts = self._rows, self._rank, self._ghosts
        if self._shifts and row in self._shifts:
            ranks[row] -= self._shifts.pop(row) << 1
        clock = ranks[row] >> _STATE_BITS
        if evicted and ident and clock > 0:
            if ghosts is None:
                ghosts = self._ghosts = GhostClocks(rows.count)
            ghosts.put(ident, clock)
        if rows.sparse:
            RowHeap.remove(self, row)
            return
        if self._first & _ROW == row:
            self._first = NO_ENTRY
        ranks[row] = self._queued[row] = ABSENT
        rows.count -= 1

    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable; a hint it had is over."""
        self._shifts.pop(row, None)
        self.raise_rank(row, 0)

    def shift(self, row: int, accesses: float) -> None:
        """Move the uses of a row that is not expedited, until the next one."""
        rank = self.rank_of(row)
        if rank:
            moved = max(1, rank + int(accesses * _FRACTION))
            self._shifts[row] = self._shifts.get(row, 0) + moved - rank
            self.raise_rank(row, moved)

    def rank(self, row: int) -> float:
        """Effective access time in accesses; 0 for an expedited row."""
        return self.rank_of(row) / _FRACTION

    def _measure(self, clock: int) -> None:
        """Compare the accesses of this window with what the clock moved on."""
        if self._window:
            pace = (clock - self._window_start) / (self._window - self._left)
            self._set_half_life(self._parts * max(1.0, pace))
        self._window = min(max(2 * self._window, _FIRST_WINDOW), _LAST_WINDOW)
        self._window_start, self._left = clock, self._window
        if self._ghosts is not None:
            self._ghosts.grow(self._rows.count)

    def _set_half_life(self, accesses: float) -> None:
        self._half_life = accesses
        self._life = accesses * _FRACTION / _LN2  # until a value is 1/e of what it was
        self._decay = -1.0 / self._life

    def _add(self, last: int, now: int) -> int:
        """Effective time after an access ``now``, given the one before."""
        if last > now:
            return last + int(self._life * log1p(exp((last - now) * self._decay)))
        return now + int(self._life * log1p(exp((now - last) * self._decay)))
