"""What a manager asks of an engine that lives in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import Media
    from tierkv.engine import EngineStats
    from tierkv.layout import Space
    from tierkv.session import BlockReport, FlushResult, SessionInfo

__all__ = ["Elsewhere"]


class Elsewhere(Protocol):
    """An engine in another process, to which a manager was handed over.

    Each call does what the manager's own of that name does, with the same errors;
    :class:`~tierkv.errors.ClosedError` if that engine is gone. Thread-safe.
    """

    @property
    def where(self) -> str:
        """Where it is, for messages."""

    def create_session(
        self,
        name: str | None = None,
        *,
        tenant: str = "",
        ttl: float | str | None = None,
        fidelity: str | None = None,
        salt: bytes = b"",
        adopt: bool = False,
    ) -> str:
        """As a manager's; ``adopt``: one that is there already, opened alike, is welcome."""

    def knows_session(self, name: str) -> bool:
        """Whether there is a session of this name."""

    def clear_session(self, name: str) -> None:
        """As a manager's."""

    def destroy_session(self, name: str) -> None:
        """As a manager's: it never raises and never blocks."""

    def sessions(self) -> list[SessionInfo]:
        """As a manager's."""

    def stats(self) -> EngineStats:
        """As a manager's."""

    def flush(self) -> FlushResult:
        """As a manager's."""

    def reset(self) -> int:
        """As a manager's."""

    def explain(
        self,
        token_ids: Sequence[int],
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> list[BlockReport]:
        """As a manager's."""

    def prefetch(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        session: str | None = None,
        space: Space | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """As a manager's."""

    def hint(
        self,
        *,
        next_in: float | str | None = None,
        stop_reason: str | None = None,
        session: str | None = None,
        space: Space | None = None,
    ) -> None:
        """As a manager's."""

    def close(self) -> None:
        """End the connection; that engine goes on. Idempotent."""
