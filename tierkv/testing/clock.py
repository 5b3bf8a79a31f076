"""A clock that moves when told to, so that no test of a TTL ever sleeps."""

from __future__ import annotations

__all__ = ["VirtualClock"]


class VirtualClock:
    """Seconds that stand still until :meth:`advance`; call it to read the time.

    >>> clock = VirtualClock(100.0)
    >>> clock.advance(2.5)
    >>> clock()
    102.5
    """

    __slots__ = ("_now",)

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)

    def __repr__(self) -> str:
        return f"<VirtualClock {self._now!r} s>"

    def __call__(self) -> float:
        """Return the present time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward.

        Raises:
            ValueError: if ``seconds`` is negative; the engine's clocks are monotonic.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
