"""Every codec chain behind a live model: lossless replies are the same, lossy ones are reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierkv
from tierkv.blocking import CacheManager
from tierkv.chains import parse_chain
from tierkv_adapters import hf
from tierkv_adapters.hf.compare import compare_tokens

BLOCK = 64
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
PROMPT = [3 + i * 7 % 90 for i in range(150)]


def replies(model: Any, chain: str) -> tuple[Any, Any, float]:
    """A prompt asked twice, and the bytes stored for it against those of raw KV."""
    tier = tierkv.Tier("host", capacity="64MiB", codec=chain)
    with (
        CacheManager(tiers=[tier], policy="lru", block_tokens=BLOCK) as manager,
        hf.attach(model, manager) as handle,
    ):
        manager.create_session("one")
        manager.create_session("two")
        first = handle.generate(PROMPT, session="one", **GREEDY)
        second = handle.generate(PROMPT, session="two", **GREEDY)
        return first, second, manager.stats().used["host"]


@pytest.mark.parametrize("chain", ["planes", "zstd"])
def test_lossless_chains_change_no_token(model: Any, chain: str) -> None:
    first, second, _ = replies(model, chain)
    assert second.reused_tokens == len(PROMPT) // BLOCK * BLOCK
    assert second.output_ids == first.output_ids
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0].tolist()
    assert compare_tokens(model, second.output_ids, plain).identical


@pytest.mark.parametrize("chain", ["int6", "int4", "rot4", "fp8", "int3", "rot3", "int4+planes"])
def test_lossy_chains_are_stored_small_and_reused(llama: Any, chain: str) -> None:
    assert not parse_chain(chain).lossless
    _, second, used = replies(llama, chain)
    assert second.reused_tokens == len(PROMPT) // BLOCK * BLOCK
    assert second.output_ids[: len(PROMPT)] == PROMPT
    assert used < replies(llama, "raw")[2]
