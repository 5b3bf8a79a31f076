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
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(self, row: int, nbytes: int, clock: int) -> None:
        """Start tracking a row that became resident (held)."""

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
    def remove(self, row: int) -> None:
        """Stop tracking a row."""

    @abstractmethod
    def expedite(self, row: int) -> None:
        """Make a tracked row the next victim once evictable (its prefix is gone)."""

    @abstractmethod
    def victim(self) -> int | None:
        """Return the evictable row to evict next, or None; changes nothing."""

    @abstractmethod
    def rank(self, row: int) -> float:
        """Comparable worth of a tracked row across partitions; the smallest goes first."""

    def resize(self, capacity_parts: float) -> None:  # noqa: B027 - optional, most need none
        """Learn how many mean-sized parts the tier holds (half-lives, ghost sizes)."""
