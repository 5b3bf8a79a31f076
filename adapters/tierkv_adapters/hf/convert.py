"""Turns a GGUF file into a Transformers model directory (float32), for Llama and Gemma 3.

The files are written directly, not through a live model, in a form that Transformers 4.57 and 5.x
both read: the older one knows ``rope_theta``, the newer one ``rope_parameters``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from tierkv_adapters.hf.gguf import GGUFFile

__all__ = ["convert"]

_NAMES = {
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_v": "self_attn.v_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "output_norm": "model.norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "token_embd": "model.embed_tokens",
}
_FFN_NORM = {"llama": "post_attention_layernorm", "gemma3": "pre_feedforward_layernorm"}
_GEMMA3_PERIOD = 6  # every sixth layer attends to everything
_GEMMA3_LOCAL_THETA = 10000.0
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def convert(
    source: GGUFFile, folder: Path, progress: Callable[[str, float], None] | None = None
) -> None:
    """Write config, weights and tokenizer of ``source`` into the empty directory ``folder``.

    Args:
        source: A parsed Llama or Gemma 3 model.
        folder: Existing directory.
        progress: Called with ("convert", share done).

    Raises:
        ConfigError: if the architecture is another one.
        MissingDependencyError: if an optional package is missing.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise MissingDependencyError(
            "converting models needs safetensors: pip install -c constraints.txt -e '.[demo]'"
        ) from error
    architecture = str(source.meta["general.architecture"])
    if architecture not in _FFN_NORM:
        raise ConfigError(f"no conversion for GGUF architecture {architecture!r} (llama, gemma3)")
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for done, (name, values) in enumerate(source):
        weights[_rename(name, architecture)] = _untwist(name, values, source.meta, architecture)
        if progress is not None:
            progress("convert", (done + 1) / len(source.tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {role: _token(source.meta, role) for role in _ROLES}
    _write(folder / "config.json", _config(source.meta, architecture, tokens))
    ids = {f"{role}_token_id": pair[0] for role, pair in tokens.items() if pair and role != "unk"}
    _write(folder / "generation_config.json", ids)
    _tokenizer(source.meta, folder / "tokenizer.json")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.meta[f"{architecture}.context_length"],
    }
    settings |= {f"{role}_token": pair[1] for role, pair in tokens.items() if pair}
    if template := source.meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _token(meta: dict[str, Any], role: str) -> tuple[int, str] | None:
    index = meta.get(f"tokenizer.ggml.{_ROLES[role]}_token_id")
    return None if index is None else (int(index), str(meta["tokenizer.ggml.tokens"][index]))


def _rename(name: str, architecture: str) -> str:
    *block, leaf, kind = name.split(".")
    renamed = _FFN_NORM[architecture] if leaf == "ffn_norm" else _NAMES[leaf]
    return (f"model.layers.{block[1]}." if block else "") + f"{renamed}.{kind}"


def _untwist(
    name: str, values: npt.NDArray[np.float32], meta: dict[str, Any], architecture: str
) -> npt.NDArray[np.float32]:
    leaf = name.split(".")[-2]
    if architecture == "llama" and leaf in ("attn_q", "attn_k"):
        # GGUF interleaves the two rotary halves of each head; Transformers keeps them apart
        which = "head_count" if leaf == "attn_q" else "head_count_kv"
        heads = meta[f"llama.attention.{which}"]
        apart = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2)
        return np.ascontiguousarray(apart.reshape(values.shape))
    if architecture == "gemma3" and leaf.endswith("norm"):
        return values - np.float32(1)  # GGUF stores 1 + weight
    return values


def _config(
    meta: dict[str, Any], architecture: str, tokens: dict[str, tuple[int, str] | None]
) -> dict[str, Any]:
    def get(key: str) -> Any:
        return meta[f"{architecture}.{key}"]

    theta = float(get("rope.freq_base"))
    layers = int(get("block_count"))
    config: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_hidden_layers": layers,
        "num_key_value_heads": get("attention.head_count_kv"),
        "rms_norm_eps": round(get("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }
    config |= {
        f"{role}_token_id": pair[0] for role, pair in tokens.items() if pair and role != "unk"
    }
    full = {"rope_type": "default", "rope_theta": theta}
    if architecture == "llama":
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "model_type": "llama",
            "rope_parameters": full,
        }
    local = {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_THETA}
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": get("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [
            "sliding_attention" if (i + 1) % _GEMMA3_PERIOD else "full_attention"
            for i in range(layers)
        ],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": get("attention.key_length"),
        "rope_local_base_freq": _GEMMA3_LOCAL_THETA,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "sliding_window": get("attention.sliding_window"),
    }


def _tokenizer(meta: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, processors

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    build = _byte_level if meta["tokenizer.ggml.model"] == "gpt2" else _sentence_piece
    tokenizer = build(meta, vocab)
    by_kind = {3: (True, False), 4: (False, True)}  # GGUF token type -> (special, normalized)
    for wanted, (special, normalized) in by_kind.items():
        added = [
            AddedToken(token, special=special, normalized=normalized)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if meta.get("tokenizer.ggml.add_bos_token"):
        name = tokens[meta["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{name} $A", special_tokens=[(name, vocab[name])]
        )
    tokenizer.save(str(path))


def _byte_level(meta: dict[str, Any], vocab: dict[str, int]) -> Any:
    """Byte-level BPE; digits are split one by one, as SmolLM's pre-tokenizer does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, fuse_unk=False))
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(meta: dict[str, Any], vocab: dict[str, int]) -> Any:
    """SentencePiece BPE with byte fallback: the merges follow from the scores of the pieces."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores: list[float] = meta["tokenizer.ggml.scores"]
    pairs: list[tuple[float, tuple[str, str]]] = []
    for piece, index in vocab.items():
        splits = [
            (piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        splits.sort(key=lambda split: (vocab[split[0]], vocab[split[1]]))
        pairs += [(scores[index], split) for split in splits]
    pairs.sort(key=lambda pair: -pair[0])
    unknown = meta["tokenizer.ggml.tokens"][meta["tokenizer.ggml.unknown_token_id"]]
    merges = [split for _, split in pairs]
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer
