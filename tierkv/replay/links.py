"""The way out of a slower tier, in virtual time: one transfer after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.blocks import PartId
    from tierkv.decisions.types import FoundPart

__all__ = ["Flight", "Link"]


@dataclass(slots=True, eq=False)
class Flight:
    """A part that is to be brought to the first tier ahead of need.

    Attributes:
        found: Where it is.
        plan: Number of the plan that it belongs to.
        since: When it was asked for.
        reservation: Its room in the first tier, once its transfer has begun.
    """

    found: FoundPart
    plan: int
    since: float
    reservation: int = 0


class Link:
    """First come, first served, but what a request waits for goes before what nobody waits for.

    Attributes:
        free: When what has begun, or is waited for, has been carried.
        moved: Bytes that it has carried, or is committed to.
    """

    def __init__(
        self,
        rate: float,
        begin: Callable[[Flight, float], bool],
        land: Callable[[Flight, float], None],
    ) -> None:
        """Make a link.

        Args:
            rate: Bytes a second.
            begin: Asked when a flight's turn has come; False: it is not carried.
            land: Told when a flight has been carried.
        """
        self.free = 0.0
        self.moved = 0
        self._rate, self._begin, self._land = rate, begin, land
        self._waiting: deque[Flight] = deque()
        self._parts: dict[PartId, Flight] = {}
        self._under_way: tuple[float, Flight] | None = None

    def send(self, flight: Flight) -> None:
        """Queue a flight behind everything else."""
        self._waiting.append(flight)
        self._parts[flight.found.part] = flight

    def waits(self, part: PartId) -> bool:
        """Whether a flight of this part is queued, and has not begun."""
        return part in self._parts

    def carries(self, part: PartId) -> bool:
        """Whether a flight of this part is under way: it arrives at :attr:`free`."""
        return self._under_way is not None and self._under_way[1].found.part == part

    def withdraw(self, part: PartId) -> Flight:
        """Take a flight that has not begun out of the queue."""
        return self._parts.pop(part)

    def let_pass(self, now: float) -> None:
        """Let time pass until ``now``: flights begin and land."""
        while True:
            if self._under_way is not None:
                end, flight = self._under_way
                if end > now:
                    return
                self._under_way = None
                self._land(flight, end)
            while self._waiting and self._parts.get(self._first) is not self._waiting[0]:
                self._waiting.popleft()  # withdrawn
            if not self._waiting:
                return
            flight = self._waiting[0]
            start = max(self.free, flight.since)
            if start >= now:
                return
            self._waiting.popleft()
            del self._parts[flight.found.part]
            if self._begin(flight, start):
                self.moved += flight.found.nbytes
                self.free = start + flight.found.nbytes / self._rate
                self._under_way = (self.free, flight)

    @property
    def _first(self) -> PartId:
        return self._waiting[0].found.part

    def carry(self, nbytes: int, now: float) -> float:
        """Carry bytes that somebody waits for; when the last of them has arrived."""
        self.free = max(self.free, now) + nbytes / self._rate
        self.moved += nbytes
        return self.free
