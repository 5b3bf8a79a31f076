"""A circuit breaker: a medium that fails again and again is left alone for a while."""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["Breaker", "BreakerState"]

_FAILURES: Final = 5
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class BreakerState(Enum):
    """Closed: batches pass. Open: none does. Half-open: one probe is out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Closed, until batches fail in a row or hang; then open; then half-open for one probe.

    The pattern is Nygard's (Release It!, 2007). Five batches that fail one after the other open
    it, and so does one that hangs. After a pause of 1 s one batch may pass as a probe: success
    closes the breaker, failure opens it for twice as long, up to 60 s. Only a batch that succeeded
    resets it: nothing that a caller swallowed does. A relapse, that is to open again before it
    stayed closed for as long as the next pause, lengthens the pause too: where small reads answer
    and large ones hang, each probe would else cost somebody a whole time-out.

    Attributes:
        state: What it does now.
        failures: Failed batches since the last good one.
        retry_at: When the next probe may pass, while it is open.
        hung: Whether it is open because a batch hung.
    """

    __slots__ = ("_closed_at", "_pause", "_relapsed", "failures", "hung", "retry_at", "state")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.hung = False
        self.retry_at = 0.0
        self._pause = _FIRST_PAUSE_S
        self._closed_at = 0.0
        self._relapsed = False

    def __repr__(self) -> str:
        return f"<Breaker {self.state.value}, {self.failures} failures>"

    @property
    def closed(self) -> bool:
        """Whether batches pass freely."""
        return self.state is BreakerState.CLOSED

    def admits(self, now: float) -> bool:
        """Whether a batch that started now would pass. Changes nothing."""
        return self.closed or (self.state is BreakerState.OPEN and now >= self.retry_at)

    def admit(self, now: float) -> bool:
        """Let a batch pass, as the probe if it is time for one; whether it may start."""
        if not self.admits(now):
            return False
        if not self.closed:
            self.state = BreakerState.HALF_OPEN
        return True

    def success(self, now: float) -> None:
        """A batch came back well."""
        if not self.closed:
            self._closed_at = now
        elif now - self._closed_at >= self._pause:
            self._pause = _FIRST_PAUSE_S
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.hung = False

    def failure(self, now: float, *, hung: bool = False) -> None:
        """A batch failed, or (``hung``) has not come back in time."""
        self.failures += 1
        self.hung = self.hung or hung
        if self.state is BreakerState.OPEN:
            return  # a batch of earlier: the pause is running already
        if self.state is BreakerState.HALF_OPEN or hung or self.failures >= _FAILURES:
            self._relapsed = self.closed and self._pause > _FIRST_PAUSE_S
            self.retry_at = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
            self.state = BreakerState.OPEN

    def hint(self, now: float) -> None:
        """There is a sign of life: what hung may be probed at once; what failed may not.

        Nor may what hung again after it had given signs of life.
        """
        if self.state is BreakerState.OPEN and self.hung and not self._relapsed:
            self.retry_at = min(self.retry_at, now)

    def untried(self, now: float) -> None:
        """The probe told nothing, e.g. because it was cancelled: another one may try."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self.retry_at = now
