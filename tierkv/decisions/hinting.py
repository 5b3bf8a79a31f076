"""What sessions say of their next turn, and how much of it is worth believing.

A hint names a class: why the turn stopped (``"tool_use"``, ``"end_turn"``, ...), or about how soon
the next one is expected. For each class the accesses until the session really came back are
learned online. A session's parts are then ranked as if they had been used earlier by
``k * (median of the class - median of all)`` accesses, so that what returns soon outlives what
returns late: on public agentic traces this saves 6 to 10 % of the loads of plain recency (k = 0.5;
a larger k wins a little more in roomy tiers and loses it in tight ones).

A class is heeded only while it tells more than the overall median does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from math import inf, log, log2
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.blocks import part_id, split_part
from tierkv.decisions.index import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.placement import Placement

__all__ = ["HintClass", "Hints"]

_WEIGHT: Final = 0.5  # k
_ENOUGH: Final = 16  # returns before a class is heeded
_WINDOW: Final = 255  # returns that a median is taken of
_CLASSES: Final = 64
_PENDING: Final = 16384  # sessions whose return is awaited
_LOOK_BACK: Final = 512  # blocks at the end of a prompt among which the last turn's end is sought
_AT_ONCE: Final = 256  # blocks handled in one call
_QUEUED: Final = 1024  # hints whose blocks are not all handled yet
_GAIN: Final = 0.95  # a class must lower the error of the overall median to this share
_FORGET: Final = 1 / 64  # weight of the last return in the error averages
_GIVE_UP: Final = 32.0  # medians after which a session is taken not to return
_LONGEST: Final = 4096  # blocks of a session of which a favour is taken back
_EXPIRY: Final = 8.0  # expected gaps after which a favour is taken back
_FAR: Final = float(1 << 32)  # accesses; whoever says that it takes longer is put no later
_OCTAVES: Final = 30  # of a second: what is expected later than in 34 years is one class


class HintClass(NamedTuple):
    """What has been learned of one class of hints.

    Attributes:
        name: ``"stop:REASON"``, or ``"in:SECONDS"`` rounded to a power of two.
        returns: Returns seen so far.
        median: Median accesses until the return.
        heeded: Whether it moves anything now.
    """

    name: str
    returns: int
    median: float
    heeded: bool


class _Gaps:
    """Median of the last observations."""

    __slots__ = ("_order", "_sorted", "count")

    def __init__(self) -> None:
        self.count = 0
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, gap: float) -> None:
        self.count += 1
        self._order.append(gap)
        insort(self._sorted, gap)
        if len(self._order) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0


class _Class:
    """Gaps of one class, and how well its median and the overall one foretold them."""

    __slots__ = ("gaps", "mine", "others")

    def __init__(self) -> None:
        self.gaps = _Gaps()
        self.mine = self.others = 0.0

    def add(self, gap: float, overall: float) -> None:
        if self.gaps.count >= _ENOUGH:
            self.mine += _FORGET * (_error(gap, self.gaps.median) - self.mine)
            self.others += _FORGET * (_error(gap, overall) - self.others)
        self.gaps.add(gap)

    @property
    def tells(self) -> bool:
        if self.gaps.count < _ENOUGH:
            return False
        return self.gaps.count < 2 * _ENOUGH or self.mine < _GAIN * self.others


def _error(gap: float, guess: float) -> float:
    return abs(log((gap + 1) / (guess + 1)))


class _Awaited(NamedTuple):
    """A session whose return is awaited, by the key of its last block."""

    kind: str
    clock: int
    groups: int
    shift: float


class _Work(NamedTuple):
    """Blocks still to be shifted."""

    keys: Sequence[BlockKey]
    left: int
    groups: int
    shift: float
    clock: int


class Hints:
    """Learns what hints are worth, and shifts parts accordingly. Bounded, deterministic."""

    __slots__ = (
        "_all",
        "_at",
        "_awaited",
        "_classes",
        "_favours",
        "_pace",
        "_then",
        "_work",
        "expired",
        "shifted",
    )

    def __init__(self, placement: Placement) -> None:
        self._at = placement
        self._all = _Gaps()
        self._classes: dict[str, _Class] = {}
        self._awaited: OrderedDict[BlockKey, _Awaited] = OrderedDict()  # oldest first
        self._favours: deque[tuple[float, BlockKey]] = deque()  # (clock at which it ends, key)
        self._pace = 0.0  # accesses a second
        self._then: tuple[float, int] | None = None
        self._work: deque[_Work] = deque()
        self.shifted = 0
        self.expired = 0

    @property
    def busy(self) -> bool:
        """Whether there are blocks still to be shifted."""
        return bool(self._work)

    @property
    def waiting(self) -> bool:
        """Whether any session's return is awaited."""
        return bool(self._awaited)

    def classes(self) -> list[HintClass]:
        """What has been learned so far."""
        return [
            HintClass(name, found.gaps.count, found.gaps.median, found.tells)
            for name, found in list(self._classes.items())  # metrics are read in other threads
        ]

    # ------------------------------------------------------------------ what is said

    def told(
        self,
        keys: Sequence[BlockKey],
        groups: int,
        stop_reason: str | None,
        next_in: float | None,
        now: float,
    ) -> None:
        """Take a hint; see :meth:`Decisions.hint`."""
        at = self._at
        self._keep_pace(now)
        kind = _kind(stop_reason, next_in)
        if not keys:
            return
        if kind not in self._classes and len(self._classes) >= _CLASSES:
            # the one that told least: callers who never say the same twice silence nobody else
            del self._classes[min(self._classes, key=lambda k: self._classes[k].gaps.count)]
        known = self._classes.setdefault(kind, _Class())
        shift = self._worth(known, next_in)
        before = self._awaited.pop(keys[-1], None)
        change = shift - (before.shift if before is not None else 0.0)
        self._awaited[keys[-1]] = _Awaited(kind, at.clock, groups, shift)
        if len(self._awaited) > _PENDING:
            self._give_up(next(iter(self._awaited)))
        if shift > 0:
            self._favours.append((at.clock + _EXPIRY * max(1.0, known.gaps.median), keys[-1]))
            if len(self._favours) > _PENDING:
                self._favours.popleft()
        if abs(change) >= 1:
            self._work.append(_Work(keys, len(keys), groups, change, at.clock))
            if len(self._work) > _QUEUED:
                self._work.popleft()
            self.carry()

    def _keep_pace(self, now: float) -> None:
        clock = self._at.clock
        if self._then is None or now < self._then[0]:
            self._then = (now, clock)
        elif now - self._then[0] >= 1.0:
            pace = (clock - self._then[1]) / (now - self._then[0])
            self._pace = pace if not self._pace else 0.9 * self._pace + 0.1 * pace
            self._then = (now, clock)

    def _worth(self, known: _Class, next_in: float | None) -> float:
        """Accesses by which the parts of such a session count as used later."""
        overall = self._all.median
        if self._all.count < _ENOUGH:
            return 0.0
        if known.tells:
            return _WEIGHT * (overall - known.gaps.median)
        if known.gaps.count < _ENOUGH and next_in is not None and self._pace:
            # until more is known, its word
            return _WEIGHT * max(-_FAR, overall - next_in * self._pace)
        return 0.0

    # ------------------------------------------------------------------ what happens

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """Note that a prompt came in: the session whose last turn ended in it is back."""
        awaited = self._awaited
        for number in range(len(keys) - 1, max(-1, len(keys) - 1 - _LOOK_BACK), -1):
            found = awaited.pop(keys[number], None)
            if found is not None:
                self._observe(found)
                return

    def _observe(self, found: _Awaited) -> None:
        gap = float(self._at.clock - found.clock)
        known = self._classes.get(found.kind)
        if known is not None:
            known.add(gap, self._all.median)
        self._all.add(gap)

    def _give_up(self, key: BlockKey) -> None:
        """Count what was waited so far: the session took at least as long."""
        self._observe(self._awaited.pop(key))

    def tick(self) -> None:
        """Take favours back whose time is over, and give up sessions that do not return."""
        at = self._at
        for _ in range(_AT_ONCE):
            if not self._favours or self._favours[0][0] > at.clock:
                break
            _, key = self._favours.popleft()
            found = self._awaited.get(key)
            if found is not None and found.shift > 0:
                self._awaited[key] = found._replace(shift=0.0)
                self.expired += 1
                chain = self._chain(key, found.groups)
                work = _Work(chain, len(chain), found.groups, -found.shift, found.clock)
                self._work.append(work)
        limit = _GIVE_UP * self._all.median if self._all.count >= _ENOUGH else inf
        for _ in range(_AT_ONCE):
            oldest = next(iter(self._awaited), None)
            if oldest is None or at.clock - self._awaited[oldest].clock <= limit:
                break
            self._give_up(oldest)
        self.carry()

    def _chain(self, key: BlockKey, groups: int) -> list[BlockKey]:
        """Keys of the blocks up to ``key``, as far as they are still there."""
        index = self._at.index
        keys = [key]
        for group in range(groups):
            row = index.rows.get(part_id(key, group), NO_ROW)
            while row >= 0 and index.parent[row] >= 0 and len(keys) < _LONGEST:
                row = index.parent[row]
                keys.append(split_part(index.name(row))[0])
            if len(keys) > 1:
                break
        keys.reverse()
        return keys

    def carry(self) -> None:
        """Shift the next blocks, leaves first."""
        at, budget = self._at, _AT_ONCE
        rows, touched = at.index.rows, at.index.touched
        while self._work and budget > 0:
            work = self._work.popleft()
            stop = max(0, work.left - budget)
            budget -= work.left - stop
            for number in range(work.left - 1, stop - 1, -1):
                for group in range(work.groups):
                    row = rows.get(part_id(work.keys[number], group), NO_ROW)
                    # what was used since is somebody else's, or the session's own next turn
                    if row >= 0 and touched[row] <= work.clock:
                        at.shift(row, work.shift)
                        self.shifted += 1
            if stop:
                self._work.appendleft(work._replace(left=stop))


def _kind(stop_reason: str | None, next_in: float | None) -> str:
    if next_in is not None:
        return f"in:{2 ** min(round(log2(max(next_in, 1 / 64))), _OCTAVES)}"
    return f"stop:{stop_reason}"
