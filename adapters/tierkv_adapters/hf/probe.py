"""What a live model stores per layer, found by asking it: one forward pass over one token.

Configurations describe KV caches in many dialects (head counts per layer, latent attention that
is stored expanded, device maps). The tensors themselves do not lie.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tierkv.errors import AttachError
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, TensorSpec
from tierkv_adapters.hf.buffer import LayerKV
from tierkv_adapters.hf.compat import base_model, cache_keyword, input_device, text_config
from tierkv_adapters.hf.tuners import is_prompt_learning

__all__ = ["check_supported", "layout_of", "probe_layers"]

# RoPE kinds whose frequencies depend on how long the sequence of the current call is: the KV of a
# prefix is then not a function of the prefix alone, and no two requests could share it safely
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})  # su: longrope's old name


def _rope_kinds(config: Any) -> set[str]:
    """Names of the RoPE variants in use; both the flat and the per-attention-type form."""
    found: set[str] = set()
    for attribute in ("rope_parameters", "rope_scaling"):
        value = getattr(config, attribute, None)
        if isinstance(value, dict):
            for entry in (value, *value.values()):
                if isinstance(entry, dict):
                    found.add(str(entry.get("rope_type", entry.get("type", "default"))))
    return found


def check_supported(model: Any) -> None:
    """Refuse what this adapter would serve wrongly, as far as the configuration tells.

    Raises:
        AttachError: with the reason and what to do.
    """
    inner = base_model(model)
    name = type(inner).__name__
    if not hasattr(inner, "generate") or not hasattr(inner, "config"):
        raise AttachError(f"{name} is not a Transformers model with generate()")
    if getattr(inner.config, "is_encoder_decoder", False):
        raise AttachError(f"{name} is an encoder-decoder model: only decoder-only ones are served")
    if any(module.training for module in inner.modules()):
        raise AttachError(f"{name} is in training mode (dropout changes its KV): call model.eval()")
    if is_prompt_learning(model):
        raise AttachError(
            f"{name} is wrapped for prompt or prefix tuning: its virtual tokens are in no prompt, "
            "so that blocks could not be told apart"
        )
    if int(getattr(inner, "tp_size", None) or 1) > 1:
        raise AttachError(f"{name} is tensor-parallel, which is not supported yet")
    bad = _rope_kinds(text_config(model)) & _LENGTH_DEPENDENT_ROPE
    if bad:
        raise AttachError(
            f"{name} uses RoPE of kind {sorted(bad)}: its keys depend on the length of the whole "
            "request, so a stored prefix would be wrong for another request"
        )
    cache_keyword(model)
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=text_config(model)).layers
    other = {type(layer).__name__ for layer in layers if type(layer) not in plain}
    if other or not layers:
        raise AttachError(
            f"{name} keeps state that is not plain attention KV ({sorted(other) or 'unknown'}): "
            "hybrid, recurrent and KV-sharing models are not supported yet"
        )


@torch.no_grad()
def probe_layers(model: Any) -> tuple[LayerKV, ...]:
    """Return the shape, dtype, device and window of each layer's KV.

    Costs one forward pass over one token.

    Raises:
        AttachError: if the model keeps anything but full-attention and sliding-window KV.
    """
    check_supported(model)
    name = type(base_model(model)).__name__
    cache = DynamicCache(config=text_config(model))
    device = input_device(model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    keyword = {cache_keyword(model): cache}
    base_model(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **keyword)
    return tuple(_describe(name, index, layer) for index, layer in enumerate(cache.layers))


def _describe(name: str, index: int, layer: Any) -> LayerKV:
    if layer.get_seq_length() != 1 or layer.keys is None or layer.keys.shape[-2] != 1:
        raise AttachError(
            f"{name}: layer {index} did not put its KV into the cache it was given; "
            "KV-sharing models and models with their own cache are not supported yet"
        )
    specs = []
    for tensor_name, tensor in (("k", layer.keys), ("v", layer.values)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise AttachError(f"{name}: layer {index} keeps KV in {dtype}, which cannot be stored")
        specs.append(TensorSpec(tensor_name, dtype, (tensor.shape[1], tensor.shape[3])))
    window = int(layer.sliding_window) if layer.is_sliding else None
    return LayerKV(index, specs[0], specs[1], window, layer.keys.device)


def layout_of(layers: tuple[LayerKV, ...]) -> Layout:
    """Group the layers: full attention first, then one group per window size."""
    groups = []
    for window in sorted({kv.window for kv in layers}, key=lambda w: (w is not None, w or 0)):
        members = tuple(Layer(kv.index, (kv.k, kv.v)) for kv in layers if kv.window == window)
        kind = GroupKind.FULL if window is None else GroupKind.SLIDING
        groups.append(Group(kind, members, window))
    return Layout(tuple(groups))
