"""Will the session come back soon: learned by stop reason."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, Final

from tierkv.abc import Arrival, Departure, Predictor, Wish
from tierkv.decisions.predict.gaps import Gaps
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey

__all__ = ["ReturnTime"]

_CLASSES: Final = 64
_OTHER: Final = "\0other"
_FIRST_S: Final = 4.0
_STEP: Final = 1.35
_STEPS: Final = 24  # up to an hour


class _Away:
    """A session that went away; ``step``: which of the times at which it may be wished for."""

    __slots__ = ("deadline", "keys", "kind", "since", "step", "wake")

    def __init__(self, keys: tuple[BlockKey, ...], kind: str, since: float) -> None:
        self.keys = keys
        self.kind = kind
        self.since = since
        self.step = _STEPS
        self.wake: float | None = None
        self.deadline = since


class ReturnTime(Predictor):
    """Wishes for the histories of sessions that are likely to come back soon.

    Per stop reason it learns how long sessions stay away. At growing intervals (4 s, 5.4 s,
    7.3 s, ... an hour) it looks at a session that is away: is the chance that it comes back within
    ``hold`` seconds at least ``chance``, then its history is wished for; what is still in the fast
    tier costs nothing. What a caller says himself (``next_in``) is taken as it is.

    Timers that wake idle sessions are right for 2-4 % of what they load on chat, and for 40 %
    after tool calls: expect it to be silent (or turned off) on chat.

    Args:
        chance: Least probability that makes a wish; 0: a blind timer, for comparisons.
        hold: Seconds for which a wish stands, or a third of the time that the session has been
            away, if that is longer.
        lead: Seconds that a load may take: an announced return is wished for so much earlier.
        sessions: Most sessions that are watched.
        memory: Most blocks of theirs that are remembered, at about 80 bytes each.

    Raises:
        ConfigError: if the chance is no probability.
    """

    name: ClassVar[str] = "return_time"

    def __init__(
        self,
        chance: float = 0.3,
        hold: float = 30.0,
        lead: float = 2.0,
        sessions: int = 16_384,
        memory: int = 1_048_576,
    ) -> None:
        if not 0 <= chance <= 1:
            raise ConfigError(f"return_time: chance is a probability from 0 to 1, not {chance}")
        self._chance, self._hold, self._lead = chance, hold, lead
        self._sessions, self._memory = sessions, memory
        self._gaps: dict[str, Gaps] = {}
        self._away: OrderedDict[int, _Away] = OrderedDict()
        self._blocks = 0
        self._wakes: list[tuple[float, int]] = []

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        """Learn how long the session stayed away."""
        away = self._forget(event.session)
        if away is not None:
            self._gaps[away.kind].came(max(0.0, now - away.since))
        return []

    def ended(self, event: Departure, now: float) -> list[Wish]:
        """Plan when to wish for it."""
        if not event.session or not event.keys:
            return []
        before = self._forget(event.session)
        kind = self._class(event.stop_reason)
        if before is not None:
            self._gaps[before.kind].left(-1)  # the same end, of which more is known now
        self._gaps[kind].left()
        away = _Away(event.keys, kind, now)
        self._away[event.session] = away
        self._blocks += len(event.keys)
        while len(self._away) > self._sessions or (
            self._blocks > self._memory and len(self._away) > 1
        ):
            self._forget(next(iter(self._away)))
        if event.next_in is None:
            away.step = 0
            self._plan(event.session, away, now)
        else:
            back = now + max(0.0, event.next_in)
            self._wake(event.session, away, max(now, back - self._lead), back + self._hold)
        self._tidy()
        return []

    def due(self, now: float) -> list[Wish]:
        """Wish for the sessions whose time has come."""
        wishes = []
        while self._wakes and self._wakes[0][0] <= now:
            when, session = heapq.heappop(self._wakes)
            away = self._away.get(session)
            if away is None or away.wake != when:
                continue
            if away.deadline > now:
                wishes.append(Wish(away.keys, away.deadline))
            self._plan(session, away, now)
        return wishes

    def _plan(self, session: int, away: _Away, now: float) -> None:
        """Find the next time at which the session is worth a wish, if there is one."""
        away.wake = None
        while away.step < _STEPS:
            gone = _FIRST_S * _STEP**away.step
            away.step += 1
            if away.since + gone <= now:
                continue  # asked too late: the time after that counts
            width = max(self._hold, gone / 3)
            chance = self._gaps[away.kind].chance(gone, width)
            if chance is not None and chance >= self._chance:
                self._wake(session, away, away.since + gone, away.since + gone + width)
                return

    def _wake(self, session: int, away: _Away, when: float, until: float) -> None:
        away.wake, away.deadline = when, until
        heapq.heappush(self._wakes, (when, session))

    def next_due(self) -> float | None:
        """When the next session's time comes."""
        while self._wakes:
            when, session = self._wakes[0]
            away = self._away.get(session)
            if away is not None and away.wake == when:
                return when
            heapq.heappop(self._wakes)
        return None

    def _class(self, reason: str | None) -> str:
        kind = reason or ""
        if kind not in self._gaps:
            if len(self._gaps) >= _CLASSES:
                kind = _OTHER
            self._gaps.setdefault(kind, Gaps())
        return kind

    def _forget(self, session: int) -> _Away | None:
        away = self._away.pop(session, None)
        if away is not None:
            self._blocks -= len(away.keys)
        return away

    def _tidy(self) -> None:
        # sessions that came back leave their times in the heap
        if len(self._wakes) > 2 * len(self._away) + 64:
            live = ((away.wake, session) for session, away in self._away.items())
            self._wakes = [(wake, session) for wake, session in live if wake is not None]
            heapq.heapify(self._wakes)
