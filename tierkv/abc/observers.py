"""Who hears what the engine did."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Observer"]


class Observer(ABC):
    """Hears what the engine did. Called on the loop: must be quick, must not raise."""

    @abstractmethod
    def lookup(
        self,
        *,
        requested: int,
        reusable: int,
        matched: int,
        by_tier: dict[str, int],
        reason: str | None,
    ) -> None:
        """One match.

        Args:
            requested: Tokens of the prompt.
            reusable: Those that the session had shown before, in whole blocks.
            matched: Those of the loadable prefix.
            by_tier: Matched tokens by tier.
            reason: Why the prefix is not longer (a MissReason value), or None.
        """

    @abstractmethod
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
        """One backend batch; direction is ``"read"``, ``"write"`` or ``"delete"``."""

    @abstractmethod
    def evicted(self, *, tier: str, reason: str, nbytes: int) -> None:
        """One part left a tier."""

    @abstractmethod
    def corrupted(self, *, tier: str, kind: str) -> None:
        """A copy was found damaged and dropped."""

    @abstractmethod
    def skipped(self, *, tier: str, reason: str, parts: int) -> None:
        """Parts that a store did not put into a tier."""

    @abstractmethod
    def operation(self, *, op: str, tier: str, seconds: float) -> None:
        """A user-visible operation (``"match"``, ``"load"``, ``"store"``, ...) ended."""

    @abstractmethod
    def loop_lag(self, *, seconds: float) -> None:
        """How late the event loop ran a timer."""

    @abstractmethod
    def restarted(self, *, worker: str) -> None:
        """A background worker failed and was restarted."""

    def breaker(self, *, tier: str, to: str) -> None:  # noqa: B027 - not everybody asks for it
        """The breaker of a tier changed: to ``"open"``, ``"half_open"`` or ``"closed"``."""

    def recoded(  # noqa: B027
        self, *, tier: str, chain: str, result: str, saved: int, refused: int
    ) -> None:
        """A copy was looked at for conversion to another codec chain where it is.

        Args:
            tier: Where.
            chain: The chain that it was due for.
            result: ``"converted"``, ``"kept"`` (it would not become smaller), ``"put_off"`` (it
                was in use, or there was no room) or ``"failed"``.
            saved: Bytes that the tier got back.
            refused: Sections that the codec refused (NaN, infinities): they stay lossless.
        """

    def saved(self, *, seconds: float) -> None:  # noqa: B027 - not everybody asks for it
        """A load saved so many seconds of prefill, beyond its own time; only where known."""
