"""Leases by themselves: on one part, and the end of any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.costing import Costed
from tierkv.decisions.index import EXACT, NO_ROW

if TYPE_CHECKING:
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Drop

__all__ = ["Leasing"]


class Leasing(Costed):
    """Leases that are no part of a lookup; quick, for callers who cannot wait.

    A part that is looked at in place costs about a microsecond in all, so that a call here costs as
    much as what it does: what others have methods for stands in line. Nearly always somebody
    else has a lease on the part as well, and all that changes is a count.
    """

    def release(self, lease: int, now: float) -> tuple[Drop, ...]:
        """End a lease. Idempotent.

        Returns:
            Copies that were given up meanwhile and waited for this lease.
        """
        row = self._matcher.singles.pop(lease, NO_ROW)
        if row < 0:
            drops = tuple(self._matcher.release(lease))
        else:
            at = self._at
            count = at.busy[row]
            if count > 1:
                at.busy[row] = count - 1
            else:
                at.unpin(row)
            drops = tuple(at.collect()) if at.ready else ()
        if self._log is not None:
            self._record("release", now, (lease,), drops)
        return drops

    def hold_part(
        self, part: PartId, now: float, lossy: bool = False, tiers: int = -1
    ) -> tuple[int, int, int] | None:
        """Lease the fastest readable copy of one part, in O(1); it counts as no use of the part.

        Args:
            part: The part.
            now: Time.
            lossy: Whether a lossy copy will do.
            tiers: Tiers, one bit each, whose copies will do; -1: any.

        Returns:
            The lease, for :meth:`release`, the tier and the generation; None if a lookup would not
            find it.
        """
        at = self._at
        index, held = at.index, None
        row = index.rows.get(part, NO_ROW)
        if row >= 0 and index.expiry[row] > now:
            mask = index.resident[row] & at.readable & tiers
            if not lossy:
                mask = mask & index.lossless[row] if index.flags[row] & EXACT else 0
            if mask:
                if row in at.busy:
                    at.busy[row] += 1
                else:
                    at.pin(row)
                matcher = self._matcher
                matcher.number = number = matcher.number + 1
                matcher.singles[number] = row
                held = number, (mask & -mask).bit_length() - 1, index.generation[row]
        if self._log is not None:
            self._record("hold_part", now, (part, lossy, tiers), held)
        return held
