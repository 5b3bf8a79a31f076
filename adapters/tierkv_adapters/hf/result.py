"""What an attached model gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GenerateResult", "Status", "Token"]


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One reply.

    Attributes:
        text: The reply as text, without special tokens; None without a tokenizer.
        input_ids: Ids of the whole prompt, the session's history included.
        output_ids: Prompt and reply.
        prompt_tokens: Length of ``input_ids``.
        reused_tokens: Leading prompt tokens whose KV was loaded instead of computed.
        tier: Slowest tier used; None if nothing was reused.
        by_tier: Reused tokens by tier.
        ttft_s: Seconds from the call to the first new token.
    """

    text: str | None
    input_ids: list[int]
    output_ids: list[int]
    prompt_tokens: int
    reused_tokens: int
    tier: str | None
    by_tier: dict[str, int]
    ttft_s: float


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


class Token(NamedTuple):
    """One token of a stream; ``text`` is empty while a character is incomplete."""

    id: int
    text: str
