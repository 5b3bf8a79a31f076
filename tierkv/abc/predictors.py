"""What guesses which prefix will be asked for next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey

__all__ = ["Arrival", "Departure", "Predictor", "Wish"]


class Arrival(NamedTuple):
    """A request came in; it is not looked up yet.

    Attributes:
        session: 64 bits that name its session; 0 if it has none.
        keys: Keys of the prompt's full blocks, from the first; perhaps not of all of them yet.
    """

    session: int
    keys: tuple[BlockKey, ...]


class Departure(NamedTuple):
    """A turn ended: its KV is stored, or somebody said what comes next.

    One turn may end several times, each time with more that is known; the last one counts.

    Attributes:
        session: 64 bits that name its session; 0 if it has none.
        keys: Keys of all full blocks of its history, from the first.
        stop_reason: Why the model stopped (``"tool_use"``, ``"end_turn"``, ...), if it was told.
        next_in: Seconds until the session is expected back, if it was told.
    """

    session: int
    keys: tuple[BlockKey, ...]
    stop_reason: str | None = None
    next_in: float | None = None


class Wish(NamedTuple):
    """A prefix worth having in the fastest tier.

    Attributes:
        keys: Keys of its blocks, from the first.
        deadline: When it is of no use any more, on the clock of the events; None: never.
    """

    keys: tuple[BlockKey, ...]
    deadline: float | None = None


class Predictor(ABC):
    """Wishes for prefixes before they are asked for. Sans-IO.

    It is told of events in the order of time (``now``, seconds, monotonic) and answers with
    wishes; whether a wish is granted, and what became of it, is not its business
    (:class:`tierkv.decisions.prefetching.Prefetching`). It has no clock, no randomness and no
    other source of knowledge, so that equal events give equal wishes, live and offline. Keys are
    opaque: it may compare them, and wish only for chains that it has seen. Each call is O(log n)
    in what it remembers, and linear in the blocks of its own event or answer; what it remembers
    is bounded.

    Attributes:
        name: By which configurations ask for it.
        asked: Whether its wishes are for what somebody has asked for already. They then count as
            a use, and everything that was used before gives way; a mere guess pushes out only
            what is colder than what it brings.
        offline: Whether it must be given the future (its first argument), which only a replay
            has.
    """

    name: ClassVar[str]
    asked: ClassVar[bool] = False
    offline: ClassVar[bool] = False

    @abstractmethod
    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        """A request came in."""

    @abstractmethod
    def ended(self, event: Departure, now: float) -> list[Wish]:
        """A turn ended."""

    def due(self, now: float) -> list[Wish]:
        """Time passed: wishes whose moment has come, each of them once."""
        return []

    def next_due(self) -> float | None:
        """When :meth:`due` will have something to say; None if nothing is planned."""
        return None
