"""Every codec chain behind a live model: lossless replies are the same, lossy ones are reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierkv
from tierkv.blocking import CacheManager
from tierkv.chains import parse_chain
from tierkv.views import dense
from tierkv_adapters import hf
from tierkv_adapters.hf.compare import compare_tokens
from tierkv_adapters.hf.compat import crop_is_absolute
from tierkv_adapters.hf.demo.loading import find_model, load_model
from tierkv_adapters.hf.probe import probe_layers
from tierkv_adapters.hf.report.coding import code
from tierkv_adapters.hf.report.fidelity import default_text

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


def through(kit: Any, model: Any, ids: torch.Tensor, chain: str) -> tuple[Any, Any]:
    """The KV of ``ids`` after a chain: in a cache of this adapter, and in one of Transformers."""
    exact = kit.plain_cache()
    kit.forward(model, ids, exact)
    pairs = [(layer.keys[0], layer.values[0]) for layer in exact.layers]
    decoded = code(pairs, chain).kv
    plain = kit.plain_cache()
    for index, (k, v) in enumerate(decoded):
        plain.update(k[None], v[None], index)
    return kit.restore(probe_layers(model), dense(decoded), ids.shape[1]), plain


def operate(cache: Any, operation: str) -> None:
    if operation == "crop":
        cache.crop(cache.get_seq_length() - 9 if crop_is_absolute() else -9)
        return
    cache.batch_repeat_interleave(3)
    if operation == "reorder":
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    else:
        cache.batch_select_indices(torch.tensor([1, 2]))


@pytest.mark.parametrize("operation", ["crop", "reorder", "select"])
@pytest.mark.parametrize("chain", ["planes", "int8", "int4+planes", "rot4"])
def test_operations_on_decoded_kv_are_those_of_a_plain_cache(
    kit: Any, llama: Any, chain: str, operation: str
) -> None:
    ids = kit.prompt(72)
    ours, plain = through(kit, llama, ids[:, :64], chain)
    kit.equal(ours, plain)
    for cache in (ours, plain):
        operate(cache, operation)
    kit.equal(ours, plain)
    if operation == "crop":
        logits = [kit.forward(llama, ids[:, 55:], cache, 55) for cache in (ours, plain)]
        assert torch.equal(*logits)


@pytest.mark.stress
def test_int8_keeps_the_most_likely_token_of_a_real_model(kit: Any) -> None:
    model, tokenizer = load_model(find_model("smollm2"))
    prefix, scored = 1024, 512
    text = default_text()[: 16 * (prefix + scored)]
    ids = torch.tensor([tokenizer(text)["input_ids"][: prefix + scored]])
    exact, rest = kit.plain_cache(model), ids[:, prefix:]
    kit.forward(model, ids[:, :prefix], exact)
    ours, _ = through(kit, model, ids[:, :prefix], "int8")
    wanted = kit.forward(model, rest, exact, prefix).argmax(-1)
    found = kit.forward(model, rest, ours, prefix).argmax(-1)
    assert wanted.numel() == scored
    assert float((wanted == found).double().mean()) >= 0.99
