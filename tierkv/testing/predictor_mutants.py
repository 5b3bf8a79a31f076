"""Predictors that are wrong, each in one way: the suite must tell.

Every mutant names the check that is there for it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tierkv.abc import Arrival, Departure, Wish
from tierkv.blocks import BlockKey
from tierkv.decisions.predict.chain import MostRecentChild
from tierkv.decisions.predict.return_time import ReturnTime
from tierkv.testing.predictors import PredictorTests

if TYPE_CHECKING:
    from tierkv.abc import Predictor

__all__ = ["MUTANTS", "Mutant", "failing_checks"]


class Mutant(NamedTuple):
    """A wrong predictor and the check that must catch it."""

    make: type[Predictor]
    check: str


def failing_checks(make: type[Predictor], only: str = "test_") -> dict[str, str]:
    """Run the checks whose names begin with ``only`` on a predictor; those that fail, and why."""

    def made(_self: object, *, small: bool = False) -> Predictor:
        options = {"memory": 512} if small else {}
        return make(**options)

    case: Any = type("Case", (PredictorTests,), {"make": made})()
    failed = {}
    for name in sorted(name for name in dir(case) if name.startswith(only)):
        try:
            getattr(case, name)()
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


class Shouting(MostRecentChild):
    """Has a name that no configuration could spell."""

    name: ClassVar[str] = "most recent, child"


class Silent(MostRecentChild):
    """Never commits itself."""

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        super().arrived(event, now)
        return []


class Dicing(MostRecentChild):
    """Wishes by chance."""

    _dice: ClassVar[random.Random] = random.Random()

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        return [wish for wish in super().arrived(event, now) if self._dice.random() < 0.5]


class Inventing(MostRecentChild):
    """Makes up a block that nobody has ever used."""

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        wishes = super().arrived(event, now)
        return [Wish((*wish.keys, BlockKey(b"?" * 32)), wish.deadline) for wish in wishes]


class Gossiping(MostRecentChild):
    """Answers one session's request with what another one asked for."""

    def __init__(self, blocks: int = 256, memory: int = 131_072) -> None:
        super().__init__(blocks, memory)
        self.last: Wish | None = None

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        last, self.last = self.last, Wish(event.keys)
        return super().arrived(event, now) + ([last] if last is not None else [])


class TooLate(MostRecentChild):
    """Has deadlines that are over."""

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        return [Wish(wish.keys, now) for wish in super().arrived(event, now)]


class Repeating(ReturnTime):
    """Says again what it said last."""

    def __init__(self, memory: int = 1_048_576) -> None:
        super().__init__(memory=memory)
        self.last: list[Wish] = []

    def due(self, now: float) -> list[Wish]:
        wishes = super().due(now)
        self.last = wishes or self.last
        return [wish for wish in self.last if wish.deadline is None or wish.deadline > now]


class Undated(ReturnTime):
    """Does not say when it has something to say."""

    def next_due(self) -> float | None:
        return None


class Faithful(ReturnTime):
    """Waits for those who are back."""

    def __init__(self, memory: int = 1_048_576) -> None:
        super().__init__(memory=memory)
        self.back: list[tuple[float, Wish]] = []

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        away = self._away.get(event.session)
        if away is not None and away.wake is not None:
            self.back.append((away.wake, Wish(away.keys, away.deadline)))
        return super().arrived(event, now)

    def due(self, now: float) -> list[Wish]:
        late = [wish for wake, wish in self.back if wake <= now]
        self.back = [pair for pair in self.back if pair[0] > now]
        return super().due(now) + late


class Conservative(ReturnTime):
    """Holds on to what it was told first."""

    def ended(self, event: Departure, now: float) -> list[Wish]:
        away = self._away.get(event.session)
        if away is not None and away.since == now:
            return []
        return super().ended(event, now)


class Literal(MostRecentChild):
    """Takes for granted that a request has blocks."""

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        assert event.keys, "a request without a block"
        return super().arrived(event, now)


class Scanning(ReturnTime):
    """Looks at every session that it knows, at each event."""

    def _scan(self, now: float) -> None:
        if len(self._away) > 11_900:  # sooner would take the test too long
            assert min(away.since for away in self._away.values()) <= now

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        self._scan(now)
        return super().arrived(event, now)

    def ended(self, event: Departure, now: float) -> list[Wish]:
        self._scan(now)
        return super().ended(event, now)


class Hoarding(MostRecentChild):
    """Writes down every request and throws nothing away."""

    def __init__(self, blocks: int = 256, memory: int = 131_072) -> None:
        super().__init__(blocks, memory)
        self.past: list[Arrival] = []

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        self.past.append(event)
        return super().arrived(event, now)


MUTANTS = (
    Mutant(Shouting, "test_has_a_name"),
    Mutant(Silent, "test_wishes_for_something"),
    Mutant(Dicing, "test_is_deterministic"),
    Mutant(Inventing, "test_wishes_only_for_chains_that_it_has_seen"),
    Mutant(Gossiping, "test_a_request_makes_wishes_for_its_own_chain"),
    Mutant(TooLate, "test_deadlines_lie_ahead"),
    Mutant(Repeating, "test_each_wish_is_told_once"),
    Mutant(Undated, "test_says_when_it_is_due"),
    Mutant(Faithful, "test_who_is_back_is_not_waited_for"),
    Mutant(Conservative, "test_the_latest_history_counts"),
    Mutant(Literal, "test_odd_events_are_harmless"),
    Mutant(Scanning, "test_a_crowd_costs_nothing"),
    Mutant(Hoarding, "test_memory_is_bounded"),
)
"""Wrong predictors, one for each check."""
