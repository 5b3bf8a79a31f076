"""The thrash guard: promotions on a hit stop where they push out what is asked for sooner.

A working set a little larger than a tier makes recency useless: each part that is promoted pushes
out one that is wanted before it, so that every hit costs two movements and the tier serves none.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Guard", "Promotions"]

_PAIRS: Final = 512  # races that may be undecided at a time
_SAMPLE: Final = 4  # parts watched on each side of a race
_ENOUGH: Final = 8.0  # races before anything is concluded
_MEMORY: Final = 32.0  # races after which all counts are halved
_CLOSE: Final = 0.9  # share of lost races above which promotions stop
_OPEN: Final = 0.6  # ... and below which they go on
_PROBE: Final = 8  # while they are stopped, one in so many goes on, to learn whether it pays again


class Promotions(NamedTuple):
    """What became of the parts promoted into one tier on a hit.

    Attributes:
        made: Copies promoted.
        used: Those that were asked for while they were there.
        wasted: Those that left for want of room before anybody asked for them again.
        refused: How many times the thrash guard refused one, of however many parts.
    """

    made: int
    used: int
    wasted: int
    refused: int


class _Race:
    """What was promoted, against what it pushed out: who is asked for first?"""

    __slots__ = ("over", "rows")

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        self.over = False


class Guard:
    """Watches the promotions into one tier.

    For each promotion that pushed something out, a few rows of both sides are watched. The race
    is won if a promoted one is asked for first, lost if one that was pushed out is, and void if a
    promoted one leaves before either. Where most races are lost, promotions that need room are
    refused but for one in eight, until the races of those are won again. Bounded: 512 races of 8
    rows.

    Attributes:
        made: Copies promoted.
        used: Those used before they left.
        wasted: Those that left unused, for want of room.
        refused: Promotions refused.
        closed: Whether promotions are refused now.
    """

    __slots__ = (
        "_lost",
        "_races",
        "_turn",
        "_watched",
        "_watching",
        "_won",
        "closed",
        "made",
        "refused",
        "used",
        "wasted",
    )

    def __init__(self, watching: dict[int, int]) -> None:
        """Begin with promotions allowed.

        Args:
            watching: How many guards watch each row; shared by all of them.
        """
        self.made = self.used = self.wasted = self.refused = 0
        self.closed = False
        self._watching = watching
        self._watched: dict[int, tuple[_Race, bool]] = {}
        self._races: deque[_Race] = deque()
        self._won = self._lost = 0.0
        self._turn = 0

    def figures(self) -> Promotions:
        """What became of promotions so far."""
        return Promotions(self.made, self.used, self.wasted, self.refused)

    def refuses(self) -> bool:
        """Whether a promotion that needs room should be left alone; asked once a promotion."""
        if not self.closed:
            return False
        self._turn += 1
        refused = self._turn % _PROBE != 0
        self.refused += refused
        return refused

    def begin(self, promoted: Sequence[int], pushed: Sequence[int]) -> None:
        """Watch a promotion: rows promoted, rows pushed out for them."""
        if not promoted or not pushed:
            return
        ins, outs = _sample(promoted), _sample(pushed)
        race = _Race((*ins, *outs))
        self._races.append(race)
        if len(self._races) > _PAIRS:
            self._end(self._races.popleft())
        for rows, good in ((ins, True), (outs, False)):
            for row in rows:
                if row not in self._watched:
                    self._watching[row] = self._watching.get(row, 0) + 1
                self._watched[row] = (race, good)

    def asked(self, row: int) -> None:
        """A watched row is asked for."""
        found = self._look_away(row)
        if found is not None:
            self._decide(*found)

    def left(self, row: int) -> None:
        """A promoted copy left unused, for want of room."""
        self.wasted += 1
        found = self._watched.get(row)
        if found is not None and found[1]:
            self._end(found[0])  # what it pushed out was not missed for all that time

    def forget(self, row: int) -> None:
        """A row is recycled: it will name another part."""
        self._look_away(row)

    def _look_away(self, row: int) -> tuple[_Race, bool] | None:
        """Watch a row no longer; its race, if it was watched."""
        found = self._watched.pop(row, None)
        if found is not None:
            others = self._watching.pop(row) - 1
            if others:
                self._watching[row] = others
        return found

    def _end(self, race: _Race) -> None:
        race.over = True
        for row in race.rows:
            found = self._watched.get(row)
            if found is not None and found[0] is race:
                self._look_away(row)

    def _decide(self, race: _Race, won: bool) -> None:
        if race.over:
            return
        self._end(race)
        if won:
            self._won += 1.0
        else:
            self._lost += 1.0
        total = self._won + self._lost
        if total > _MEMORY:
            self._won, self._lost, total = self._won / 2, self._lost / 2, total / 2
        if total >= _ENOUGH:
            share = self._lost / total
            self.closed = share > (_OPEN if self.closed else _CLOSE)


def _sample(rows: Sequence[int]) -> tuple[int, ...]:
    """At most four of them, evenly spread."""
    step = max(1, -(-len(rows) // _SAMPLE))
    return tuple(rows[::step])
