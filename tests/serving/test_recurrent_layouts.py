"""Recurrent layers of vLLM as page groups, and what is refused; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tierkv.errors import AttachError
from tierkv.layout import GroupKind
from tierkv_adapters.vllm.layouts import page_groups


class MambaSpec(SimpleNamespace):
    """As vLLM's."""


class ChunkedLocalAttentionSpec(SimpleNamespace):
    """As vLLM's."""


class CrossAttentionSpec(SimpleNamespace):
    """As vLLM's."""


def _config(spec: Any) -> Any:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.3.mixer"])
    return SimpleNamespace(kv_cache_groups=[group], num_blocks=4, kv_cache_layout="LBHNC")


def _mamba(**more: Any) -> MambaSpec:
    known = {
        "block_size": 16,
        "shapes": ((3, 4), (2, 5)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
    }
    return MambaSpec(**{**known, **more})


def test_a_page_of_states_is_all_of_its_bytes() -> None:
    pool = torch.zeros(4, 128, dtype=torch.uint8)[:, :64].view(4, 1, 1, 64)
    names = {"layers.3.mixer": "MAMBA2"}
    (group,) = page_groups({"layers.3.mixer": pool}, _config(_mamba()), names)
    assert (group.kind, group.page_tokens) == (GroupKind.STATE, 16)
    (layer,) = group.layers
    assert layer.index == 3
    assert {name: tuple(t.shape) for name, t in layer.tensors.items()} == {"state0": (4, 64)}
    # a tensor for each state, as earlier versions had it
    each = pool.view(4, 64)
    conv = each[:, :24].view(torch.bfloat16).view(4, 3, 4)
    ssm = each[:, 24:].view(torch.float32).view(4, 2, 5)
    (other,) = page_groups({"layers.3.mixer": [conv, ssm]}, _config(_mamba()), names)
    assert [t.shape[1] for t in other.layers[0].tensors.values()] == [24, 40]
    assert other.layers[0].packing != layer.packing
    with pytest.raises(AttachError, match="64 bytes"):
        page_groups({"layers.3.mixer": [conv]}, _config(_mamba()), names)
    # other states of as many bytes are not these
    spec = _mamba(shapes=((4, 3), (2, 5)))
    (third,) = page_groups({"layers.3.mixer": pool}, _config(spec), names)
    assert third.layers[0].packing != layer.packing


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (_mamba(mamba_cache_mode="none"), "--enable-prefix-caching"),
        (_mamba(num_speculative_blocks=2), "--speculative-config"),
        (ChunkedLocalAttentionSpec(block_size=16), "--disable-hybrid-kv-cache-manager"),
        (CrossAttentionSpec(block_size=16), "CrossAttentionSpec"),
    ],
)
def test_what_cannot_be_brought_back_is_refused(spec: Any, why: str) -> None:
    pool = torch.zeros(4, 1, 1, 64, dtype=torch.uint8)
    with pytest.raises(AttachError, match=why):
        page_groups({"layers.3.mixer": pool}, _config(spec), {"layers.3.mixer": "X"})
