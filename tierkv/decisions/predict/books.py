"""What one predictor's prefetches came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.decisions.predict.trust import Trust

__all__ = ["Book", "PrefetchFigures"]


@dataclass(frozen=True, slots=True)
class PrefetchFigures:
    """What one predictor's prefetches came to, in parts.

    Attributes:
        name: Name of the predictor.
        issued: Granted: ``used + late + wasted + refused + out``.
        used: A later load found the part in a faster tier because of it.
        late: Still on its way when somebody asked for it.
        wasted: Evicted, or too old, before anybody asked for it.
        refused: Not brought: no room that was worth taking, a failure, or the engine closed.
        out: On its way or there, and not asked for yet.
        nbytes: Bytes that were granted.
        enabled: Whether it plans now: not while it is off for being wrong too often.
        times_off: How often it was turned off.
        broken: What it raised, which turned it off for good; empty if nothing.
    """

    name: str
    issued: int = 0
    used: int = 0
    late: int = 0
    wasted: int = 0
    refused: int = 0
    out: int = 0
    nbytes: int = 0
    enabled: bool = True
    times_off: int = 0
    broken: str = ""

    @property
    def precision(self) -> float | None:
        """Share of what was brought that was asked for; None before anything is known."""
        known = self.used + self.late + self.wasted
        return (self.used + self.late) / known if known else None

    @property
    def timely(self) -> float | None:
        """Share of what was asked for that was there in time; None before anything is known."""
        right = self.used + self.late
        return self.used / right if right else None


class Book:
    """Counts the outcomes of one predictor, and whether it is believed."""

    __slots__ = ("_counts", "broken", "issued", "name", "nbytes", "out", "trust")

    def __init__(self, name: str, trust: Trust) -> None:
        self.name = name
        self.trust = trust
        self.broken = ""
        self.issued = self.out = self.nbytes = 0
        self._counts = {"used": 0, "late": 0, "wasted": 0, "refused": 0}

    def issue(self, nbytes: int) -> None:
        """Count one part that is granted."""
        self.issued += 1
        self.out += 1
        self.nbytes += nbytes

    def close(self, outcome: str, plan: int, now: float) -> None:
        """Count what became of one part: ``used``, ``late``, ``wasted`` or ``refused``."""
        self._counts[outcome] += 1
        self.out -= 1
        if outcome != "refused":
            self.trust.note(plan, right=outcome != "wasted", now=now)

    def figures(self, now: float) -> PrefetchFigures:
        """Snapshot."""
        return PrefetchFigures(
            name=self.name,
            issued=self.issued,
            out=self.out,
            nbytes=self.nbytes,
            enabled=self.trust.on(now) and not self.broken,
            times_off=self.trust.times_off,
            broken=self.broken,
            **self._counts,
        )
