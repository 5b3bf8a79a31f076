"""The cache object: growth, restore, capture, every operation against a plain cache."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from tierkv.errors import AttachError, LayoutError
from tierkv_adapters.hf.cache import TierCache
from tierkv_adapters.hf.compat import cache_keyword, crop_is_absolute
from tierkv_adapters.hf.probe import layout_of, probe_layers
from tierkv_adapters.hf.view import CapturedView, RestoreView

if TYPE_CHECKING:
    from tierkv_adapters.hf.buffer import LayerKV

BLOCK = 8
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def plain_cache(model: Any = None) -> Any:
    """What Transformers would use itself; without a model one whose layers forget nothing."""
    return DynamicCache() if model is None else DynamicCache(config=model.config)


def set_all(arrivals: dict[int, Future[None]]) -> None:
    for arrival in arrivals.values():
        arrival.set_result(None)


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 97, (1, tokens), generator=generator)


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any, past: int = 0) -> torch.Tensor:
    mask = torch.ones((1, past + ids.shape[1]), dtype=torch.long)
    keyword = {cache_keyword(model): cache}
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, **keyword)
    logits: torch.Tensor = out.logits
    return logits


def generate(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    keyword = {cache_keyword(model): cache}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **keyword, **GREEDY)
    tokens: list[int] = out[0].tolist()
    return tokens


def kept(model: Any, specs: tuple[LayerKV, ...], ids: torch.Tensor) -> CapturedView:
    """KV of ``ids`` as this adapter captures it."""
    cache: Any = TierCache(specs)
    forward(model, ids, cache)
    return CapturedView(cache)


def copy_blocks(
    specs: tuple[LayerKV, ...], source: CapturedView, into: RestoreView, tokens: int
) -> None:
    """Do by hand what an engine does: block by block, only what a prefix of ``tokens`` needs."""
    for spec in specs:
        first = 0 if spec.window is None else max(0, tokens - spec.window + 1) // BLOCK * BLOCK
        for name in ("k", "v"):
            for start in range(first, tokens, BLOCK):
                stop = min(start + BLOCK, tokens)
                with into.writing():
                    ((_, target),) = into.pieces(spec.index, name, start, stop)
                    ((_, origin),) = source.pieces(spec.index, name, start, stop)
                    target.copy_(origin)


def restore(specs: tuple[LayerKV, ...], source: CapturedView, tokens: int, reserve: int = 0) -> Any:
    cache: Any = TierCache(specs, reserve)
    cache.open_restore(tokens, BLOCK)
    copy_blocks(specs, source, RestoreView(cache, tokens), tokens)
    cache.restored(tokens)
    return cache


def equal(ours: Any, theirs: Any) -> None:
    """Every layer shows the same keys, values, length and mask sizes."""
    for mine, plain in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, plain.keys)
        assert torch.equal(mine.values, plain.values)
        assert mine.get_seq_length() == plain.get_seq_length()


# ----------------------------------------------------------------- plain growth


def test_same_as_dynamic_cache(model: Any) -> None:
    specs, ids = probe_layers(model), prompt(40)
    plain, ours = plain_cache(model), TierCache(specs)
    past = 0
    for step in (17, 1, 1, 9, 1, 11):
        chunk = ids[:, past : past + step]
        assert torch.equal(forward(model, chunk, plain, past), forward(model, chunk, ours, past))
        equal(ours, plain)
        past += step
    assert ours.captured == 40


def test_generate_same_as_plain(model: Any) -> None:
    ids = prompt(30)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0].tolist()
    cache: Any = TierCache(probe_layers(model), reserve=60)
    assert generate(model, ids, cache) == plain
    assert len(set(plain[30:])) > 3  # a constant reply would prove nothing
    assert cache.captured == len(plain) - 1


def test_growth_keeps_what_is_held(llama: Any) -> None:
    specs, ids = probe_layers(llama), prompt(300)
    small: Any = TierCache(specs)
    large: Any = TierCache(specs, reserve=300)
    for past in range(0, 300, 100):
        forward(llama, ids[:, past : past + 100], small, past)
        forward(llama, ids[:, past : past + 100], large, past)
    for a, b in zip(small.tiers, large.tiers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert b.buffer.stop == 300


# ----------------------------------------------------------------- restore


@pytest.mark.parametrize("split", [8, 16, 24, 32, 29])
def test_restored_equals_resuming_in_memory(model: Any, split: int) -> None:
    specs, ids = probe_layers(model), prompt(37)
    memory = plain_cache(model)
    forward(model, ids[:, :split], memory)
    source = kept(model, specs, ids[:, :split])
    cache = restore(specs, source, split)
    equal(cache, memory)
    resumed = forward(model, ids[:, split:], copy.deepcopy(memory), split)
    assert torch.equal(forward(model, ids[:, split:], copy.deepcopy(cache), split), resumed)
    assert generate(model, ids, cache) == generate(model, ids, memory)


def shows_the_same(ours: Any, everything: Any, split: int) -> None:
    """``ours`` shows tokens up to ``split`` of a cache that forgets nothing."""
    for layer, reference in zip(ours.tiers, everything.layers, strict=True):
        window = layer.spec.window
        start = 0 if window is None else max(0, split - window + 1)
        assert torch.equal(layer.keys, reference.keys[:, :, start:split])
        assert torch.equal(layer.values, reference.values[:, :, start:split])


def test_any_block_boundary_restorable(gemma3: Any) -> None:
    """A sliding layer shows 11 tokens to attention, yet each boundary can be restored later."""
    specs, ids = probe_layers(gemma3), prompt(64)
    source = kept(gemma3, specs, ids)
    everything = plain_cache()  # without a config no layer forgets
    forward(gemma3, ids, everything)
    for split in range(BLOCK, 64, BLOCK):
        shows_the_same(restore(specs, source, split), everything, split)


def test_captured_on_top_of_a_restore(model: Any) -> None:
    """Second generation: what was computed on top of a restore can be stored and restored."""
    specs, ids = probe_layers(model), prompt(48)
    first = restore(specs, kept(model, specs, ids[:, :16]), 16)
    forward(model, ids[:, 16:48], first, 16)
    everything = plain_cache()  # without a config no layer forgets; the same two passes
    forward(model, ids[:, :16], everything)
    forward(model, ids[:, 16:48], everything, 16)
    shows_the_same(restore(specs, CapturedView(first), 32), everything, 32)


def test_restore_under_inference_mode(llama: Any) -> None:
    specs, ids = probe_layers(llama), prompt(20)
    with torch.inference_mode():
        source = kept(llama, specs, ids[:, :16])
        cache = TierCache(specs)
        cache.open_restore(16, BLOCK)
    copy_blocks(specs, source, RestoreView(cache, 16), 16)  # engine thread: no inference mode here
    cache.restored(16)
    assert len(generate(llama, ids, cache)) == 32


def test_nothing_counts_before_it_is_declared(model: Any) -> None:
    specs = probe_layers(model)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    assert cache.get_seq_length() == 0
    assert cache.captured == 0
    plain = generate(model, prompt(20), plain_cache(model))
    assert generate(model, prompt(20), cache) == plain


def test_f017_failed_restore_leaves_the_cache_unchanged(model: Any) -> None:
    specs, ids = probe_layers(model), prompt(20)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    view = RestoreView(cache, 16)
    for spec in specs[:-1]:  # all layers but the last arrive, full of rubbish, then the load fails
        with view.writing():
            view.pieces(spec.index, "k", 8, 16)[0][1].fill_(float("nan"))
    assert cache.get_seq_length() == 0
    plain = generate(model, ids, plain_cache(model))
    assert generate(model, ids, cache) == plain


def test_f015_only_valid_tokens_are_visible(llama: Any) -> None:
    """A block of which 5 of 8 slots are valid: 13 tokens are shown, never the rest."""
    specs, ids = probe_layers(llama), prompt(13)
    cache = restore(specs, kept(llama, specs, ids), 13, reserve=64)
    for layer in cache.tiers:
        keys = layer.keys
        assert keys is not None
        assert keys.shape[-2] == 13
        assert layer.buffer.stop == 64
    with pytest.raises(LayoutError, match="only 13 tokens"):
        CapturedView(cache).pieces(0, "k", 8, 16)


def test_f014_a_copied_view_is_not_grown_by_generate(llama: Any) -> None:
    """What was stored from a cache stays as it was while generate() goes on appending."""
    specs, ids = probe_layers(llama), prompt(16)
    cache: Any = TierCache(specs)
    forward(llama, ids, cache)
    view = CapturedView(cache)
    before = view.pieces(0, "k", 0, 16)[0][1].clone()
    generate(llama, prompt(24, seed=3), restore(specs, view, 8))
    forward(llama, prompt(5), cache, 16)
    assert view.tokens == 16
    assert torch.equal(view.pieces(0, "k", 0, 16)[0][1], before)


# ----------------------------------------------------------------- views refuse


def test_views_refuse_what_is_not_in_memory(gemma3: Any) -> None:
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


def test_update_refuses_silent_conversions(llama: Any) -> None:
    cache: Any = TierCache(probe_layers(llama))
    states = torch.zeros(1, 2, 3, 8)
    cache.update(states, states, 0)
    for wrong in (states.double(), torch.zeros(3, 2, 3, 8), torch.zeros(1, 1, 3, 8)):
        with pytest.raises(LayoutError, match="layer 0"):
            cache.update(wrong, wrong, 0)
    with pytest.raises(AttachError, match="no_grad"):
        cache.update(states.requires_grad_(), states, 0)
    assert cache.get_seq_length() == 3


def test_a_batch_is_not_stored_as_one(llama: Any) -> None:
    specs = probe_layers(llama)
    cache: Any = TierCache(specs)
    with torch.no_grad():
        llama(input_ids=prompt(8).expand(2, 8), **{cache_keyword(llama): cache})
    with pytest.raises(LayoutError, match="batch of 2"):
        CapturedView(cache).pieces(0, "k", 0, 8)


# ----------------------------------------------------------------- operations of a cache


def remove(cache: Any, tokens: int) -> None:
    cache.crop(cache.get_seq_length() - tokens if crop_is_absolute() else -tokens)


def apply(cache: Any, operation: str) -> None:
    if operation == "crop":
        remove(cache, 3)
    elif operation == "reorder":
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    elif operation == "repeat":
        cache.batch_repeat_interleave(2)
    elif operation == "select":
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1]))
    elif operation == "reset":
        cache.reset()


@pytest.mark.parametrize("operation", ["crop", "reorder", "repeat", "select", "reset", "none"])
@pytest.mark.parametrize("pending", [False, True])
def test_f022_operations_equal_a_plain_cache(llama: Any, operation: str, pending: bool) -> None:
    specs, ids = probe_layers(llama), prompt(16)
    plain = plain_cache(llama)
    forward(llama, ids, plain)
    ours: Any = TierCache(specs)
    ours.open_restore(16, BLOCK)
    copy_blocks(specs, kept(llama, specs, ids), RestoreView(ours, 16), 16)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    if pending:
        ours.restoring(16, arrivals)
        timer = threading.Timer(0.05, set_all, [arrivals])
        timer.start()
    else:
        ours.restored(16)
    apply(ours, operation)
    apply(plain, operation)
    if operation == "reset":
        assert ours.get_seq_length() == 0
        assert generate(llama, ids, ours) == generate(llama, ids, plain_cache(llama))
    else:
        equal(ours, plain)
    if pending:
        timer.join()


def test_f022_sliding_layer_crops_back_as_if_the_tokens_were_never_there(gemma3: Any) -> None:
    specs, ids = probe_layers(gemma3), prompt(40)
    ours = restore(specs, kept(gemma3, specs, ids[:, :24]), 24)
    forward(gemma3, ids[:, 24:40], ours, 24)
    remove(ours, 10)
    plain = plain_cache(gemma3)
    forward(gemma3, ids[:, :24], plain)
    forward(gemma3, ids[:, 24:40], plain, 24)
    assert ours.get_seq_length() == 30
    full: Any = TierCache(specs)
    forward(gemma3, ids[:, :24], full)
    forward(gemma3, ids[:, 24:40], full, 24)
    for mine, other in zip(ours.tiers, full.tiers, strict=True):
        for which in (0, 1):
            assert torch.equal(mine.buffer.span(which, 16, 30), other.buffer.span(which, 16, 30))
    with pytest.raises(RuntimeError, match="below the first token held"):
        remove(ours, 12)
    assert ours.layers[0].get_seq_length() == 30


def test_crop_sign_of_this_version(llama: Any) -> None:
    cache: Any = TierCache(probe_layers(llama))
    forward(llama, prompt(10), cache)
    if crop_is_absolute():
        cache.crop(6)
        assert cache.get_seq_length() == 6
    else:
        with pytest.raises(ValueError, match="negative"):
            cache.crop(6)
        cache.crop(0)
        assert cache.get_seq_length() == 10


def test_assigning_tensors(gemma3: Any) -> None:
    """Moving a layer's tensors keeps its length; assigning others is refused."""
    specs, ids = probe_layers(gemma3), prompt(20)
    cache: Any = TierCache(specs)
    forward(gemma3, ids, cache)
    layer: Any = cache.tiers[0]
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    layer.keys, layer.values = keys.clone(), values.clone()
    assert torch.equal(layer.keys, keys)
    assert layer.get_seq_length() == 20
    with pytest.raises(AttachError, match="takes no tensor"):
        layer.keys = keys[:, :, 1:]
    with pytest.raises(AttachError, match="reset"):
        layer.keys = None
    twin = copy.deepcopy(cache)
    assert torch.equal(forward(gemma3, prompt(3), cache, 20), forward(gemma3, prompt(3), twin, 20))


def test_deepcopy_of_pending_is_independent(llama: Any) -> None:
    specs, ids = probe_layers(llama), prompt(16)
    source = kept(llama, specs, ids)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    copy_blocks(specs, source, RestoreView(cache, 16), 16)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    cache.restoring(16, arrivals)
    threading.Timer(0.05, set_all, [arrivals]).start()
    twin = copy.deepcopy(cache)
    forward(llama, prompt(4), cache, 16)
    assert twin.get_seq_length() == 16
    assert twin.tiers[0] is twin.layers[0]
    reference, again = restore(specs, source, 16), prompt(3, seed=5)
    assert torch.equal(forward(llama, again, twin, 16), forward(llama, again, reference, 16))


# ----------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("split", [16, 32, 40])
def test_each_layer_arrives_only_once_the_model_has_entered_it(model: Any, split: int) -> None:
    """Gated: layer i's bytes come after the forward pass entered layer i. Eager would hang."""
    specs, ids = probe_layers(model), prompt(44)
    source = kept(model, specs, ids[:, :split])
    expected = generate(model, ids, restore(specs, source, split))
    cache: Any = TierCache(specs)
    cache.open_restore(split, BLOCK)
    view = RestoreView(cache, split)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    order: list[int] = []

    def deliver(index: int) -> None:
        copy_blocks(tuple(s for s in specs if s.index == index), source, view, split)
        order.append(index)
        arrivals[index].set_result(None)

    def entered(index: int) -> Any:
        def hook(_module: Any, _args: Any) -> None:
            if not arrivals[index].done() and index not in order:
                threading.Thread(target=deliver, args=(index,)).start()

        return hook

    hooks = [
        layer.register_forward_pre_hook(entered(i)) for i, layer in enumerate(model.model.layers)
    ]
    cache.restoring(split, arrivals)
    assert cache.get_seq_length() == split  # known at once, without waiting
    try:
        assert generate(model, ids, cache) == expected
    finally:
        for hook in hooks:
            hook.remove()
    assert order == list(range(len(specs)))


def test_a_failed_arrival_surfaces_unchanged(llama: Any) -> None:
    specs, ids = probe_layers(llama), prompt(20)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    arrivals[0].set_result(None)
    failure = OSError("checksum")
    arrivals[1].set_exception(failure)
    cache.restoring(16, arrivals)
    with pytest.raises(OSError, match="checksum") as caught:
        generate(llama, ids, cache)
    assert caught.value is failure
    with pytest.raises(OSError, match="checksum"):
        _ = cache.tiers[1].keys  # at every further use, too
    with pytest.raises(OSError, match="checksum"):
        copy.deepcopy(cache)
    arrivals[2].set_result(None)
    cache.reset()  # waits, but what arrived no longer matters
    assert generate(llama, ids, cache) == generate(llama, ids, plain_cache(llama))


# ----------------------------------------------------------------- what a model is asked


def test_probe_and_layout(gemma3: Any, llama: Any) -> None:
    layout = layout_of(probe_layers(gemma3))
    full, sliding = layout.groups
    assert (full.kind.value, full.window) == ("full", None)
    assert (sliding.kind.value, sliding.window) == ("sliding", 12)
    assert [layer.index for layer in full.layers] == [5]
    assert full.layers[0].tensors[0].shape == (1, 24)
    assert len(layout_of(probe_layers(llama)).groups) == 1


def test_bf16_kv(tiny: Any) -> None:
    model = tiny("llama").to(torch.bfloat16)
    specs, ids = probe_layers(model), prompt(30)
    assert specs[0].k.dtype == "bfloat16"
    memory = plain_cache(model)
    forward(model, ids[:, :16], memory)
    cache = restore(specs, kept(model, specs, ids[:, :16]), 16)
    assert torch.equal(
        forward(model, ids[:, 16:], cache, 16), forward(model, ids[:, 16:], memory, 16)
    )
