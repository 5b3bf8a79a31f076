"""Lanes: whose threads a piece of work takes.

A lane follows the job: what a background job hands to worker threads (through a backend, too) runs
on threads that no reader needs, so that slow or hanging writes never keep a read from starting.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import Enum

__all__ = ["Lane", "current_lane", "enter_lane"]


class Lane(Enum):
    """Kinds of work, the most urgent first."""

    DEMAND = "demand"  # somebody waits for it
    BACKGROUND = "background"  # write-behind, demotion
    PREFETCH = "prefetch"  # worth having, wanted by nobody yet

    def threads(self, most: int) -> int:
        """How many of ``most`` worker threads this lane may have, beside those of the others."""
        return most if self is Lane.DEMAND else max(1, most // 2)


_lane: ContextVar[Lane] = ContextVar("tierkv_lane", default=Lane.DEMAND)


def current_lane() -> Lane:
    """The lane of the task (or worker call) that asks."""
    return _lane.get()


def enter_lane(lane: Lane) -> None:
    """Put the running task, and every job that it starts, into a lane."""
    _lane.set(lane)
