"""What orders the parts that may be evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

__all__ = ["Policy"]


class Policy(ABC):
    """Orders the evictable parts of one tier (one partition of it). Sans-IO.

    Parts are dense row numbers. ``clock`` counts accesses, not seconds. A row is *tracked* from
    :meth:`insert` to :meth:`remove`; it is *evictable* only between :meth:`release` and
    :meth:`hold` (the core holds rows that are leased or have children). Every call is O(log n) or
    better; victims come from evictable rows alone, so held rows cost nothing.

    Row numbers are recycled, so a policy that remembers what left (a *ghost*) remembers the
    part's ``ident``. It may keep at most one ghost a tracked row, of 64 bytes at most.
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(self, row: int, nbytes: int, clock: int, ident: int = 0) -> None:
        """Start tracking a row that became resident (held).

        Args:
            row: Number of the row; not tracked now.
            nbytes: Bytes that the copy takes in the tier.
            clock: Accesses so far.
            ident: 64 bits that name the part for good; 0 if nobody asks for ghosts.
        """

    @abstractmethod
    def touch(self, row: int, clock: int) -> None:
        """Note an access of a tracked row."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Make a tracked row evictable. Idempotent."""

    @abstractmethod
    def hold(self, row: int) -> None:
        """Make a tracked row not evictable. Idempotent."""

    @abstractmethod
    def remove(self, row: int, *, evicted: bool = False, ident: int = 0) -> None:
        """Stop tracking a row.

        Args:
            row: A tracked row.
            evicted: It left for want of room, so that its return would be a miss of this
                policy's making: only then may it leave a ghost.
            ident: As at :meth:`insert`, so that no policy needs to keep it. Without it there
                is no ghost; who did not evict the row may leave it out.
        """

    @abstractmethod
    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable (its prefix is gone)."""

    @abstractmethod
    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None.

        Asking again gives the same answer. It may put queues in order (S3-FIFO passes over rows
        that were used): ask only where the answer is used.
        """

    @abstractmethod
    def rank(self, row: int) -> float:
        """Comparable worth of a tracked row across partitions; the smallest goes first."""

    def resize(self, capacity_parts: float) -> None:  # noqa: B027 - optional, most need none
        """Learn how many mean-sized parts the tier holds (half-lives, ghost sizes)."""

    def shift(self, row: int, accesses: float) -> None:  # noqa: B027 - only recency listens
        """Take a tracked row's last use to lie so many accesses later (negative: earlier).

        A session's hint. The next :meth:`touch` undoes it. Ignored by default, and by policies
        in whose order the time of the last use has no part.
        """

    def resized(self, row: int, nbytes: int) -> None:  # noqa: B027 - only who weighs bytes listens
        """Learn that a tracked row takes other bytes now: it was compressed where it is."""

    def score(self, row: int, value: float) -> None:  # noqa: B027 - only importance listens
        """Learn how important a tracked row is, from 0 to 1. Ignored by default."""
