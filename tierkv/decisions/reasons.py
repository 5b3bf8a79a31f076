"""Which copies of a part will do for a lookup, and why it is a miss if none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.index import EXACT, NO_ROW
from tierkv.decisions.types import MissReason

if TYPE_CHECKING:
    from tierkv.blocks import PartId
    from tierkv.decisions.placement import Placement

__all__ = ["Reasons"]


class Reasons:
    """Tells what lookups find of a part, and why they end where they do."""

    __slots__ = ("_at",)

    def __init__(self, placement: Placement) -> None:
        self._at = placement

    def why(self, part: bytes, lossy: bool, now: float) -> MissReason:
        """Say why a part is a miss."""
        index = self._at.index
        name: PartId = part  # type: ignore[assignment]
        row = index.rows.get(name, NO_ROW)
        if row >= 0 and index.resident[row]:
            if index.expiry[row] <= now:
                return MissReason.EXPIRED
            fine = self._fine(row, lossy)
            if fine and not fine & self._at.readable:
                return MissReason.FAILED  # the breaker of its tier is open
            if not lossy:
                return MissReason.FIDELITY
        if row >= 0 and index.pending[row]:
            return MissReason.PENDING
        gone = self._at.history.get(name)
        if gone is not None:
            return gone.reason
        return MissReason.HOLE if row >= 0 else MissReason.NEVER_STORED

    def _fine(self, row: int, lossy: bool) -> int:
        """Tiers whose copy of a resident row would do."""
        index = self._at.index
        if lossy:
            return index.resident[row]
        return index.resident[row] & index.lossless[row] if index.flags[row] & EXACT else 0

    def _copies(self, name: bytes, tiers: int, *, lossy: bool, now: float) -> tuple[int, int]:
        """Row of a part, and a bit for each tier whose copy will do."""
        index = self._at.index
        row = index.rows.get(name, NO_ROW)  # type: ignore[call-overload]
        if row < 0 or index.expiry[row] <= now:
            return row, 0
        return row, self._fine(row, lossy) & self._at.readable & tiers
