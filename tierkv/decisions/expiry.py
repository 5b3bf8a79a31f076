"""Which rows may have expired: a calendar of time slots, four bytes a row with a TTL."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from math import ceil
from typing import Final

__all__ = ["Calendar"]

_SLOTS_PER_SECOND: Final = 4


class Calendar:
    """Hands out rows when their time has come; the expiry column tells whether it still holds.

    An entry is a hint: the row may have been given a later time, or stand for another part by
    now. Whoever takes it looks, and adds it again if it is due later.
    """

    __slots__ = ("_order", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []

    def add(self, row: int, when: float) -> None:
        """Look at ``row`` at time ``when`` (up to a quarter of a second later)."""
        number = ceil(when * _SLOTS_PER_SECOND)
        rows = self._slots.get(number)
        if rows is None:
            rows = self._slots[number] = array("i")
            heappush(self._order, number)
        rows.append(row)

    def due(self, now: float, limit: int) -> list[int]:
        """Take at most ``limit`` rows whose time has come."""
        taken: list[int] = []
        while self._order and len(taken) < limit and self._order[0] <= now * _SLOTS_PER_SECOND:
            rows = self._slots[self._order[0]]
            room = limit - len(taken)
            taken.extend(rows[-room:])
            del rows[-room:]
            if not rows:
                del self._slots[heappop(self._order)]
        return taken
