"""A log that one cause cannot flood."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["LimitedLog"]


class LimitedLog:
    """Logs the first warning of each kind at once, and then at most one in a while. Thread-safe.

    Args:
        log: Where to.
        every: Seconds between two lines of one kind.
        clock: Tells the time.
    """

    def __init__(
        self,
        log: logging.Logger,
        every: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._every = every
        self._clock = clock
        self._guard = threading.Lock()
        self._next: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warning(self, kind: str, text: str) -> None:
        """Log a line, or count it for the next one of its kind.

        Args:
            kind: What happened, one of few.
            text: The line.
        """
        now = self._clock()
        with self._guard:
            if now < self._next.get(kind, now):
                self._held[kind] = self._held.get(kind, 0) + 1
                return
            self._next[kind] = now + self._every
            held = self._held.pop(kind, 0)
        self._log.warning("%s: %s%s", kind, text, f" ({held} more like it)" if held else "")
