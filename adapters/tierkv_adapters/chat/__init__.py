"""Turns of a conversation, for handles over any engine: prompts joined by ids, and replies."""

from __future__ import annotations

from tierkv_adapters.chat.prompts import Deltas, encode_prompt
from tierkv_adapters.chat.result import GenerateResult, Token

__all__ = ["Deltas", "GenerateResult", "Token", "encode_prompt"]
