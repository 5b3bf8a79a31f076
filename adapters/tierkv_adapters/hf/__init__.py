"""Hugging Face Transformers: attach a store to a model, without touching the model."""

from __future__ import annotations

from tierkv_adapters.chat.result import GenerateResult, Token
from tierkv_adapters.hf.handle import AsyncHandle, SyncHandle, attach
from tierkv_adapters.hf.result import Status

__all__ = ["AsyncHandle", "GenerateResult", "Status", "SyncHandle", "Token", "attach"]
