"""Parts for tests: a layout with every kind of group, random views, labels, whole frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierkv import views
from tierkv.blocks import Identity, KeyChain, part_id, split_part
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.pipeline import Encoded, PartLabel, Pipeline, open_frame, verify
from tierkv.testing.codecs import sample

if TYPE_CHECKING:
    from tierkv.abc import View
    from tierkv.frame import Header

__all__ = [
    "BLOCK",
    "MIXED",
    "label_for",
    "memory_for",
    "mixed_space",
    "new_frame",
    "one_layer",
    "opened",
    "read",
]

BLOCK = 16

_STATES = (TensorSpec("conv", "float32", (4, 16)), TensorSpec("ssm", "bfloat16", (2, 16, 8)))
_LATENT = (TensorSpec("latent", "bfloat16", (1, 96)),)

MIXED = Layout(
    (
        Group(
            GroupKind.FULL,
            (Layer.kv(0, 2, 8, "bfloat16", v_dim=12), Layer.kv(3, 3, 80, "float16")),
        ),
        Group(GroupKind.SLIDING, (Layer.kv(1, 1, 63, "float32"),), window=32),
        Group(GroupKind.LATENT, (Layer(2, _LATENT),)),
        Group(GroupKind.STATE, (Layer(4, _STATES),)),
    )
)
"""One group of each kind; layers differ in heads, sizes and dtypes."""


def mixed_space() -> Space:
    """A space of :data:`MIXED`."""
    return Space(Identity("m", "r"), MIXED, BLOCK)


def one_layer(dtype: str, heads: int = 2, dim: int = 32, block_tokens: int = BLOCK) -> Space:
    """A space of one layer with one K and one V."""
    return Space(Identity("m", "r"), Layout.uniform(1, heads, dim, dtype), block_tokens)


def memory_for(layout: Layout, tokens: int, seed: int | None) -> views.DenseView:
    """A dense view of fresh memory: random values, or zeros for ``seed=None``."""
    per_layer: dict[int, dict[str, torch.Tensor]] = {}
    states: dict[int, dict[str, torch.Tensor]] = {}
    for group in layout.groups:
        target = per_layer if group.per_token else states
        for layer in group.layers:
            for t in layer.tensors:
                value = sample(t.dtype, group.stored_shape(t, tokens), seed or 0)
                named = target.setdefault(layer.index, {})
                named[t.name] = value if seed is not None else torch.zeros_like(value)
    return views.dense(per_layer, states)


def label_for(space: Space, group: int = 0, tokens: int | None = None, **changes: Any) -> PartLabel:
    """Label of the second block of tenant ``"acme"``."""
    chain = KeyChain(space.root("acme"), space.block_tokens)
    chain.follow(range(2 * space.block_tokens))
    fields: dict[str, Any] = {
        "part": part_id(chain.keys[1], group),
        "generation": 9,
        "root": space.root("acme"),
        "parent": chain.keys[0],
        "fidelity": "exact",
        "tokens": space.block_tokens if tokens is None else tokens,
        "tenant": "acme",
    }
    return PartLabel(**{**fields, **changes})


def new_frame(
    pipeline: Pipeline, view: View, start: int = 0, **label: Any
) -> tuple[memoryview, Encoded, PartLabel]:
    """Encode a part into memory that is dirty, as recycled memory is.

    Args:
        pipeline: What encodes it.
        view: Where the KV is.
        start: First token of the block in the view.
        **label: See :func:`label_for`.
    """
    named = label_for(pipeline.space, **label)
    size = pipeline.max_bytes(split_part(named.part)[1], named.tokens)
    out = memoryview(bytearray(b"\xdb" * size))
    encoded = pipeline.encode(named, view, start, out)
    return out[: encoded.nbytes], encoded, named


def opened(frame: memoryview, space: Space, label: PartLabel) -> Header:
    """Open and verify a frame.

    Raises:
        IntegrityError: if anything is wrong with it.
    """
    header = open_frame(frame, space, label.part, label.generation, label.root)
    verify(header, frame)
    return header


def read(
    view: View, layout: Layout, group: int, start: int, tokens: int
) -> dict[tuple[int, str], torch.Tensor]:
    """Copies of what a view holds for one part, by layer and tensor."""
    found = {}
    for layer in layout.groups[group].layers:
        for t in layer.tensors:
            if layout.groups[group].per_token:
                parts = view.pieces(layer.index, t.name, start, start + tokens)
                found[layer.index, t.name] = torch.cat([p for _, p in parts], 1).clone()
            else:
                found[layer.index, t.name] = view.state(layer.index, t.name).clone()
    return found
