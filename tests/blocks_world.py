"""Views of many kinds, and frames, for tests of whole blocks copied by address."""

from __future__ import annotations

import itertools
import mmap
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tierkv import jit, views
from tierkv.blocks import BlockKey, part_id
from tierkv.frame import PAGE
from tierkv.jit import copying
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.pipeline import PartLabel, Pipeline, open_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import View

BLOCK, COUNT = 16, 5
ROOT = BlockKey(bytes(32))
LAYOUTS = {
    "kv": Layout.uniform(3, 2, 8, "bfloat16"),
    "wide rows": Layout.uniform(2, 4, 128, "float16"),
    "large sections": Layout.uniform(1, 8, 2048, "float32"),
    "odd sizes": Layout.uniform(2, 3, 5, "float8_e4m3fn"),
    "grouped queries, K and V differ": Layout(
        (Group(GroupKind.FULL, (Layer.kv(0, 8, 16, "bfloat16"), Layer.kv(4, 1, 64, "float32", 4))),)
    ),
    "latent": Layout(
        (Group(GroupKind.LATENT, (Layer(0, (TensorSpec("latent", "float64", (1, 48)),)),)),)
    ),
    "flags and nothing": Layout(
        (
            Group(
                GroupKind.FULL,
                (Layer(0, (TensorSpec("k", "bool", (2, 64)), TensorSpec("v", "int32", (0, 4)))),),
            ),
        )
    ),
}
SPREADS: dict[str, tuple[int, ...]] = {
    "in order": tuple(range(12)),
    "backwards": tuple(range(11, -1, -1)),
    "scattered": (7, 2, 9, 4, 11, 0, 1, 3, 10, 5, 6, 8),
    "in runs": (3, 4, 5, 9, 10, 0, 1, 2, 11, 6, 7, 8),
}
WAYS_TO_COPY = ["library calls"]
if jit.host() is not None:
    WAYS_TO_COPY += ["machine code", "machine code, past the caches"]


@pytest.fixture(autouse=True, params=WAYS_TO_COPY)
def way_to_copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With machine code and without."""
    if request.param == "library calls":
        monkeypatch.setattr(copying, "ready", bool)
    else:
        copying.prepare()
        assert copying.ready()
        monkeypatch.setattr(copying, "PAST_CACHES", 0 if "past" in request.param else 1 << 40)
    return str(request.param)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Any bit pattern, NaN payloads and odd booleans too."""
    raw = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
    return raw.view(tensor.dtype).view(tensor.shape)


def tensors(layout: Layout, shape: Any, *, fill: bool) -> dict[int, dict[str, torch.Tensor]]:
    """A tensor for each of the layout, with bits or zeros."""
    made: dict[int, dict[str, torch.Tensor]] = {}
    for layer in layout.groups[0].layers:
        for spec in layer.tensors:
            tensor = shape(spec, getattr(torch, spec.dtype))
            if fill:
                tensor.copy_(bits(tensor)) if tensor.numel() else None
            made.setdefault(layer.index, {})[spec.name] = tensor
    return made


def dense(layout: Layout, kind: str, *, fill: bool) -> View:
    """Dense memory: contiguous, with room behind, transposed, or beginning at an odd address."""

    def shape(spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
        heads, dim = spec.shape
        tokens = BLOCK * COUNT
        if kind == "transposed":
            return torch.zeros(tokens, heads, dim, dtype=dtype).transpose(0, 1)
        if kind == "every other element":
            return torch.zeros(heads, tokens, 2 * dim, dtype=dtype)[..., ::2]
        if kind == "misaligned":
            size = DTYPE_BYTES[spec.dtype]
            raw = torch.zeros(heads * tokens * dim * size + 64, dtype=torch.uint8)
            low = (-raw.data_ptr()) % 64 + size  # as far from a cache line as the dtype allows
            flat = raw[low : low + heads * tokens * dim * size].view(dtype)
            return flat.view(heads, tokens, dim)
        return torch.zeros(heads, tokens + 7, dim, dtype=dtype)

    return views.dense(tensors(layout, shape, fill=fill))


def paged(layout: Layout, order: str, page: int, spread: str, *, fill: bool) -> View:
    """Pages of a pool."""
    pages = SPREADS[spread]
    wanted = BLOCK * COUNT // page
    ids = list(pages[:wanted]) if wanted <= len(pages) else list(range(wanted))[::-1]

    def shape(spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
        heads, dim = spec.shape
        inner = (heads, page, dim) if order == "HND" else (page, heads, dim)
        return torch.zeros(max(ids) + 2, *inner, dtype=dtype)

    made = tensors(layout, shape, fill=fill)
    return views.paged(made, ids, page_tokens=page, order=order)  # type: ignore[arg-type]


WAYS = [("dense", k) for k in ("roomy", "transposed", "every other element", "misaligned")] + [
    ("paged", way)
    for way in itertools.product(("HND", "NHD"), (4, 16, 80), SPREADS)
    if way[1] == BLOCK or way[2] in ("backwards", "in runs")
]


def make(layout: Layout, way: tuple[str, Any], *, fill: bool) -> View:
    """A view of the kind."""
    if way[0] == "dense":
        return dense(layout, way[1], fill=fill)
    return paged(layout, *way[1], fill=fill)


def frames(nbytes: int, gaps: Sequence[int]) -> list[memoryview]:
    """Page-aligned memory for frames: in one piece of memory, so many pages apart."""
    size = -(-nbytes // PAGE) * PAGE
    whole = memoryview(mmap.mmap(-1, (size + PAGE * 4) * (len(gaps) + 1)))
    out, at = [], 0
    for gap in gaps:
        out.append(whole[at : at + nbytes])
        at += size + gap * PAGE
    return out


def label(layout: Layout, number: int, tokens: int = BLOCK) -> PartLabel:
    """What the frame of one block says."""
    del layout
    key = BlockKey(bytes([number]) * 32)
    return PartLabel(part_id(key, 0), number + 1, ROOT, None, "exact", tokens)


def space_of(layout: Layout) -> Space:
    """A space with that layout."""
    return Space(tierkv.Identity("m", "1"), layout, block_tokens=BLOCK)


def who(number: int) -> tuple[Any, int]:
    """Part and generation that :func:`label` gives a block."""
    return part_id(BlockKey(bytes([number]) * 32), 0), number + 1


def same(one: View, other: View) -> None:
    """Whether two views hold the same bits in the blocks' tokens."""
    for mine, theirs in zip(one._every, other._every, strict=True):  # type: ignore[attr-defined]
        if "Dense" in repr(one):
            pair = [t[:, : BLOCK * COUNT] for t in (mine, theirs)]
        else:
            pages = list(one._block_ids)  # type: ignore[attr-defined]
            pair = [t[pages] for t in (mine, theirs)]
        a, b = (t.contiguous().flatten().view(torch.uint8) for t in pair)
        assert torch.equal(a, b)


def encoded(
    pipeline: Pipeline, source: View, layout: Layout
) -> tuple[list[memoryview], list[tuple[bytes, ...]]]:
    """A frame of each block, and the checksums of its sections."""
    memory = frames(pipeline.max_bytes(0), (1,) * COUNT)
    due = []
    for number in range(COUNT):
        pipeline.encode(label(layout, number), source, number * BLOCK, memory[number])
        due.append(open_frame(memory[number], pipeline.space, *who(number), ROOT).digests)
    return memory, due
