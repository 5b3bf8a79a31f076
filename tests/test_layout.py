"""Layouts: what is refused, what a part weighs, and that every difference shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tierkv.blocks import Identity
from tierkv.errors import LayoutError
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, Space, TensorSpec

FULL = Group(GroupKind.FULL, (Layer.kv(0, 2, 8, "bfloat16"),))


def test_golden_fingerprint() -> None:
    layout = Layout(
        (
            Group(GroupKind.FULL, (Layer.kv(0, 2, 8, "bfloat16", v_dim=4),)),
            Group(GroupKind.SLIDING, (Layer.kv(1, 2, 8, "float16"),), window=32),
            Group(GroupKind.LATENT, (Layer(2, (TensorSpec("latent", "bfloat16", (1, 12)),)),)),
            Group(GroupKind.STATE, (Layer(3, (TensorSpec("ssm", "float32", (2, 3, 4)),)),)),
        )
    )
    assert (
        layout.fingerprint.hex()
        == "6ae7f44cbb51721128c4b6817ba3aa457bb956719f3c58e4ad2f3da7bf9b193c"
    )


def _variants() -> dict[str, Layout]:
    k, v = FULL.layers[0].tensors
    one = {
        "as it is": (k, v),
        "order": (v, k),
        "name": (replace(k, name="key"), v),
        "dtype": (replace(k, dtype="float16"), v),
        "heads": (replace(k, shape=(4, 8)), v),
        "dim": (replace(k, shape=(2, 16)), v),
        "same bytes": (replace(k, shape=(4, 4)), v),
        "f013 packing": (replace(k, packing="page-major"), v),
        "one tensor": (k,),
    }
    layouts = {n: Layout((Group(GroupKind.FULL, (Layer(0, t),)),)) for n, t in one.items()}
    layer = FULL.layers[0]
    layouts["index"] = Layout((Group(GroupKind.FULL, (replace(layer, index=1),)),))
    layouts["kind"] = Layout((Group(GroupKind.LATENT, (layer,)),))
    layouts["window"] = Layout((Group(GroupKind.SLIDING, (layer,), window=8),))
    layouts["another window"] = Layout((Group(GroupKind.SLIDING, (layer,), window=9),))
    second = replace(layer, index=1)
    layouts["two layers"] = Layout((Group(GroupKind.FULL, (layer, second)),))
    layouts["two groups"] = Layout((FULL, Group(GroupKind.FULL, (second,))))
    return layouts


def test_f013_every_difference_changes_the_fingerprint() -> None:
    layouts = _variants()
    assert len({layout.fingerprint for layout in layouts.values()}) == len(layouts)
    identity = Identity("m", "r")
    spaces = {Space(identity, layout, 16).fingerprint for layout in layouts.values()}
    assert len(spaces) == len(layouts)


def test_spaces_with_other_block_sizes_differ() -> None:
    layout = Layout((FULL,))
    found = {Space(Identity("m", "r"), layout, n).fingerprint for n in (1, 16, 64)}
    assert len(found) == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TensorSpec("k", "bf16", (1, 2)), "bf16"),
        (lambda: TensorSpec("k", "float16", (1, -2)), "at least 0"),
        (lambda: Group(GroupKind.SLIDING, FULL.layers), "window"),
        (lambda: Group(GroupKind.FULL, FULL.layers, window=4), "window"),
        (lambda: Group(GroupKind.SLIDING, FULL.layers, window=0), "at least 1"),
        (lambda: Group(GroupKind.FULL, ()), "at least one layer"),
        (lambda: Group(GroupKind.FULL, (Layer(0, ()),)), "layer 0"),
        (lambda: Group(GroupKind.FULL, (Layer(0, FULL.layers[0].tensors * 2),)), "unique"),
        (lambda: Group(GroupKind.FULL, (Layer(0, (TensorSpec("k", "int8", (2,)),)),)), "layer 0"),
        (lambda: Layout(()), "at least one group"),
        (lambda: Layout((FULL, FULL)), "one group only"),
        (lambda: Space(Identity("m", "r"), Layout((FULL,)), 0), "block_tokens"),
        (lambda: Space(Identity("m", "r"), Layout((FULL,)), "16"), "block_tokens"),  # type: ignore[arg-type]
        (lambda: Space(Identity("m", "r"), Layout((FULL,)), True), "block_tokens"),
        (lambda: Space("m", Layout((FULL,))), "must be a Identity"),  # type: ignore[arg-type]
        (lambda: Space(Identity("m", "r"), "L"), "must be a Layout"),  # type: ignore[arg-type]
        (lambda: Layout.uniform(1.5, 1, 2, "int8"), "number of layers"),  # type: ignore[arg-type]
        (lambda: Layout.uniform(0, 1, 2, "int8"), "number of layers"),
        (lambda: Layout.uniform(1, "1", 2, "int8"), "size in shape"),  # type: ignore[arg-type]
        (lambda: Layout([FULL]), "tuple of Group"),  # type: ignore[arg-type]
        (lambda: Group("full", FULL.layers), "GroupKind"),  # type: ignore[arg-type]
        (lambda: Group(GroupKind.FULL, FULL.layers[0]), "tuple of Layer"),  # type: ignore[arg-type]
        (lambda: Group(GroupKind.SLIDING, FULL.layers, window=1.5), "window"),  # type: ignore[arg-type]
        (lambda: Layer("0", FULL.layers[0].tensors), "number of a layer"),  # type: ignore[arg-type]
        (lambda: Layer(0, ("k",)), "tuple of TensorSpec"),  # type: ignore[arg-type]
        (lambda: TensorSpec(5, "int8", (1, 2)), "name of a tensor"),  # type: ignore[arg-type]
        (lambda: TensorSpec("k", "int8", [1, 2]), "shape must be"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        make()


def test_bytes_of_parts() -> None:
    group = Group(
        GroupKind.FULL, (Layer.kv(0, 2, 8, "bfloat16", v_dim=4), Layer.kv(5, 1, 3, "float32"))
    )
    assert group.per_token
    assert group.stored_shape(group.layers[0].tensors[1], 7) == (2, 7, 4)
    assert group.section_bytes(group.layers[0].tensors[0], 16) == 2 * 16 * 8 * 2
    assert group.raw_bytes(16) == 2 * 16 * (8 + 4) * 2 + 16 * (3 + 3) * 4
    state = Group(GroupKind.STATE, (Layer(1, (TensorSpec("s", "float32", (2, 3, 4)),)),))
    assert not state.per_token
    assert state.raw_bytes(16) == state.raw_bytes(1) == 96
    assert Layout((group, state)).raw_bytes(16) == group.raw_bytes(16) + 96


def test_dtype_sizes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, size in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size
