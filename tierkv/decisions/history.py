"""Why parts are gone: a bounded memory for ``explain`` and for the reasons of misses."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.decisions.types import EvictReason, MissReason

if TYPE_CHECKING:
    from tierkv.blocks import PartId

__all__ = ["MISS_OF_EVICTION", "Departure", "History"]

MISS_OF_EVICTION: Final = {
    EvictReason.CAPACITY: MissReason.EVICTED,
    EvictReason.QUOTA: MissReason.QUOTA,
    EvictReason.EXPIRED: MissReason.EXPIRED,
    EvictReason.DEMOTED: MissReason.EVICTED,
    EvictReason.DAMAGED: MissReason.DAMAGED,
    EvictReason.FAILED: MissReason.FAILED,
    EvictReason.REPLACED: MissReason.EVICTED,
    EvictReason.REMOVED: MissReason.REMOVED,
    EvictReason.ORPHANED: MissReason.EVICTED,
    EvictReason.SHRUNK: MissReason.EVICTED,
}
"""What a lookup says of a part whose last copy left for a reason."""

_REASONS: Final = tuple(MissReason)
_NUMBER: Final = {reason: number for number, reason in enumerate(_REASONS)}

_EVICTED: Final = _NUMBER[MissReason.EVICTED]


class Departure(NamedTuple):
    """Why, from which tier and when a part's last copy left (or why it was not stored)."""

    reason: MissReason
    tier: int
    time: float


class History:
    """Ring of the last ``limit`` departures; an older one is forgotten first.

    Attributes:
        limit: Most departures that are remembered; 0: none are.
    """

    __slots__ = ("_next", "_parts", "_slots", "_time", "_why", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = max(0, limit)
        self._next = 0
        self._parts: list[PartId] = []
        self._slots: dict[PartId, int] = {}
        self._why = bytearray()  # reason << 3 | tier
        self._time = array("d")

    def __len__(self) -> int:
        return len(self._slots)

    def note(self, part: PartId, reason: MissReason, tier: int, now: float) -> None:
        """Remember why a part is not there."""
        if not self.limit:
            return
        slot, parts, slots = self._next, self._parts, self._slots
        self._next = slot + 1 if slot + 1 < self.limit else 0
        if slot == len(parts):
            parts.append(part)
            self._why.append(0)
            self._time.append(0.0)
        else:
            older = parts[slot]
            if slots.get(older) == slot:
                del slots[older]
            parts[slot] = part
        number = _EVICTED if reason is MissReason.EVICTED else _NUMBER[reason]
        self._why[slot] = number << 3 | tier
        self._time[slot] = now
        slots[part] = slot

    def get(self, part: PartId) -> Departure | None:
        """Last departure of a part, if it is remembered."""
        slot = self._slots.get(part)
        if slot is None:
            return None
        return Departure(_REASONS[self._why[slot] >> 3], self._why[slot] & 7, self._time[slot])
