"""A look at vLLM's engines, whichever of its three classes one has: what they are made with."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from tierkv.errors import AttachError
from tierkv_adapters.vllm.plugin import CONNECTOR

__all__ = ["Transfer", "is_async", "is_engine", "sockets_of", "transfer_of", "vllm_config_of"]


class Transfer(NamedTuple):
    """Where a configuration names our connector.

    Attributes:
        name: The connector that it names at the top; None: none at all.
        extra: Settings of ours; None: it does not name ours.
    """

    name: str | None
    extra: dict[str, Any] | None


def is_engine(target: object) -> bool:
    """Whether this is a built ``LLM``, ``LLMEngine`` or ``AsyncLLM``."""
    return hasattr(target, "llm_engine") or hasattr(target, "vllm_config")


def is_async(engine: object) -> bool:
    """Whether an engine is asynchronous (``AsyncLLM``)."""
    return inspect.isasyncgenfunction(getattr(type(engine), "generate", None))


def vllm_config_of(engine: Any) -> Any:
    """The configuration of a built engine.

    Raises:
        AttachError: if this is no engine of vLLM.
    """
    config = getattr(getattr(engine, "llm_engine", engine), "vllm_config", None)
    if config is None:
        raise AttachError(
            f"an LLM, LLMEngine or AsyncLLM of vLLM is expected, not {type(engine).__name__}"
        )
    return config


def transfer_of(transfer: Any) -> Transfer:
    """Find our connector in a ``KVTransferConfig``, or in a mapping of its fields."""
    if transfer is None:
        return Transfer(None, None)
    name = _get(transfer, "kv_connector")
    extra = dict(_get(transfer, "kv_connector_extra_config") or {})
    if name == CONNECTOR:
        return Transfer(name, extra)
    for child in extra.get("connectors") or ():
        if _get(child, "kv_connector") == CONNECTOR:
            return Transfer(name, dict(_get(child, "kv_connector_extra_config") or {}))
    return Transfer(name, None)


def sockets_of(folder: str, workers: int) -> list[str]:
    """Sockets of the ranks in their folder, the first rank's first."""
    return [os.path.join(folder, f"rank{number}.sock") for number in range(workers)]


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
