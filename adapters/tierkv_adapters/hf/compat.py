"""What differs between the versions of Transformers (4.57 and newer), in one place.

===============================  ==================  =================
fact                             4.57                5.24
===============================  ==================  =================
keyword of ``forward``           past_key_values     cache
``crop`` with a positive number  absolute length     refused
===============================  ==================  =================

The remaining differences (signatures of ``lazy_initialization`` and ``get_mask_sizes``) are
avoided by never overriding or calling those methods.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from tierkv.errors import AttachError, MissingDependencyError

try:
    import transformers
    from transformers.cache_utils import DynamicLayer
except ImportError as error:  # pragma: no cover - depends on the environment
    raise MissingDependencyError(
        "tierkv_adapters.hf needs Transformers 4.57 or newer: "
        "pip install -c constraints.txt -e '.[hf]'"
    ) from error

if TYPE_CHECKING:
    import torch

__all__ = [
    "base_model",
    "cache_keyword",
    "crop_is_absolute",
    "input_device",
    "text_config",
    "vocabulary_size",
]

_OLDEST = (4, 57)


def _check_version() -> None:
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < _OLDEST:
        raise AttachError(
            f"Transformers {transformers.__version__} is too old for tierkv_adapters.hf: "
            "install 4.57 or newer"
        )


def base_model(model: Any) -> Any:
    """Return the Transformers model inside a PEFT-like wrapper, or ``model`` itself."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def cache_keyword(model: Any) -> str:
    """Return the keyword under which ``forward`` and ``generate`` take a cache object.

    Raises:
        AttachError: if the model takes none, or Transformers is too old.
    """
    _check_version()
    parameters = inspect.signature(base_model(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise AttachError(
        f"{type(base_model(model)).__name__}.forward takes neither 'cache' nor 'past_key_values': "
        "this model keeps no KV cache that could be stored"
    )


@cache
def crop_is_absolute() -> bool:
    """Whether ``crop(n)`` with n >= 0 means "keep n tokens" in this version of Transformers."""
    return "max_length" in inspect.signature(DynamicLayer.crop).parameters


def text_config(model: Any) -> Any:
    """Return the configuration of the decoder that owns the KV cache."""
    return base_model(model).config.get_text_config(decoder=True)


def input_device(model: Any) -> torch.device:
    """Return the device on which the model takes token ids."""
    device: torch.device = base_model(model).get_input_embeddings().weight.device
    return device


def vocabulary_size(model: Any) -> int:
    """Return how many token ids the model has an embedding for."""
    rows: int = base_model(model).get_input_embeddings().weight.shape[0]
    return rows
