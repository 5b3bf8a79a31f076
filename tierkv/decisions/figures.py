"""Reading a decision object: figures, states, and the check of every internal invariant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.decisions.checking import check
from tierkv.decisions.index import EXACT, NO_ROW
from tierkv.decisions.types import MissReason, PartState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tierkv.blocks import PartId
    from tierkv.decisions.guarding import Promotions
    from tierkv.decisions.matching import Matcher
    from tierkv.decisions.placement import Placement
    from tierkv.decisions.storing import Storer

__all__ = ["Figures"]


class Figures:
    """The reading half of :class:`~tierkv.decisions.core.Decisions`; nothing here is logged."""

    _at: Placement
    _matcher: Matcher
    _storer: Storer

    def used(self, tier: int) -> int:
        """Bytes of resident copies in a tier, with those whose drop waits for a lease."""
        return self._at.ledger.used[tier]

    def reserved(self, tier: int) -> int:
        """Bytes set aside in a tier for copies being written."""
        return self._at.ledger.reserved[tier]

    def capacity(self, tier: int) -> int:
        """Bytes that a tier may use."""
        return self._at.ledger.capacity[tier]

    def entries(self, tier: int) -> int:
        """Resident copies in a tier."""
        return self._at.ledger.entries[tier]

    def leases(self) -> int:
        """Leases that have not been released; 0 at rest."""
        return self._matcher.leases()

    def tenant_bytes(self, tenant: str, tier: int) -> int:
        """Bytes that a tenant uses in a tier, those being written included."""
        number = self._at.ledger.tenants.get(tenant)
        return 0 if number is None else self._at.ledger.usage(number, tier)

    def session_bytes(self, parts: Iterable[PartId]) -> int:
        """Bytes of a session's parts over all tiers, each part counted once a tier."""
        index = self._at.index
        rows = {index.rows.get(part, NO_ROW) for part in parts} - {NO_ROW}
        return sum(
            charge[row]
            for row in rows
            for tier, charge in enumerate(index.charge)
            if index.resident[row] >> tier & 1
        )

    def promotions(self, tier: int) -> Promotions:
        """What became of the parts that were promoted into a tier on a hit."""
        return self._at.guards[tier].figures()

    def parts(self, tier: int) -> Iterator[tuple[PartId, int, int]]:
        """Each resident copy of a tier: part, generation, bytes. Slow; for tests and people."""
        index = self._at.index
        for part, row in index.rows.items():
            if index.resident[row] >> tier & 1:
                yield part, index.generation[row], index.charge[tier][row]

    def known(self) -> list[PartId]:
        """Every part that has, gets or is missed as a link between copies. A quick snapshot."""
        return list(self._at.index.rows)

    def watch(self, moved: Callable[[PartId | None], object] | None) -> None:
        """Tell ``moved`` of each part of which a copy comes or goes; None: nobody any more.

        Called amid a decision: it may only take a note, and look (:meth:`residency`) later. Told
        None, it has to look at every part: tiers became readable, or ceased to be.
        """
        self._at.moved = moved

    def residency(self, parts: Iterable[PartId]) -> list[tuple[PartId, int]]:
        """Each part, and the tiers, one bit each, with a copy that a lookup may count on now."""
        index, readable = self._at.index, self._at.readable
        rows, resident = index.rows, index.resident
        return [
            (part, resident[row] & readable if (row := rows.get(part, NO_ROW)) >= 0 else 0)
            for part in parts
        ]

    def resident(self, first: int, rows: int) -> tuple[list[tuple[PartId, int]], bool]:
        """As :meth:`residency`, for all parts in so many rows of the index that have a copy.

        Args:
            first: Number of the first row.
            rows: How many rows to look at. A part may move between rows from one call to the
                next only by leaving and coming back, of which :meth:`watch` tells.

        Returns:
            What was found, and whether these were the last rows.
        """
        index, readable = self._at.index, self._at.readable
        stop = min(first + rows, index.size)
        held = enumerate(index.resident[first:stop], first)  # 0 where the row is no part's
        return [(index.name(row), mask & readable) for row, mask in held if mask], (
            stop == index.size
        )

    def has(self, part: PartId, tier: int) -> bool:
        """Whether a tier holds a copy of a part, of whatever age. Renews nothing."""
        row = self._at.index.rows.get(part, NO_ROW)
        return row >= 0 and bool(self._at.index.resident[row] >> tier & 1)

    def state(self, part: PartId, now: float) -> PartState:
        """Where a part is, or why it is nowhere. Renews nothing."""
        at, index = self._at, self._at.index
        row = index.rows.get(part, NO_ROW)
        resident = pending = 0
        leases, exact = 0, True
        if row >= 0:
            leases = at.busy.get(row, 0) - at.holds.get(row, 0)
            pending = index.pending[row]
            if index.resident[row] and index.expiry[row] > now:
                resident = index.resident[row]
                exact = bool(index.flags[row] & EXACT)
        tiers = tuple(t for t in at.tiers if resident >> t & 1)
        writing = tuple(t for t in at.tiers if pending >> t & 1)
        if tiers:
            lossless = tuple(bool(index.lossless[row] >> t & 1) for t in tiers)
            nbytes = tuple(index.charge[t][row] for t in tiers)
            return PartState(tiers, writing, leases, index.generation[row], exact, lossless, nbytes)
        reason = self._matcher.why(part, lossy=True, now=now)
        gone = at.history.get(part)
        if gone is None or gone.reason is not reason:
            ago = None
            if reason is MissReason.EXPIRED and row >= 0:
                ago = now - index.expiry[row]
            return PartState((), writing, leases, reason=reason, ago=ago)
        return PartState((), writing, leases, reason=reason, tier=gone.tier, ago=now - gone.time)

    def check(self) -> None:
        """Check every internal invariant, in O(parts).

        Raises:
            AssertionError: if one is broken; the message says which.
        """
        check(self._at, self._matcher, self._storer)
