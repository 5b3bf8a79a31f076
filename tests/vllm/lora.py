"""LoRA adapters for the tiny Llama, in the form in which ``peft`` saves them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_adapter"]

_RANK = 8
_WIDTH = 64  # of the tiny model's hidden states, and of all of its heads together
_LAYERS = 2


def write_adapter(folder: Path, seed: int) -> str:
    """Write an adapter of random numbers for the tiny Llama's Q, K and V; returns its path.

    Args:
        folder: Where to; what is there is overwritten in place.
        seed: Adapters of different seeds give different answers.
    """
    import torch
    from safetensors.torch import save

    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for name in ("q_proj", "k_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(_RANK, _WIDTH, generator=dice) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(_WIDTH, _RANK, generator=dice) * 0.3
    folder.mkdir(exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    return str(folder)
