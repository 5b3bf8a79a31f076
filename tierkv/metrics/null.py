"""The observer of an engine whose metrics are off."""

from __future__ import annotations

from tierkv.abc import Observer

__all__ = ["NullObserver"]


class NullObserver(Observer):
    """Hears everything and keeps nothing."""

    def lookup(
        self,
        *,
        requested: int,
        reusable: int,
        matched: int,
        by_tier: dict[str, int],
        reason: str | None,
    ) -> None:
        """Ignore a match."""

    def io(
        self,
        *,
        tier: str,
        direction: str,
        nbytes: int,
        operations: int,
        seconds: float,
        failed: int,
    ) -> None:
        """Ignore a backend batch."""

    def evicted(self, *, tier: str, reason: str, nbytes: int) -> None:
        """Ignore an eviction."""

    def corrupted(self, *, tier: str, kind: str) -> None:
        """Ignore a damaged copy."""

    def skipped(self, *, tier: str, reason: str, parts: int) -> None:
        """Ignore parts that were not stored."""

    def operation(self, *, op: str, tier: str, seconds: float) -> None:
        """Ignore an operation."""

    def loop_lag(self, *, seconds: float) -> None:
        """Ignore a lag."""

    def restarted(self, *, worker: str) -> None:
        """Ignore a restart."""

    def breaker(self, *, tier: str, to: str) -> None:
        """Ignore a breaker."""

    def saved(self, *, seconds: float) -> None:
        """Ignore what was saved."""
