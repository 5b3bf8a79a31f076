"""Tiny random models: every architecture that the Hugging Face adapter must serve, in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB = 97


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.3,  # spreads the logits: greedy replies do not repeat one token
    }


def build_llama() -> Any:
    """Full attention everywhere, grouped queries."""
    config = transformers.LlamaConfig(num_hidden_layers=3, **_common())
    return transformers.LlamaForCausalLM(config)


def build_gemma3() -> Any:
    """Sliding window of 12 on five of six layers, other head size, one KV head."""
    config = transformers.Gemma3TextConfig(
        **_common()
        | {
            "num_hidden_layers": 6,
            "head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,  # tied, a random model only repeats its input
        }
    )
    return transformers.Gemma3ForCausalLM(config)


def build_qwen2() -> Any:
    """Biases on q, k, v; tied embeddings."""
    config = transformers.Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **_common())
    return transformers.Qwen2ForCausalLM(config)


BUILDERS = {"llama": build_llama, "gemma3": build_gemma3, "qwen2": build_qwen2}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(name: str, seed: int = 0) -> Any:
    """Build the tiny model ``name`` with weights from ``seed``."""
    torch.manual_seed(seed)
    return BUILDERS[name]().eval()


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The function :func:`make`."""
    return make


@pytest.fixture(params=sorted(BUILDERS))
def model(request: pytest.FixtureRequest) -> Any:
    """Each tiny model in turn."""
    return make(request.param)


@pytest.fixture(scope="session")
def llama() -> Any:
    """The tiny Llama."""
    return make("llama")


@pytest.fixture(scope="session")
def gemma3() -> Any:
    """The tiny Gemma 3 (sliding windows)."""
    return make("gemma3")
