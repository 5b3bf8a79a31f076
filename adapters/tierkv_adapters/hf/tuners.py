"""Adapters inside a model (LoRA and its kin), read by PEFT's conventions without importing PEFT.

A wrapped layer (PEFT's ``BaseTunerLayer`` and ``ModulesToSaveWrapper``) names in
``adapter_layer_names`` and ``other_param_names`` the attributes that hold something per adapter.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tierkv.errors import AttachError
from tierkv_adapters.hf.compat import base_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Tuner", "adapter_config", "is_prompt_learning", "tuners"]

# where an adapter came from; its weights and other settings are read
_IGNORED_CONFIG = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
    }
)


class Tuner(NamedTuple):
    """One wrapped layer.

    Attributes:
        path: Where it is in the model.
        layer: The layer.
        active: Adapters that take part in its forward pass beside its base weights.
        merged: Adapters that were added into its base weights.
    """

    path: str
    layer: Any
    active: tuple[str, ...]
    merged: tuple[str, ...]

    def owned(self) -> Iterator[tuple[str, str]]:
        """Pairs (path in the model, adapter) of what belongs to one adapter."""
        for name, holder in _holders(self.layer):
            if isinstance(holder, torch.nn.Module):
                yield from ((f"{self.path}.{name}.{adapter}", adapter) for adapter in _keys(holder))

    def settings(self, adapter: str) -> Iterator[tuple[str, Any]]:
        """Numbers, texts and tensors outside the weights that an adapter depends on here."""
        for name, holder in _holders(self.layer):
            if isinstance(holder, torch.nn.Module) or adapter not in holder:
                continue
            value = holder[adapter]
            if isinstance(value, str | int | float | bool | torch.Tensor | None):
                yield f"{self.path}.{name}", value

    def scale(self, adapter: str) -> float | None:
        """Factor with which the adapter is applied, where it has one."""
        value = getattr(self.layer, "scaling", {}).get(adapter)
        return None if value is None else float(value)


def tuners(model: Any) -> list[Tuner]:
    """Every wrapped layer of a model, in its order.

    Raises:
        AttachError: if adapters are merged and disabled at once: the next forward pass would take
            them out of the weights again.
    """
    return [
        _read(path, module)
        for path, module in base_model(model).named_modules()
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters")
    ]


def _read(path: str, layer: Any) -> Tuner:
    chosen = layer.active_adapters
    chosen = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    merged = tuple(getattr(layer, "merged_adapters", ()))
    if not merged and getattr(layer, "merged", False):
        merged = chosen
    disabled = bool(getattr(layer, "disable_adapters", False))
    if merged and disabled:
        raise AttachError(
            f"adapters {list(merged)} are merged into {path} and disabled at once: unmerge them"
        )
    held = {adapter for _, holder in _holders(layer) for adapter in _keys(holder)}
    active = () if merged or disabled else tuple(name for name in chosen if name in held)
    return Tuner(path, layer, active, merged)


def _keys(holder: Any) -> tuple[str, ...]:
    return tuple(holder.keys())


def _holders(layer: Any) -> Iterator[tuple[str, Any]]:
    for name in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
        try:
            holder = attrgetter(name)(layer)
        except AttributeError:  # optional parts, e.g. those of an embedding
            continue
        if hasattr(holder, "keys"):
            yield name, holder


def adapter_config(model: Any, adapter: str) -> dict[str, Any]:
    """Settings of an adapter as PEFT keeps them for the whole model; empty without PEFT."""
    config = _configs(model).get(adapter)
    values = {} if config is None else config.to_dict()
    return {name: value for name, value in values.items() if name not in _IGNORED_CONFIG}


def is_prompt_learning(model: Any) -> bool:
    """Whether a wrapper puts virtual tokens in front of each prompt."""
    return any(getattr(config, "is_prompt_learning", False) for config in _configs(model).values())


def _configs(model: Any) -> dict[str, Any]:
    for owner in (model, base_model(model)):
        configs = getattr(owner, "peft_config", None)
        if isinstance(configs, dict):
            return configs
    return {}
