"""Queue-time prefetch: load what a request needs while it waits for its turn."""

from __future__ import annotations

from typing import ClassVar

from tierkv.abc import Arrival, Departure, Predictor, Wish

__all__ = ["AtArrival"]


class AtArrival(Predictor):
    """Wishes for the prompt of each request that comes in. It guesses nothing.

    The gain is the time that the request waits before it is served: on the conversation trace
    of Mooncake (FAST'25) most of the time that requests wait for their KV. HiCache (SGLang) and
    FlexKV prefetch at that moment, too. No memory.
    """

    name: ClassVar[str] = "arrival"
    asked: ClassVar[bool] = True

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        """Wish for all of it."""
        return [Wish(event.keys)] if event.keys else []

    def ended(self, event: Departure, now: float) -> list[Wish]:
        """Nothing to say."""
        return []
