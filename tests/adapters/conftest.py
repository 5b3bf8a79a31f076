"""Tiny random models and the tools to compare caches, for the tests of the Hugging Face adapter."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

INSTALLED = importlib.util.find_spec("transformers") is not None
if INSTALLED:
    import transformers

    from tierkv_adapters.hf.cache import TierCache
    from tierkv_adapters.hf.compat import cache_keyword
    from tierkv_adapters.hf.view import CapturedView, RestoreView
else:
    collect_ignore_glob = ["test_hf_*.py"]

VOCAB = 97
BLOCK = 8
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def pytest_report_header() -> str:
    """Say why the adapter's tests are missing, where they are."""
    return "tierkv_adapters.hf: " + ("tested" if INSTALLED else "not tested, no Transformers here")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ----------------------------------------------------------------- models


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


def make(name: str, seed: int = 0) -> Any:
    """Build the tiny model ``name`` with weights from ``seed``."""
    torch.manual_seed(seed)
    return BUILDERS[name]().eval()


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


# ----------------------------------------------------------------- tools


class Kit:
    """What tests do with caches by hand."""

    make = staticmethod(make)

    @staticmethod
    def opened(**settings: Any) -> Any:
        """An engine of one host tier, or as ``settings`` say."""
        options: dict[str, Any] = {"tiers": [tierkv.Tier("host", "64MiB")], "block_tokens": BLOCK}
        return tierkv.open(**(options | settings))

    @staticmethod
    def ids(tokens: int, seed: int = 1) -> list[int]:
        """Token ids of a random prompt."""
        row: list[int] = Kit.prompt(tokens, seed)[0].tolist()
        return row

    @staticmethod
    def plain(model: Any, ids: list[int], **arguments: Any) -> list[int]:
        """Prompt and reply with no store at all."""
        tensor = torch.tensor([ids])
        mask = torch.ones_like(tensor)
        out = model.generate(tensor, attention_mask=mask, **(GREEDY | arguments))
        tokens: list[int] = out[0].tolist()
        return tokens

    @staticmethod
    def plain_cache(model: Any = None) -> Any:
        """What Transformers would use itself; without a model one whose layers forget nothing."""
        return (
            transformers.DynamicCache()
            if model is None
            else transformers.DynamicCache(config=model.config)
        )

    @staticmethod
    def set_all(arrivals: dict[int, Future[None]]) -> None:
        for arrival in arrivals.values():
            arrival.set_result(None)

    @staticmethod
    def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, 97, (1, tokens), generator=generator)

    @staticmethod
    @torch.no_grad()
    def forward(model: Any, ids: torch.Tensor, cache: Any, past: int = 0) -> torch.Tensor:
        mask = torch.ones((1, past + ids.shape[1]), dtype=torch.long)
        keyword = {cache_keyword(model): cache}
        out = model(input_ids=ids, attention_mask=mask, use_cache=True, **keyword)
        logits: torch.Tensor = out.logits
        return logits

    @staticmethod
    def generate(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
        keyword = {cache_keyword(model): cache}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **keyword, **GREEDY)
        tokens: list[int] = out[0].tolist()
        return tokens

    @staticmethod
    def kept(model: Any, specs: tuple[Any, ...], ids: torch.Tensor) -> CapturedView:
        """KV of ``ids`` as this adapter captures it."""
        cache: Any = TierCache(specs)
        Kit.forward(model, ids, cache)
        return CapturedView(cache)

    @staticmethod
    def copy_blocks(
        specs: tuple[Any, ...], source: CapturedView, into: RestoreView, tokens: int
    ) -> None:
        """Do by hand what an engine does: block by block, only what the prefix needs."""
        for spec in specs:
            first = 0 if spec.window is None else max(0, tokens - spec.window + 1) // BLOCK * BLOCK
            for name in ("k", "v"):
                for start in range(first, tokens, BLOCK):
                    stop = min(start + BLOCK, tokens)
                    with into.writing():
                        ((_, target),) = into.pieces(spec.index, name, start, stop)
                        ((_, origin),) = source.pieces(spec.index, name, start, stop)
                        target.copy_(origin)

    @staticmethod
    def restore(specs: tuple[Any, ...], source: CapturedView, tokens: int, reserve: int = 0) -> Any:
        cache: Any = TierCache(specs, reserve)
        cache.open_restore(tokens, BLOCK)
        Kit.copy_blocks(specs, source, RestoreView(cache, tokens), tokens)
        cache.restored(tokens)
        return cache

    @staticmethod
    def equal(ours: Any, theirs: Any) -> None:
        """Every layer shows the same keys, values, length and mask sizes."""
        for mine, plain in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(mine.keys, plain.keys)
            assert torch.equal(mine.values, plain.values)
            assert mine.get_seq_length() == plain.get_seq_length()


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    """The tools above, for test modules."""
    return Kit
