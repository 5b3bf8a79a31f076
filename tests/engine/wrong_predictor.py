"""Predictors that no engine should suffer from."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Arrival, Departure, Predictor, Wish

__all__ = ["Raising"]


class Raising(Predictor):
    """Fails whenever a request comes in."""

    name: ClassVar[str] = "raising"

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        raise RuntimeError("a plug-in's fault")

    def ended(self, event: Departure, now: float) -> list[Wish]:
        return []
