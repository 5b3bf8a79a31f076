"""The reference is Transformers' own cache, resumed where one likes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import transformers

from tierkv.errors import LayoutError
from tierkv_adapters.hf.compat import cache_keyword
from tierkv_adapters.hf.demo.reference import Memory, Recorder, plain_run

IDS = [(7 * i) % 251 + 1 for i in range(90)]
WINDOW = 12


def _gemma() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.Gemma3ForCausalLM(config)
    return model.eval()


@pytest.fixture(params=["llama", "gemma3"])
def either(request: pytest.FixtureRequest, model: Any) -> Any:
    return model if request.param == "llama" else _gemma()


@torch.no_grad()
def _prefill(model: Any, ids: list[int], cache: Any) -> Any:
    tensor = torch.tensor([ids])
    model(input_ids=tensor, use_cache=True, **{cache_keyword(model): cache})
    return cache


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, 40, 89])
def test_resumed_is_the_cache_that_stopped_there(either: Any, tokens: int) -> None:
    memory = Memory(either)
    whole = Recorder(either)
    _prefill(either, IDS[:tokens], whole)
    _prefill(either, IDS[tokens:], whole)
    memory.absorb(IDS, whole)

    plain = transformers.DynamicCache(config=either.config)
    _prefill(either, IDS[:tokens], plain)
    resumed = memory.resume(tokens)

    assert memory.tokens == len(IDS)
    for ours, theirs in zip(resumed.layers, plain.layers, strict=True):
        mine: Any = ours
        other: Any = theirs
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
        assert mine.get_seq_length() == other.get_seq_length() == tokens


def test_memory_goes_on_where_it_was_resumed(either: Any) -> None:
    memory, cache = Memory(either), Recorder(either)
    first = plain_run(either, IDS, 4, cache)
    memory.absorb(first.output, cache)
    assert memory.tokens == len(IDS) + 3

    again = memory.resume(64)
    second = plain_run(either, [*first.output, 5, 6, 7], 4, again)
    memory.absorb(second.output, again, 64)

    assert memory.tokens == len(second.output) - 1
    assert memory.shared(second.output) == memory.tokens
    assert memory.shared([*first.output, 9]) == len(first.output)
    assert memory.shared([0]) == 0
    assert second.output == plain_run(either, [*first.output, 5, 6, 7], 4).output


def test_it_cannot_resume_what_it_does_not_hold(model: Any) -> None:
    memory, cache = Memory(model), Recorder(model)
    with pytest.raises(LayoutError, match="0 are in memory"):
        memory.resume(1)
    _prefill(model, IDS, cache)
    memory.absorb(IDS, cache)
    for tokens in (0, len(IDS) + 1):
        with pytest.raises(LayoutError, match=f"after {tokens} tokens"):
            memory.resume(tokens)


def test_the_first_token_ends_the_clock(model: Any) -> None:
    shares = []
    for _ in range(5):  # the machine may be busy at the wrong moment
        start = time.perf_counter(), time.process_time()
        run = plain_run(model, IDS, 60)
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        assert 0 < run.ttft_s < wall
        shares.append(max(run.ttft_s / wall, run.cpu_s / cpu))

    assert min(shares) < 0.5, "one token of sixty took most of the time"
