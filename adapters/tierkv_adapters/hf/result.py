"""How a model that is attached is doing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Status"]


@dataclass(frozen=True, slots=True)
class Status:
    """How an attachment is doing.

    Attributes:
        attached: Whether it takes requests.
        requests_seen: Requests begun.
        blocks_stored: Blocks put into the store.
        blocks_reused: Blocks loaded instead of computed.
        restores_failed: Loads that failed and were recomputed.
        stores_failed: Replies whose KV could not be stored because the store failed.
        reason: Why nothing was stored or nothing reused; None if both happened.
    """

    attached: bool
    requests_seen: int
    blocks_stored: int
    blocks_reused: int
    restores_failed: int
    stores_failed: int
    reason: str | None
