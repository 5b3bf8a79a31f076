"""What a handle gives back for a prompt, whatever engine answered it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GenerateResult", "Token"]


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


class Token(NamedTuple):
    """One token of a stream; ``text`` is empty while a character is incomplete."""

    id: int
    text: str
