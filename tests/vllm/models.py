"""Small models for tests with vLLM: random weights, a second to make, one per kind of KV cache.

Kept in the cache directory under a digest of their configuration. Weights are drawn so large that
greedy output has no short cycle and depends on the whole prompt: a test that compares outputs
would otherwise pass on wrong KV.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "model_directory"]

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    # head_dim is one that vLLM's CPU attention has kernels for
    "tiny-llama": (
        "LlamaConfig",
        {"num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 128},
    ),
    # two KV cache groups: every second layer sees a window only
    "tiny-gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 128,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # multi-head latent attention; the ranks are those that vLLM's kernel has
    "tiny-mla": (
        "DeepseekV2Config",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
    # two groups: short convolutions, whose state is the last two tokens', and full attention
    "tiny-lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 128,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_dim": 64,  # the names that vLLM reads
            "conv_dim_out": 64,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_norm_eps": 1e-5,
        },
    ),
    # a gated delta net: a recurrent state and one of a convolution; vLLM's CPU kernel wants
    # bfloat16 and heads that are multiples of 64
    "tiny-qwen3next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "partial_rotary_factor": 0.5,
        },
    ),
}
_SCALE = {
    "tiny-llama": 0.3,
    "tiny-gemma3": 0.2,
    "tiny-mla": 0.3,
    "tiny-lfm2": 0.3,
    "tiny-qwen3next": 0.2,
}
NAMES = (*_TINY, "smollm2")


def model_directory(name: str) -> Path:
    """Directory of a model in float32, with a tokenizer; made on first use.

    Args:
        name: One of :data:`NAMES`; ``"smollm2"`` is the real SmolLM2-135M-Instruct.

    Raises:
        MissingDependencyError: if a real model is not cached and cannot be fetched.
    """
    if name not in _TINY:
        from tierkv_adapters.hf.models import ensure_model  # this file is collected without it

        return ensure_model(name)
    kind, config = _TINY[name]
    config = _COMMON | config | {"initializer_range": _SCALE[name]}
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stated = json.dumps([kind, config, code], sort_keys=True)
    digest = hashlib.sha256(stated.encode()).hexdigest()[:16]
    from tierkv_adapters.hf.models import cache_root  # as above

    models = cache_root() / "models"
    target = models / f"{name}-{digest}"
    if target.exists():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=f".{name}-") as scratch:
        built = Path(scratch) / "model"
        _build(built, kind, config)
        try:
            built.rename(target)  # never seen half made
        except OSError:
            if not target.exists():  # else another process was first, with the same result
                raise
    return target


def _build(directory: Path, kind: str, config: dict[str, Any]) -> None:
    import torch
    import transformers

    build: Any = transformers.AutoModelForCausalLM.from_config  # untyped
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = build(getattr(transformers, kind)(**config))
    if config.get("qk_rope_head_dim"):
        # vLLM 0.32's rotary kernel for CPUs misreads the strided rotary half of a latent: what
        # comes of it depends on the batch. A half of zeros turns into zeros whatever it does.
        for layer in model.model.layers:
            rows = layer.self_attn.kv_a_proj_with_mqa.weight
            with torch.no_grad():
                rows[config["kv_lora_rank"] :] = 0
    model.float().save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> Any:
    """One token a byte; the rest of the vocabulary has names, so that any output can be shown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast  # untyped
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, "<bos>", "<eos>", *(f"<{n}>" for n in range(258, VOCABULARY))]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


if __name__ == "__main__":
    for _name in NAMES:
        print(_name, model_directory(_name))
