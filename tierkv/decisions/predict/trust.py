"""Whether a predictor is believed: off below a floor of precision, tried again later."""

from __future__ import annotations

from typing import Final

__all__ = ["Trust"]

_PLANS: Final = 8  # a verdict needs outcomes of so many plans: one long prefix is one guess
_LONGEST_S: Final = 3600.0
_WINDOWS: Final = 4


class Trust:
    """Watches the outcomes of one predictor's prefetches.

    After at least ``minimum`` outcomes, of several plans, a share of right ones below ``floor``
    turns the predictor off for ``pause`` seconds, and for twice as long each time that it fails
    again, up to an hour. It then starts from nothing. Outcomes of long ago fade: the weight of
    the past is never more than a few times ``minimum``.

    Args:
        floor: Least share of right prefetches, 0 to 1; 0 never turns anything off.
        minimum: Outcomes before there is a verdict.
        pause: Seconds of the first time off.

    Attributes:
        times_off: How often it was turned off so far.
    """

    __slots__ = (
        "_bad",
        "_floor",
        "_good",
        "_last",
        "_minimum",
        "_pause",
        "_plans",
        "_until",
        "_wait",
        "times_off",
    )

    def __init__(self, floor: float, minimum: int, pause: float) -> None:
        self._floor = floor
        self._minimum = minimum
        self._wait = self._pause = pause
        self._until: float | None = None
        self.times_off = 0
        self._forget()

    def _forget(self) -> None:
        self._good = self._bad = 0.0
        self._plans = 0
        self._last = 0

    @property
    def proven(self) -> bool:
        """Whether there were enough outcomes for a verdict, which was not to turn it off."""
        return self._good + self._bad >= self._minimum and self._plans >= _PLANS

    def on(self, now: float) -> bool:
        """Whether the predictor may plan."""
        return self._until is None or now >= self._until

    def note(self, plan: int, *, right: bool, now: float) -> None:
        """Take one outcome into account.

        Args:
            plan: Number of the plan that it belongs to; later plans have larger ones.
            right: Whether the part was asked for.
            now: Time.
        """
        if not self.on(now):
            return  # of before it was turned off: judged already
        self._until = None
        if plan > self._last:  # each plan counts once, however their outcomes are mixed
            self._plans += 1
            self._last = plan
        if right:
            self._good += 1
        else:
            self._bad += 1
        if not self.proven:
            return
        total = self._good + self._bad
        if self._good < self._floor * total:
            self._until = now + self._wait
            self._wait = min(2 * self._wait, _LONGEST_S)
            self.times_off += 1
            self._forget()
        elif total >= _WINDOWS * self._minimum:
            self._good /= 2
            self._bad /= 2
            self._wait = self._pause
