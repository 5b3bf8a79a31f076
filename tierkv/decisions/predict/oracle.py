"""Knows the future, for bounds."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import Arrival, Departure, Predictor, Wish
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierkv.blocks import BlockKey

__all__ = ["Oracle"]


class Oracle(Predictor):
    """Wishes for each session's history shortly before it comes back, which it knows.

    No predictor of return times can do better: what it leaves is for eviction and admission.

    Args:
        future: (time, session) of every request to come; only a replay has it.
        lead: Seconds that a load may take: the wish comes so much earlier.
        per_block: Seconds added to that for each block.

    Raises:
        ConfigError: if there is no future to be had.
    """

    name: ClassVar[str] = "oracle"
    asked: ClassVar[bool] = True  # it is no guess
    offline: ClassVar[bool] = True

    def __init__(
        self,
        future: Iterable[tuple[float, int]] | None = None,
        lead: float = 2.0,
        per_block: float = 0.0,
    ) -> None:
        if future is None:
            raise ConfigError(
                "predictor 'oracle' needs to know the future: it works offline, in a replay; "
                "live, use 'arrival', 'chain', 'sequential' or 'return_time'"
            )
        self._lead, self._per_block = lead, per_block
        self._times: dict[int, list[float]] = {}
        for time, session in future:
            self._times.setdefault(session, []).append(time)
        for times in self._times.values():
            times.sort()
        self._planned: dict[int, tuple[float, tuple[BlockKey, ...], float]] = {}
        self._wakes: list[tuple[float, int]] = []

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        """It is back: nothing to wish for any more."""
        self._planned.pop(event.session, None)
        return []

    def ended(self, event: Departure, now: float) -> list[Wish]:
        """Plan for the session's next request, if there will be one."""
        times = self._times.get(event.session, [])
        place = bisect_right(times, now)
        self._planned.pop(event.session, None)
        if place < len(times) and event.keys and event.session:
            back = times[place]
            wake = max(now, back - self._lead - self._per_block * len(event.keys))
            self._planned[event.session] = (wake, event.keys, back)
            heapq.heappush(self._wakes, (wake, event.session))
        return []

    def due(self, now: float) -> list[Wish]:
        """Wish for what is about to come back."""
        wishes = []
        while self._wakes and self._wakes[0][0] <= now:
            wake, session = heapq.heappop(self._wakes)
            planned = self._planned.get(session)
            if planned is not None and planned[0] == wake:
                del self._planned[session]
                if planned[2] >= now:
                    wishes.append(Wish(planned[1], None))
        return wishes

    def next_due(self) -> float | None:
        """When the next wish is due."""
        while self._wakes:
            wake, session = self._wakes[0]
            planned = self._planned.get(session)
            if planned is not None and planned[0] == wake:
                return wake
            heapq.heappop(self._wakes)
        return None
