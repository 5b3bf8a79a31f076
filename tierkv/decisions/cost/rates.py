"""Estimates that forget: latency and bandwidth of a tier, and plain speeds."""

from __future__ import annotations

from typing import Final

__all__ = ["Line", "Speed"]

_KEEP: Final = 0.9  # weight of everything older, at each further batch: half of it is 7 batches old
_KEEP_SPEED: Final = 0.8
_KEEP_LARGEST: Final = 0.98
_OUTLIER: Final = 8.0  # times the expected seconds
_TRUSTED: Final = 4  # samples before one of them can be called an outlier
_QUICK: Final = 3  # batches in a row, each so much faster than expected, that end a slow spell
_SPREAD: Final = (
    0.1  # relative spread of sizes below which latency and bandwidth cannot be told apart
)
_LEAST_SLOPE: Final = 0.05  # share of the mean seconds a byte that stays, however flat the samples


class Line:
    """Seconds of a batch as ``latency + nbytes / bandwidth``, fitted to the batches seen.

    The model is Hockney's (Parallel Computing 20, 1994); the fit is least squares with exponential
    forgetting (recursive least squares: Haykin, Adaptive Filter Theory, chapter 9), kept as five
    decayed sums. A single batch that takes much longer than expected counts as 8 times the
    expected time; a second one in a row is believed. Three in a row that take less than an eighth
    of it (the disk has woken up, the network is back) make everything older void: a slow spell of
    seconds would else outweigh the milliseconds of dozens of batches.

    Attributes:
        count: Batches seen.
    """

    __slots__ = (
        "_largest",
        "_latency",
        "_quick",
        "_slope",
        "_strange",
        "_w",
        "_x",
        "_xx",
        "_xy",
        "_y",
        "count",
    )

    def __init__(self) -> None:
        self.count = 0
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._latency = self._slope = self._largest = 0.0
        self._strange = False
        self._quick = 0

    def __repr__(self) -> str:
        return f"<Line {self.latency:.2g} s + bytes / {self.bandwidth:.3g}, {self.count} batches>"

    @property
    def latency(self) -> float:
        """Seconds that a batch takes whatever its size."""
        return self._latency

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a large batch; 0 while nothing is known."""
        return 1 / self._slope if self._slope > 0 else 0.0

    def seconds(self, nbytes: int) -> float:
        """Expected seconds for ``nbytes``, in batches as large as the largest ones seen lately."""
        if nbytes <= 0 or not self.count:
            return 0.0
        batches = max(1.0, nbytes / self._largest) if self._largest else 1.0
        return batches * self._latency + nbytes * self._slope

    def add(self, nbytes: int, seconds: float) -> None:
        """Learn from one batch.

        Args:
            nbytes: Its bytes.
            seconds: How long it took.
        """
        expected = self.seconds(nbytes)
        strange = self.count >= _TRUSTED and 0 < expected * _OUTLIER < seconds
        if strange and not self._strange:
            seconds = expected * _OUTLIER
        self._strange = strange
        self._quick = self._quick + 1 if seconds * _OUTLIER < expected else 0
        if self._quick == _QUICK:
            self._w = self._x = self._y = self._xx = self._xy = self._latency = 0.0
            self._quick = 0
        self.count += 1
        x, y = float(nbytes), float(seconds)
        self._largest = max(x, self._largest * _KEEP_LARGEST)
        self._w = self._w * _KEEP + 1
        self._x = self._x * _KEEP + x
        self._y = self._y * _KEEP + y
        self._xx = self._xx * _KEEP + x * x
        self._xy = self._xy * _KEEP + x * y
        self._fit()

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._w, self._y / self._w
        if mean_x <= 0:
            self._latency = mean_y
            return
        most = mean_y / mean_x
        variance = self._xx / self._w - mean_x * mean_x
        if variance > (_SPREAD * mean_x) ** 2:
            slope = (self._xy / self._w - mean_x * mean_y) / variance
        else:  # all of one size: the latency learned earlier stands
            slope = (mean_y - min(self._latency, mean_y)) / mean_x
        self._slope = min(max(slope, _LEAST_SLOPE * most), most)
        self._latency = max(mean_y - self._slope * mean_x, 0.0)


class Speed:
    """A quotient of two amounts (tokens a second, raw bytes a stored byte), recent ones first."""

    __slots__ = ("_amount", "_per", "count")

    def __init__(self) -> None:
        self.count = 0
        self._amount = self._per = 0.0

    def __repr__(self) -> str:
        return f"<Speed {self.value:.4g} of {self.count}>"

    @property
    def value(self) -> float:
        """Their quotient; 0 while nothing is known."""
        return self._amount / self._per if self._per > 0 else 0.0

    def add(self, amount: float, per: float) -> None:
        """Learn from one observation; what is not positive says nothing and is ignored."""
        if amount <= 0 or per <= 0:
            return
        self.count += 1
        self._amount = self._amount * _KEEP_SPEED + amount
        self._per = self._per * _KEEP_SPEED + per
