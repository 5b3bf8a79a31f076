"""When a store has read the caller's memory for the last time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["LastRead"]

_log = logging.getLogger("tierkv")


class LastRead:
    """Tells, once, that no thread and no device reads the caller's memory any more.

    Args:
        told: Who wants to know; what one of them raises is logged.

    Attributes:
        wanted: Whether anybody wants to know it.
        again: Whether what stays behind for want of a parent is read once more after this store.
        over: Whether it was told: nothing may read the memory then.
    """

    def __init__(self, told: Iterable[Callable[[], object]] = ()) -> None:
        self._told = tuple(told)
        self.wanted = bool(self._told)
        self.again = True
        self.over = False

    def tell(self) -> None:
        """Tell it; later calls do nothing."""
        if self.over:
            return
        self.over = True
        for each in self._told:
            try:
                each()
            except Exception:  # noqa: BLE001 - a store must not fail by who hears of it
                _log.exception("%r, told that a store has read its view, raised", each)
