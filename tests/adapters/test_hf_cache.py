"""The cache object: growth, restore, capture, and what its views refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tierkv.errors import AttachError, LayoutError
from tierkv_adapters.hf.cache import TierCache
from tierkv_adapters.hf.compat import cache_keyword
from tierkv_adapters.hf.probe import layout_of, probe_layers
from tierkv_adapters.hf.view import CapturedView, RestoreView

BLOCK = 8


# ----------------------------------------------------------------- plain growth


def test_same_as_dynamic_cache(kit: Any, model: Any) -> None:
    specs, ids = probe_layers(model), kit.prompt(40)
    plain, ours = kit.plain_cache(model), TierCache(specs)
    past = 0
    for step in (17, 1, 1, 9, 1, 11):
        chunk = ids[:, past : past + step]
        assert torch.equal(
            kit.forward(model, chunk, plain, past), kit.forward(model, chunk, ours, past)
        )
        kit.equal(ours, plain)
        past += step
    assert ours.captured == 40


def test_generate_same_as_plain(kit: Any, model: Any) -> None:
    ids = kit.prompt(30)
    plain = kit.plain(model, ids[0].tolist())
    cache: Any = TierCache(probe_layers(model), reserve=60)
    assert kit.generate(model, ids, cache) == plain
    assert len(set(plain[30:])) > 3  # a constant reply would prove nothing
    assert cache.captured == len(plain) - 1


def test_growth_keeps_what_is_held(kit: Any, llama: Any) -> None:
    specs, ids = probe_layers(llama), kit.prompt(300)
    small: Any = TierCache(specs)
    large: Any = TierCache(specs, reserve=300)
    for past in range(0, 300, 100):
        kit.forward(llama, ids[:, past : past + 100], small, past)
        kit.forward(llama, ids[:, past : past + 100], large, past)
    for a, b in zip(small.tiers, large.tiers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert b.buffer.stop == 300


# ----------------------------------------------------------------- restore


@pytest.mark.parametrize("split", [8, 16, 24, 32, 29])
def test_restored_equals_resuming_in_memory(kit: Any, model: Any, split: int) -> None:
    specs, ids = probe_layers(model), kit.prompt(37)
    memory = kit.plain_cache(model)
    kit.forward(model, ids[:, :split], memory)
    source = kit.kept(model, specs, ids[:, :split])
    cache = kit.restore(specs, source, split)
    kit.equal(cache, memory)
    resumed = kit.forward(model, ids[:, split:], copy.deepcopy(memory), split)
    assert torch.equal(kit.forward(model, ids[:, split:], copy.deepcopy(cache), split), resumed)
    assert kit.generate(model, ids, cache) == kit.generate(model, ids, memory)


def shows_the_same(ours: Any, everything: Any, split: int) -> None:
    """``ours`` shows tokens up to ``split`` of a cache that forgets nothing."""
    for layer, reference in zip(ours.tiers, everything.layers, strict=True):
        window = layer.spec.window
        start = 0 if window is None else max(0, split - window + 1)
        assert torch.equal(layer.keys, reference.keys[:, :, start:split])
        assert torch.equal(layer.values, reference.values[:, :, start:split])


def test_any_block_boundary_restorable(kit: Any, gemma3: Any) -> None:
    """A sliding layer shows 11 tokens to attention, yet each boundary can be restored later."""
    specs, ids = probe_layers(gemma3), kit.prompt(64)
    source = kit.kept(gemma3, specs, ids)
    everything = kit.plain_cache()  # without a config no layer forgets
    kit.forward(gemma3, ids, everything)
    for split in range(BLOCK, 64, BLOCK):
        shows_the_same(kit.restore(specs, source, split), everything, split)


def test_captured_on_top_of_a_restore(kit: Any, model: Any) -> None:
    """Second generation: what was computed on top of a restore can be stored and restored."""
    specs, ids = probe_layers(model), kit.prompt(48)
    first = kit.restore(specs, kit.kept(model, specs, ids[:, :16]), 16)
    kit.forward(model, ids[:, 16:48], first, 16)
    everything = kit.plain_cache()  # without a config no layer forgets; the same two passes
    kit.forward(model, ids[:, :16], everything)
    kit.forward(model, ids[:, 16:48], everything, 16)
    shows_the_same(kit.restore(specs, CapturedView(first), 32), everything, 32)


def test_restore_under_inference_mode(kit: Any, llama: Any) -> None:
    specs, ids = probe_layers(llama), kit.prompt(20)
    with torch.inference_mode():
        source = kit.kept(llama, specs, ids[:, :16])
        cache = TierCache(specs)
        cache.open_restore(16, BLOCK)
    kit.copy_blocks(
        specs, source, RestoreView(cache, 16), 16
    )  # engine thread: no inference mode here
    cache.restored(16)
    assert len(kit.generate(llama, ids, cache)) == 32


def test_nothing_counts_before_it_is_declared(kit: Any, model: Any) -> None:
    specs = probe_layers(model)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    assert cache.get_seq_length() == 0
    assert cache.captured == 0
    plain = kit.generate(model, kit.prompt(20), kit.plain_cache(model))
    assert kit.generate(model, kit.prompt(20), cache) == plain


def test_f017_failed_restore_leaves_the_cache_unchanged(kit: Any, model: Any) -> None:
    specs, ids = probe_layers(model), kit.prompt(20)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    view = RestoreView(cache, 16)
    for spec in specs[:-1]:  # all layers but the last arrive, full of rubbish, then the load fails
        with view.writing():
            view.pieces(spec.index, "k", 8, 16)[0][1].fill_(float("nan"))
    assert cache.get_seq_length() == 0
    plain = kit.generate(model, ids, kit.plain_cache(model))
    assert kit.generate(model, ids, cache) == plain


def test_f015_only_valid_tokens_are_visible(kit: Any, llama: Any) -> None:
    """A block of which 5 of 8 slots are valid: 13 tokens are shown, never the rest."""
    specs, ids = probe_layers(llama), kit.prompt(13)
    cache = kit.restore(specs, kit.kept(llama, specs, ids), 13, reserve=64)
    for layer in cache.tiers:
        keys = layer.keys
        assert keys is not None
        assert keys.shape[-2] == 13
        assert layer.buffer.stop == 64
    with pytest.raises(LayoutError, match="only 13 tokens"):
        CapturedView(cache).pieces(0, "k", 8, 16)


def test_f014_a_copied_view_is_not_grown_by_generate(kit: Any, llama: Any) -> None:
    """What was stored from a cache stays as it was while kit.generate() goes on appending."""
    specs, ids = probe_layers(llama), kit.prompt(16)
    cache: Any = TierCache(specs)
    kit.forward(llama, ids, cache)
    view = CapturedView(cache)
    before = view.pieces(0, "k", 0, 16)[0][1].clone()
    kit.generate(llama, kit.prompt(24, seed=3), kit.restore(specs, view, 8))
    kit.forward(llama, kit.prompt(5), cache, 16)
    assert view.tokens == 16
    assert torch.equal(view.pieces(0, "k", 0, 16)[0][1], before)


# ----------------------------------------------------------------- views refuse


def test_views_refuse_what_is_not_in_memory(kit: Any, gemma3: Any) -> None:
    specs = probe_layers(gemma3)
    cache: Any = TierCache(specs)
    cache.open_restore(32, BLOCK)
    view = RestoreView(cache, 32)
    assert view.pieces(0, "k", 16, 32)[0][1].shape == (1, 16, 24)
    for layer, tensor, start, stop in [
        (0, "k", 8, 16),  # below the window
        (0, "k", 32, 40),  # past the restore
        (0, "x", 16, 24),
        (99, "k", 16, 24),
        (5, "v", 24, 33),
    ]:
        with pytest.raises(LayoutError):
            view.pieces(layer, tensor, start, stop)
    with pytest.raises(LayoutError, match="cannot declare 40"):
        cache.restored(40)


def test_update_refuses_silent_conversions(kit: Any, llama: Any) -> None:
    cache: Any = TierCache(probe_layers(llama))
    states = torch.zeros(1, 2, 3, 8)
    cache.update(states, states, 0)
    for wrong in (states.double(), torch.zeros(3, 2, 3, 8), torch.zeros(1, 1, 3, 8)):
        with pytest.raises(LayoutError, match="layer 0"):
            cache.update(wrong, wrong, 0)
    with pytest.raises(AttachError, match="no_grad"):
        cache.update(states.requires_grad_(), states, 0)
    assert cache.get_seq_length() == 3


def test_a_batch_is_not_stored_as_one(kit: Any, llama: Any) -> None:
    specs = probe_layers(llama)
    cache: Any = TierCache(specs)
    with torch.no_grad():
        llama(input_ids=kit.prompt(8).expand(2, 8), **{cache_keyword(llama): cache})
    with pytest.raises(LayoutError, match="batch of 2"):
        CapturedView(cache).pieces(0, "k", 0, 8)


# ----------------------------------------------------------------- what a model is asked


def test_probe_and_layout(kit: Any, gemma3: Any, llama: Any) -> None:
    layout = layout_of(probe_layers(gemma3))
    full, sliding = layout.groups
    assert (full.kind.value, full.window) == ("full", None)
    assert (sliding.kind.value, sliding.window) == ("sliding", 12)
    assert [layer.index for layer in full.layers] == [5]
    assert full.layers[0].tensors[0].shape == (1, 24)
    assert len(layout_of(probe_layers(llama)).groups) == 1


def test_bf16_kv(kit: Any) -> None:
    model = kit.make("llama").to(torch.bfloat16)
    specs, ids = probe_layers(model), kit.prompt(30)
    assert specs[0].k.dtype == "bfloat16"
    memory = kit.plain_cache(model)
    kit.forward(model, ids[:, :16], memory)
    cache = kit.restore(specs, kit.kept(model, specs, ids[:, :16]), 16)
    assert torch.equal(
        kit.forward(model, ids[:, 16:], cache, 16), kit.forward(model, ids[:, 16:], memory, 16)
    )
