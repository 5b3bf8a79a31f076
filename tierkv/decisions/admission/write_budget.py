"""A budget of bytes a day, so that a flash device lives as long as it was bought for."""

from __future__ import annotations

from typing import ClassVar, Final

from tierkv.abc import Admission
from tierkv.errors import ConfigError
from tierkv.units import parse_bytes

__all__ = ["WriteBudget"]

_DAY: Final = 86400.0


class WriteBudget(Admission):
    """Admits parts while the bytes written stay within a budget a day.

    A token bucket: it holds at most one day's budget, begins full, and fills at an even pace. So
    in any ``t`` seconds at most ``budget * (1 + t / 86400)`` bytes are written; after a restart
    the bucket is full again. What is refused is not lost by that: it stays in the faster tier until
    its place there is needed. Counted are bytes as the tier charges them, when they are set aside.
    """

    name: ClassVar[str] = "write_budget"
    listens: ClassVar[bool] = False

    def __init__(self, option: str = "") -> None:
        try:
            self._budget = parse_bytes(option)
        except ConfigError as error:
            raise ConfigError(
                f"admission 'write_budget' needs bytes a day, e.g. 'write_budget:200GiB': {error}"
            ) from None
        if self._budget <= 0:
            raise ConfigError(f"admission 'write_budget' needs a positive size, not {option!r}")
        super().__init__()
        self.option = option
        self._level = float(self._budget)
        self._time: float | None = None

    def left(self, now: float) -> float:
        """Bytes that may be written right now."""
        if self._time is None:
            return self._level
        gain = max(0.0, now - self._time) * self._budget / _DAY
        return min(float(self._budget), self._level + gain)

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        """Say whether so many bytes are left."""
        del ident, demand, victim
        return nbytes <= self.left(now)

    def wrote(self, nbytes: int, now: float) -> None:
        """Take bytes out of the bucket, or put them back."""
        self._level = min(float(self._budget), self.left(now) - nbytes)
        self._time = now if self._time is None else max(now, self._time)
