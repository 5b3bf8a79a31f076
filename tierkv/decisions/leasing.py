"""Leases by themselves: on one part, and the end of any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.costing import Costed

if TYPE_CHECKING:
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Drop

__all__ = ["Leasing"]


class Leasing(Costed):
    """Leases that are no part of a lookup; quick, for callers who cannot wait."""

    def release(self, lease: int, now: float) -> tuple[Drop, ...]:
        """End a lease. Idempotent.

        Returns:
            Copies that were given up meanwhile and waited for this lease.
        """
        drops = tuple(self._matcher.release(lease))
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
        held = self._matcher.hold(part, lossy, now, tiers)
        if self._log is not None:
            self._record("hold_part", now, (part, lossy, tiers), held)
        return held
