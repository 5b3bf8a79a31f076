"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.decisions.policy.ghosts import Ghosts
from tierkv.decisions.policy.queues import TwoQueues

__all__ = ["Arc"]

_RECENT: Final = 0
_FREQUENT: Final = 1
_NOBODY: Final = -1


class Arc(TwoQueues):
    """Two LRU queues, used once and used again; what their ghosts miss sets the share of each.

    A return of what the first queue evicted gives the first queue more room, a return of what the
    second evicted less. The ghosts of both are as many as the tier holds parts.

    Adapts by itself, and is never far behind: on chat 0.9 to 2.2 points above ``lru`` at tight
    capacity, 1.5 below at ample; on agentic traffic 3 above at the tightest, 1 below else. Leaves
    alone may leave here: a queue whose next row is held gives the next that is free, and the other
    queue gives if there is none. 40 bytes a row and 33 a ghost. Follows hints within a queue.
    """

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = (Ghosts(), Ghosts())
        self._target = 0.0
        # the row for which room is being made, if it is in already; it does not count yet
        self._newest = _NOBODY
        self._returned = False  # whether that one was a ghost of the second queue

    @property
    def target(self) -> float:
        """Rows that the first queue should have."""
        return self._target

    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held), and learn if it was a ghost."""
        recent, frequent = self._ghosts
        before, after = recent.count, frequent.count
        place, self._returned = _RECENT, False
        if ident and recent.pop(ident) is not None:
            place = _FREQUENT
            self._target = min(self.bound, self._target + max(1.0, after / before))
        elif ident and frequent.pop(ident) is not None:
            place, self._returned = _FREQUENT, True
            self._target = max(0.0, self._target - max(1.0, before / after))
        self._enter(row, place, clock + 1)
        self._newest = row
        self._forget()

    def touch(self, row: int, clock: int) -> None:
        """Note an access: the row is in the second queue from then on.

        An expedited row only gets its rank back.
        """
        place = self._place[row]
        queue = self._queues[place]
        if place == _RECENT and queue.rank_of(row):
            self._move(row, _FREQUENT, clock + 1)
        else:
            queue.raise_rank(row, clock + 1)

    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""
        if row == self._newest:
            self._newest = _NOBODY
        super().release(row)

    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row; remember it if it was evicted."""
        if row == self._newest:
            self._newest = _NOBODY
        place = self._leave(row)
        if evicted and ident:
            ghosts = self._ghosts[place]
            ghosts.limit = self.bound + 1  # the true bound is over both
            ghosts.add(ident)
            self._forget()

    def shift(self, row: int, accesses: float) -> None:
        """Move the last use of a row that is not expedited."""
        queue = self._queues[self._place[row]]
        rank = queue.rank_of(row)
        if rank:
            queue.raise_rank(row, max(1, rank + int(accesses)))

    def resize(self, capacity_parts: float) -> None:
        """Learn how many mean-sized parts the tier holds: the most that is remembered."""
        super().resize(capacity_parts)
        self._target = min(self._target, capacity_parts)

    def _forget(self) -> None:
        """Keep first queue and ghosts within one tier's parts, all ghosts too, all within two.

        Two ghosts go at most: a bound that was lowered takes effect little by little.
        """
        recent, frequent = self._ghosts
        first, both, bound = len(self._queues[_RECENT]), len(self), self.bound
        for _ in range(2):
            ghosts = recent.count + frequent.count
            crowded = first + recent.count > bound
            if crowded and recent.count:
                recent.drop_oldest()
            elif ghosts > bound or (not crowded and both + ghosts > 2 * bound):
                (frequent if frequent.count else recent).drop_oldest()
            else:
                return

    def _choose(self) -> int:
        recent, frequent = (len(queue) for queue in self._queues)
        coming = self._newest != _NOBODY
        if coming and self._place[self._newest] == _RECENT:
            recent -= 1
        elif coming:
            frequent -= 1
        if recent and recent == self._target and coming and self._returned:
            return _RECENT
        return _RECENT if (recent and recent > self._target) or not frequent else _FREQUENT
