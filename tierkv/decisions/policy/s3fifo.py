"""S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023)."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.decisions.policy.ghosts import Ghosts
from tierkv.decisions.policy.queues import TwoQueues

__all__ = ["S3Fifo"]

_SMALL: Final = 0
_MAIN: Final = 1
_SHARE: Final = 10  # the small queue gives when it has one part in so many
_USES_BITS: Final = 2  # uses counted: 0 to 3
_USES: Final = (1 << _USES_BITS) - 1
_PROMOTED: Final = 2  # uses for which a row leaves the small queue for the main one
_FRACTION: Final = 256  # places in a queue between two accesses


class S3Fifo(TwoQueues):
    """A small FIFO queue in front of a large one; what is not used again leaves after the small.

    A row enters the small queue, a tenth of all; at its end, a row that was used twice goes over
    to the main queue, another one leaves, and is remembered. A remembered part that returns enters
    the main queue at once. There a row that was used goes round again, with one use less. A use
    is a counter that grows: nothing is reordered on a hit.

    Here only leaves may leave, so a row with descendants is judged when they are gone, or moves
    to the main queue at its second use. That takes the edge off: on chat 1 to 2 points above
    ``lru`` at the tightest capacities, 0 to 4 below at others; on agentic traffic 12 below. What is
    new goes first: long prompts that are used once do no harm, and a conversation needs a third
    turn to be safe. 40 bytes a row and 33 a ghost, nine ghosts for ten rows at most. Hints are
    ignored.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = Ghosts()
        self._clock = 0
        self._last = 0  # the place that was given out last, in either queue

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held): in the main queue if remembered."""
        self._clock = max(self._clock, clock)
        ghost = ident and self._ghosts.pop(ident) is not None
        self._enter(row, _MAIN if ghost else _SMALL, self._end())

    def touch(self, row: int, clock: int) -> None:
        """Count a use, three at most; an expedited row goes to the end of its queue."""
        self._clock = max(self._clock, clock)
        queue = self._queues[self._place[row]]
        rank = queue.rank_of(row)
        if not rank:
            queue.raise_rank(row, self._end())
        elif rank & _USES < _USES:
            queue.raise_rank(row, rank + 1)
            if self._place[row] == _SMALL and rank & _USES == _PROMOTED - 1 and not queue.free(row):
                self._move(row, _MAIN, self._end())  # held: it may never come to the end

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row; remember it if the small queue evicted it."""
        place = self._leave(row)
        if evicted and ident and place == _SMALL:
            self._ghosts.limit = self.bound - self.bound // _SHARE
            self._ghosts.add(ident)

    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None.

        Rows that are due but were used move on: that is paid for by their uses, and asking again
        gives the same answer.
        """
        while True:
            place = self._source()
            queue = self._queues[place]
            row = queue.victim()
            if row is None:
                return None
            rank = queue.rank_of(row)
            uses = rank & _USES
            if not rank or uses < (_PROMOTED if place == _SMALL else 1):
                return row
            if place == _SMALL:
                self._move(row, _MAIN, self._end())
            else:
                queue.raise_rank(row, self._end() | uses - 1)

    def rank(self, row: int) -> float:
        """Clock of its place in its queue; rows that would not leave yet lie above the others."""
        place = self._place[row]
        uses = self._queues[place].rank_of(row) & _USES
        later = uses >= (_PROMOTED if place == _SMALL else 1)
        return super().rank(row) + (float(1 << 61) if later else 0.0)

    def _end(self) -> int:
        """Rank of the end of either queue, with no uses."""
        self._last = max(self._last + 1, (self._clock + 1) * _FRACTION)
        return self._last << _USES_BITS

    def _choose(self) -> int:
        return _SMALL if _SHARE * len(self._queues[_SMALL]) >= len(self) else _MAIN
