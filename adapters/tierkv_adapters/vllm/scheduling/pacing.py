"""How long prefill takes, by the times of vLLM's own steps; the cost model wants to know."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["LEAST", "Pacing"]

LEAST = 256
"""Prefill tokens of a step that is worth a sample; smaller ones say more of overheads."""
_MOSTLY = 0.75


class _Step(NamedTuple):
    prefill: int
    tokens: int
    began: float


class Pacing:
    """Pairs steps that were handed out with their ends. Pure: the caller tells the time.

    A step lasts from when it was handed out, or from the end of the one before it if that came
    later (steps overlap in vLLM's asynchronous scheduling), to its own end; time in which the
    engine had nothing to do is in none.

    Args:
        depth: Steps that may be under way at once; ends that are not told of are caught up with.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._steps: deque[_Step] = deque()
        self._ended = float("-inf")
        self._speed: tuple[int, float] | None = None

    def step(self, prefill: int, tokens: int, now: float) -> tuple[int, float] | None:
        """A step is handed out.

        Args:
            prefill: Tokens of prompts in it.
            tokens: All tokens in it.
            now: The time.

        Returns:
            (tokens, seconds) of a step that was mostly prefill and has ended since the last call.
        """
        self._steps.append(_Step(prefill, tokens, now))
        speed, self._speed = self._speed, None
        return speed

    def done(self, now: float) -> None:
        """The oldest step under way has ended."""
        while len(self._steps) > self._depth:
            self._steps.popleft()
        if self._steps:
            step = self._steps.popleft()
            seconds = now - max(step.began, self._ended)
            if step.prefill >= LEAST and step.prefill >= _MOSTLY * step.tokens and seconds > 0:
                self._speed = step.prefill, seconds
        self._ended = now
