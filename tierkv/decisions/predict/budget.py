"""A budget in bytes a second that always comes back."""

from __future__ import annotations

__all__ = ["Budget"]

_BURST_S = 1.0


class Budget:
    """A token bucket: what is spent comes back with time, whatever becomes of it.

    A prediction is granted while anything is left, whatever its size, so that a part larger than
    a second's worth is brought, too; it is paid for before the next one, and the rate holds on
    average. What a caller asks for is charged as well, but never puts more than one second's
    worth on the debt side: predictions are back two seconds later, however much it was.

    Args:
        rate: Bytes a second; None: no limit.
    """

    __slots__ = ("_burst", "_left", "_rate", "_since")

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._burst = 0.0 if rate is None else rate * _BURST_S
        self._left = self._burst
        self._since: float | None = None

    def left(self, now: float) -> float:
        """Bytes that may be spent now; negative: what was spent too much."""
        if self._rate is None:
            return float("inf")
        if self._since is not None and now > self._since:
            self._left = min(self._burst, self._left + (now - self._since) * self._rate)
        self._since = now if self._since is None else max(now, self._since)
        return self._left

    def spend(self, nbytes: int, now: float) -> bool:
        """Spend bytes if anything is left; whether there was."""
        left = self.left(now)
        if left <= 0:
            return False
        self._left = left - nbytes
        return True

    def charge(self, nbytes: int, now: float) -> None:
        """Spend bytes whether or not anything is left; the debt grows to a second's worth."""
        left = self.left(now)
        self._left = min(left, max(left - nbytes, -self._burst))

    def give_back(self, nbytes: int, now: float) -> None:
        """Take bytes back that were not moved after all."""
        self._left = min(self._burst, self.left(now) + nbytes)
