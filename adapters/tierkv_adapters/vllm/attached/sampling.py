"""Arguments of ``generate`` as ``SamplingParams``; Transformers' names of the usual ones work too.

The same script then runs over both engines.
"""

from __future__ import annotations

import importlib
from typing import Any

from tierkv.errors import AttachError

__all__ = ["prompt_of", "sampling_params", "translated"]

_MULTIPLE = ("n", "best_of", "num_return_sequences")


def sampling_params(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Make the parameters of one request.

    Args:
        arguments: Fields of ``SamplingParams``, or of Transformers' ``generate``:
            ``max_new_tokens``, ``do_sample``, ``repetition_penalty``.
        ours: What goes into ``kv_transfer_params["tierkv"]``.

    Raises:
        AttachError: for what cannot be served rightly.
    """
    settings = translated(arguments)
    for name in _MULTIPLE:
        if int(settings.pop(name, 1) or 1) > 1:
            raise AttachError(f"{name} > 1 is not supported in a session: one reply per prompt")
    extra = dict(settings.pop("extra_args", None) or {})
    transfer = dict(extra.get("kv_transfer_params") or {})
    # what a caller asks of tierkv himself (a pin, a prefetch) stands beside ours
    transfer["tierkv"] = {**(transfer.get("tierkv") or {}), **ours}
    extra["kv_transfer_params"] = transfer
    module = importlib.import_module("vllm")
    return module.SamplingParams(**settings, extra_args=extra)


def prompt_of(ids: list[int], salt: str | None) -> Any:
    """A prompt of token ids, in the form that this vLLM likes best.

    Args:
        ids: Token ids.
        salt: ``cache_salt``, or None.
    """
    try:
        inputs = importlib.import_module("vllm.inputs.engine")
    except ImportError:  # before 0.30: as a user writes it
        asked: dict[str, Any] = {"prompt_token_ids": ids}
        return asked if salt is None else {**asked, "cache_salt": salt}
    return inputs.tokens_input(ids, cache_salt=salt)


def translated(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by vLLM's names.

    Raises:
        AttachError: if two of them say the same thing.
    """
    settings = dict(arguments)
    if "max_new_tokens" in settings:
        if "max_tokens" in settings:
            raise AttachError("max_tokens and max_new_tokens are the same: give one of them")
        settings["max_tokens"] = settings.pop("max_new_tokens")
    if settings.pop("do_sample", None) is False:
        if settings.get("temperature"):
            raise AttachError("do_sample=False is greedy; temperature has no meaning with it")
        settings["temperature"] = 0.0
    return settings
