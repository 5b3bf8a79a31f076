"""Conformance suite for predictors of prefetch.

A plug-in's test file subclasses it and says how to make the predictor::

    class TestMine(PredictorTests):
        def make(self, *, small: bool = False) -> Mine:
            return Mine(memory=1024) if small else Mine()

pytest then runs every check. The checks use plain asserts and need no fixtures; what they must
catch is shown by :mod:`tierkv.testing.predictor_mutants`. They hold whatever a predictor bets on:
whether its bets are good is measured, not checked.
"""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.abc import Arrival, Departure
from tierkv.blocks import BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import Predictor, Wish

__all__ = ["PredictorTests", "Told", "chain", "future", "story", "tell"]

_TURNS: Final = 40
_GAP_S: Final = 20.0
_CROWD: Final = 12_000
_EVENTS: Final = 1000
_CPU_S: Final = (
    0.3  # a predictor needs a twentieth of it, a scan of all sessions many times as much
)
_SMALL: Final = 512
_LEAK_BYTES: Final = 1 << 19


class Told(NamedTuple):
    """One wish: when it was made, at which event (None: time passed), and what it is."""

    now: float
    event: Arrival | Departure | None
    wish: Wish


def chain(name: str, blocks: int, start: tuple[BlockKey, ...] = ()) -> tuple[BlockKey, ...]:
    """Keys of a chain of so many blocks that begins with ``start``."""
    keys = list(start)
    while len(keys) < blocks:
        text = f"{name}/{len(keys)}".encode()
        keys.append(BlockKey(hashlib.sha256((keys[-1] if keys else b"") + text).digest()))
    return tuple(keys)


def story() -> list[tuple[float, Arrival | Departure]]:
    """Agents that come back every 20 s, a document that is read in order, its beginning anew."""
    told: list[tuple[float, Arrival | Departure]] = []
    for session in range(1, 6):
        keys = chain(f"agent-{session}", 2)
        for turn in range(_TURNS):
            start = session + turn * _GAP_S
            told.append((start, Arrival(session, keys)))
            keys = chain(f"agent-{session}", len(keys) + 2, keys)
            told.append((start + 1.5, Departure(session, keys, "tool_use")))
    book = chain("book", 96)
    told.append((0.5, Departure(90, book, "end_turn")))
    for number, blocks in enumerate(range(8, 97, 8)):
        told.append((30.25 + 5 * number, Arrival(91, book[:blocks])))
        told.append((31.25 + 5 * number, Departure(91, book[:blocks], "end_turn")))
    for number in range(10):
        told.append((200.25 + 7 * number, Arrival(0, book[:12])))
        told.append((201.25 + 7 * number, Departure(0, book, None)))
    return sorted(told, key=lambda pair: pair[0])


def future() -> list[tuple[float, int]]:
    """(time, session) of every request of the story, for predictors that must be given it."""
    return [(now, event.session) for now, event in story() if isinstance(event, Arrival)]


def tell(predictor: Predictor, events: Sequence[tuple[float, Arrival | Departure]]) -> list[Told]:
    """Tell a predictor of events, and of every second between them; what it wishes for."""
    wishes: list[Told] = []
    clock = 0.0
    for now, event in events:
        while clock + 1.0 < now:
            clock += 1.0
            wishes += [Told(clock, None, wish) for wish in predictor.due(clock)]
        clock = now
        answer = predictor.arrived if isinstance(event, Arrival) else predictor.ended
        wishes += [Told(now, event, wish) for wish in answer(event, now)]  # type: ignore[arg-type]
    return wishes


def _crowd(first: int, sessions: int) -> Iterator[tuple[float, Arrival | Departure]]:
    """Sessions that come once each, with chains of their own."""
    for session in range(first, first + sessions):
        keys = chain(f"crowd-{session}", 4)
        yield 10_000.0 + session, Arrival(session, keys[:2])
        yield 10_000.5 + session, Departure(session, keys, "tool_use")


class PredictorTests(ABC):
    """What every :class:`~tierkv.abc.Predictor` must do, whatever it bets on."""

    @abstractmethod
    def make(self, *, small: bool = False) -> Predictor:
        """Return a new predictor.

        Args:
            small: Whether it shall remember 512 blocks and sessions at most.

        One that needs the future gets :func:`future`.
        """

    def _trained(self) -> Predictor:
        predictor = self.make()
        tell(predictor, story())
        return predictor

    def _later(self, predictor: Predictor, start: float, seconds: int = 7200) -> list[Wish]:
        """What comes due in a time in which nothing happens."""
        return [wish for now in range(0, seconds, 5) for wish in predictor.due(start + now)]

    def test_has_a_name(self) -> None:
        """The name by which it is asked for; options and lists are written behind it."""
        name = self.make().name
        assert isinstance(name, str)
        assert name.isidentifier()
        assert name == name.lower()

    def test_wishes_for_something(self) -> None:
        """There is something to guess in the story, for each kind of bet."""
        assert tell(self.make(), story())

    def test_is_deterministic(self) -> None:
        """Equal events give equal wishes: prefetches are replayed offline."""
        assert tell(self.make(), story()) == tell(self.make(), story())

    def test_wishes_only_for_chains_that_it_has_seen(self) -> None:
        """From the first block on, without a gap, and nothing made up or of somebody else's."""
        roots: set[BlockKey] = set()
        edges: set[tuple[BlockKey, BlockKey]] = set()
        events = story()
        for told in tell(self.make(), events):
            while events and events[0][0] <= told.now:
                keys = events.pop(0)[1].keys
                roots.add(keys[0])
                edges.update(pairwise(keys))
            assert told.wish.keys
            assert told.wish.keys[0] in roots
            assert set(pairwise(told.wish.keys)) <= edges

    def test_a_request_makes_wishes_for_its_own_chain(self) -> None:
        """Tenants share no first block: what one asks for tells nothing of another one's data."""
        for told in tell(self.make(), story()):
            if told.event is not None:
                assert told.wish.keys[0] == told.event.keys[0]

    def test_deadlines_lie_ahead(self) -> None:
        """A wish that is too late the moment it is made is none."""
        for told in tell(self.make(), story()):
            assert told.wish.deadline is None or told.wish.deadline > told.now

    def test_each_wish_is_told_once(self) -> None:
        """Asking again at the same time gives nothing more."""
        predictor = self.make()
        for now, event in story():
            if isinstance(event, Arrival):
                predictor.arrived(event, now)
            else:
                predictor.ended(event, now)
            predictor.due(now + 0.25)
            assert predictor.due(now + 0.25) == []

    def test_says_when_it_is_due(self) -> None:
        """Nothing comes before the time that it names, and then that time moves on."""
        predictor = self.make()
        for now, event in story():
            when = predictor.next_due()
            if when is not None and when < now:
                assert predictor.due(when - 1e-6) == []
            wishes = predictor.due(now)
            assert not wishes or (when is not None and when <= now)
            after = predictor.next_due()
            assert after is None or after > now
            if isinstance(event, Arrival):
                predictor.arrived(event, now)
            else:
                predictor.ended(event, now)

    def test_who_is_back_is_not_waited_for(self) -> None:
        """A session whose request is there is not wished for when its time comes."""
        predictor = self._trained()
        keys = chain("agent-3", 40)
        predictor.ended(Departure(3, keys, "tool_use"), 5000.0)
        predictor.arrived(Arrival(3, keys), 5000.5)
        assert not [wish for wish in self._later(predictor, 5000.5) if wish.keys[0] == keys[0]]

    def test_the_latest_history_counts(self) -> None:
        """Of a turn that was told of twice, only what was said last is wished for."""
        predictor = self._trained()
        old, new = chain("old", 30, chain("agent-2", 3)), chain("new", 30, chain("agent-2", 3))
        predictor.ended(Departure(2, old, "tool_use", 30.0), 5000.0)
        predictor.ended(Departure(2, new, "tool_use", 30.0), 5000.0)
        stale = set(old) - set(new)
        assert not [wish for wish in self._later(predictor, 5000.0) if stale & set(wish.keys)]

    def test_odd_events_are_harmless(self) -> None:
        """No session, no block, an unheard-of reason, time that stands still or a huge gap."""
        predictor = self._trained()
        keys = chain("odd", 3)
        for now in (6000.0, 6000.0, 1e9):
            for session in (0, 1, 2**64 - 1):
                for some in ((), keys[:1], keys):
                    predictor.arrived(Arrival(session, some), now)
                    for reason in (None, "", "never heard of"):
                        for next_in in (None, 0.0, 1e12):
                            predictor.ended(Departure(session, some, reason, next_in), now)
            for wish in predictor.due(now):
                assert wish.keys

    def test_a_crowd_costs_nothing(self) -> None:
        """Thousands of sessions are never looked at one by one."""
        predictor = self.make()
        for now, event in _crowd(1, _CROWD):
            if isinstance(event, Arrival):
                predictor.arrived(event, now)
            else:
                predictor.ended(event, now)
        more = list(_crowd(_CROWD + 1, _EVENTS))
        start = time.process_time()
        for now, event in more:
            if isinstance(event, Arrival):
                predictor.arrived(event, now)
            else:
                predictor.ended(event, now)
            predictor.next_due()
            predictor.due(now)
        assert time.process_time() - start < _CPU_S

    def test_memory_is_bounded(self) -> None:
        """What came once and never again is forgotten."""
        predictor = self.make(small=True)
        tell(predictor, list(_crowd(1, 2 * _SMALL)))
        events = _crowd(1 + 2 * _SMALL, 6 * _SMALL)
        tracemalloc.start()
        try:
            for now, event in events:
                if isinstance(event, Arrival):
                    predictor.arrived(event, now)
                else:
                    predictor.ended(event, now)
            grown = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert grown < _LEAK_BYTES
