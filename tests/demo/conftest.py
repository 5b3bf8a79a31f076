"""A tiny model in a directory, whose demo takes seconds."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

INSTALLED = importlib.util.find_spec("transformers") is not None
if INSTALLED:
    import tokenizers
    import torch
    import transformers
else:
    collect_ignore_glob = ["test_*.py"]


def _byte_tokenizer() -> Any:
    """One token for each byte: every text has a length that does not depend on a vocabulary."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    wrap: Any = transformers.PreTrainedTokenizerFast
    return wrap(tokenizer_object=inner)


def build(positions: int = 4096) -> Any:
    """A random Llama that knows bytes; its KV is large for its size, 8 KiB a token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return model.eval()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model."""
    return save(tmp_path_factory.mktemp("tiny"))


def save(directory: Path, positions: int = 4096) -> Path:
    """Write a tiny model into a directory."""
    build(positions).save_pretrained(directory)
    _byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the tiny model."""
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def model() -> Any:
    """The tiny model."""
    return build()
