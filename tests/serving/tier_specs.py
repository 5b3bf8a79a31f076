"""What vLLM tells a tier about itself, in two generations of its interface."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from tests.serving.tier_fakes import GENERATIONS

__all__ = ["NEW", "OLD", "WEIGHTS", "Excerpt", "Parallel", "spec_of", "whole"]

OLD, NEW = GENERATIONS
WEIGHTS = {"weights": "rev1"}


@dataclasses.dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    data_parallel_index: int = 0
    data_parallel_size: int = 1


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """As vLLM's ``OffloadingConfig``."""

    model: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(name="m"))
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    kv_cache_layout: str | None = "LBHNC"
    engine_id: str = "any"
    extra_config: Any = dataclasses.field(default_factory=dict)


def whole(**changes: Any) -> Any:
    """As much of a ``VllmConfig`` as an identity reads."""
    parallel = SimpleNamespace(
        world_size=1, rank=0, data_parallel_size=2, data_parallel_index=1, tensor_parallel_size=1
    )
    hf = SimpleNamespace(architectures=["Llama"], to_dict=lambda: changes.get("hf", {"a": 1}))
    model = SimpleNamespace(
        dtype="float32", hf_config=hf, model="/nowhere", model_weights="", max_model_len=64
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=changes.get("lora"),
    )


def spec_of(generation: str) -> Any:
    if generation == OLD:
        kv = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=["l.0"], kv_cache_spec="full")]
        )
        return SimpleNamespace(vllm_config=whole(), kv_cache_config=kv, block_size_factor=1)
    return SimpleNamespace(config=Excerpt(), tokens_per_block=(128,))
