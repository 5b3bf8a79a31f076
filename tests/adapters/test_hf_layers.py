"""Every operation of a cache against a plain one, and layers that arrive one by one."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tierkv.errors import AttachError
from tierkv_adapters.hf.cache import TierCache
from tierkv_adapters.hf.compat import crop_is_absolute
from tierkv_adapters.hf.probe import probe_layers
from tierkv_adapters.hf.view import RestoreView

BLOCK = 8


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
def test_f022_operations_equal_a_plain_cache(
    kit: Any, llama: Any, operation: str, pending: bool
) -> None:
    specs, ids = probe_layers(llama), kit.prompt(16)
    plain = kit.plain_cache(llama)
    kit.forward(llama, ids, plain)
    ours: Any = TierCache(specs)
    ours.open_restore(16, BLOCK)
    kit.copy_blocks(specs, kit.kept(llama, specs, ids), RestoreView(ours, 16), 16)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    if pending:
        ours.restoring(16, arrivals)
        timer = threading.Timer(0.05, kit.set_all, [arrivals])
        timer.start()
    else:
        ours.restored(16)
    apply(ours, operation)
    apply(plain, operation)
    if operation == "reset":
        assert ours.get_seq_length() == 0
        assert kit.generate(llama, ids, ours) == kit.generate(llama, ids, kit.plain_cache(llama))
    else:
        kit.equal(ours, plain)
    if pending:
        timer.join()


def test_f022_sliding_layer_crops_back_as_if_the_tokens_were_never_there(
    kit: Any, gemma3: Any
) -> None:
    specs, ids = probe_layers(gemma3), kit.prompt(40)
    ours = kit.restore(specs, kit.kept(gemma3, specs, ids[:, :24]), 24)
    kit.forward(gemma3, ids[:, 24:40], ours, 24)
    remove(ours, 10)
    plain = kit.plain_cache(gemma3)
    kit.forward(gemma3, ids[:, :24], plain)
    kit.forward(gemma3, ids[:, 24:40], plain, 24)
    assert ours.get_seq_length() == 30
    full: Any = TierCache(specs)
    kit.forward(gemma3, ids[:, :24], full)
    kit.forward(gemma3, ids[:, 24:40], full, 24)
    for mine, other in zip(ours.tiers, full.tiers, strict=True):
        for which in (0, 1):
            assert torch.equal(mine.buffer.span(which, 16, 30), other.buffer.span(which, 16, 30))
    with pytest.raises(RuntimeError, match="below the first token held"):
        remove(ours, 12)
    assert ours.layers[0].get_seq_length() == 30


def test_crop_sign_of_this_version(kit: Any, llama: Any) -> None:
    cache: Any = TierCache(probe_layers(llama))
    kit.forward(llama, kit.prompt(10), cache)
    if crop_is_absolute():
        cache.crop(6)
        assert cache.get_seq_length() == 6
    else:
        with pytest.raises(ValueError, match="negative"):
            cache.crop(6)
        cache.crop(0)
        assert cache.get_seq_length() == 10


def test_assigning_tensors(kit: Any, gemma3: Any) -> None:
    """Moving a layer's tensors keeps its length; assigning others is refused."""
    specs, ids = probe_layers(gemma3), kit.prompt(20)
    cache: Any = TierCache(specs)
    kit.forward(gemma3, ids, cache)
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
    assert torch.equal(
        kit.forward(gemma3, kit.prompt(3), cache, 20), kit.forward(gemma3, kit.prompt(3), twin, 20)
    )


def test_deepcopy_of_pending_is_independent(kit: Any, llama: Any) -> None:
    specs, ids = probe_layers(llama), kit.prompt(16)
    source = kit.kept(llama, specs, ids)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    kit.copy_blocks(specs, source, RestoreView(cache, 16), 16)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    cache.restoring(16, arrivals)
    threading.Timer(0.05, kit.set_all, [arrivals]).start()
    twin = copy.deepcopy(cache)
    kit.forward(llama, kit.prompt(4), cache, 16)
    assert twin.get_seq_length() == 16
    assert twin.tiers[0] is twin.layers[0]
    reference, again = kit.restore(specs, source, 16), kit.prompt(3, seed=5)
    assert torch.equal(
        kit.forward(llama, again, twin, 16), kit.forward(llama, again, reference, 16)
    )


# ----------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("split", [16, 32, 40])
def test_each_layer_arrives_only_once_the_model_has_entered_it(
    kit: Any, model: Any, split: int
) -> None:
    """Gated: layer i's bytes come after the forward pass entered layer i. Eager would hang."""
    specs, ids = probe_layers(model), kit.prompt(44)
    source = kit.kept(model, specs, ids[:, :split])
    expected = kit.generate(model, ids, kit.restore(specs, source, split))
    cache: Any = TierCache(specs)
    cache.open_restore(split, BLOCK)
    view = RestoreView(cache, split)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    order: list[int] = []

    def deliver(index: int) -> None:
        kit.copy_blocks(tuple(s for s in specs if s.index == index), source, view, split)
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
        assert kit.generate(model, ids, cache) == expected
    finally:
        for hook in hooks:
            hook.remove()
    assert order == list(range(len(specs)))


def test_a_failed_arrival_surfaces_unchanged(kit: Any, llama: Any) -> None:
    specs, ids = probe_layers(llama), kit.prompt(20)
    cache: Any = TierCache(specs)
    cache.open_restore(16, BLOCK)
    arrivals: dict[int, Future[None]] = {spec.index: Future() for spec in specs}
    arrivals[0].set_result(None)
    failure = OSError("checksum")
    arrivals[1].set_exception(failure)
    cache.restoring(16, arrivals)
    with pytest.raises(OSError, match="checksum") as caught:
        kit.generate(llama, ids, cache)
    assert caught.value is failure
    with pytest.raises(OSError, match="checksum"):
        _ = cache.tiers[1].keys  # at every further use, too
    with pytest.raises(OSError, match="checksum"):
        copy.deepcopy(cache)
    arrivals[2].set_result(None)
    cache.reset()  # waits, but what arrived no longer matters
    assert kit.generate(llama, ids, cache) == kit.generate(llama, ids, kit.plain_cache(llama))
