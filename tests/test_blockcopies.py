"""Whole blocks copied by address are what copying piece by piece makes of them."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tierkv import views
from tierkv.blocks import BlockKey, part_id
from tierkv.frame import PAGE
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.mover.blockcopies import Blocks, address_of
from tierkv.mover.grids import grid_of
from tierkv.pipeline import PartLabel, Pipeline, deliver, open_frame

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


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "large sections"])
def test_blocks_are_gathered_and_scattered_bit_for_bit(name: str, way: tuple[str, Any]) -> None:
    _both_ways(LAYOUTS[name], way)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], ("paged", ("HND", 16, "scattered"))], ids=str)
def test_sections_larger_than_a_tile(way: tuple[str, Any]) -> None:
    _both_ways(LAYOUTS["large sections"], way)


def _both_ways(layout: Layout, way: tuple[str, Any]) -> None:
    pipeline = Pipeline(space_of(layout))
    source, back, naive = (make(layout, way, fill=fill) for fill in (True, False, False))
    nbytes = pipeline.max_bytes(0)
    gaps = (0, 0, 2, 2, 2) if "runs" in str(way) else (1,) * COUNT
    ours, theirs = frames(nbytes, gaps), frames(nbytes, gaps)
    starts = [n * BLOCK for n in range(COUNT)]
    table = pipeline.table(0, BLOCK)
    with torch.inference_mode():
        grid = grid_of(source, table, BLOCK, starts, writing=False)
        assert grid is not None
        mine = Blocks(grid, source, starts, ours)
        for number, start in enumerate(starts):
            pipeline.encode(label(layout, number), source, start, theirs[number])
            digests = mine.gather(number)
            header = open_frame(theirs[number], pipeline.space, *_who(number), ROOT)
            assert tuple(digests) == header.digests
            low = header.payload_offset
            assert ours[number][low:] == theirs[number][low:]
            deliver(header, theirs[number], naive, start)
        grid = grid_of(back, table, BLOCK, starts, writing=True)
        assert grid is not None
        to = Blocks(grid, back, starts, theirs)
        to.scatter(1, COUNT)
        to.scatter(0, 1)
    _same(naive, source)
    _same(back, source)


def _who(number: int) -> tuple[Any, int]:
    return part_id(BlockKey(bytes([number]) * 32), 0), number + 1


def _same(one: View, other: View) -> None:
    for mine, theirs in zip(one._every, other._every, strict=True):  # type: ignore[attr-defined]
        if "Dense" in repr(one):
            pair = [t[:, : BLOCK * COUNT] for t in (mine, theirs)]
        else:
            pages = list(one._block_ids)  # type: ignore[attr-defined]
            pair = [t[pages] for t in (mine, theirs)]
        a, b = (t.contiguous().flatten().view(torch.uint8) for t in pair)
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["large sections", "wide rows"])
def test_a_checked_scatter_stops_at_damage(name: str) -> None:
    """Each section is written only once it was found to be right."""
    layout = LAYOUTS[name]
    pipeline = Pipeline(space_of(layout))
    source, back = (make(layout, ("dense", "roomy"), fill=fill) for fill in (True, False))
    (frame,) = frames(pipeline.max_bytes(0), (0,))
    pipeline.encode(label(layout, 0), source, 0, frame)
    header = open_frame(frame, pipeline.space, *_who(0), ROOT)
    with torch.inference_mode():
        grid = grid_of(back, header.sections, BLOCK, [0], writing=True)
        assert grid is not None
        assert Blocks(grid, back, [0], [frame]).checked_scatter(0, header.digests)
        last = header.sections[-1]
        for tensor in back._every:  # type: ignore[attr-defined]
            tensor.zero_()
        frame[last.offset + last.nbytes - 1] ^= 1
        assert not Blocks(grid, back, [0], [frame]).checked_scatter(0, header.digests)
        written = back._every[len(header.sections) - 1][:, :BLOCK]  # type: ignore[attr-defined]
        assert not written.any()


def test_memory_that_is_shared_is_read_but_not_written() -> None:
    layout = LAYOUTS["wide rows"]

    def shape(spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(1, BLOCK, spec.shape[1], dtype=dtype).expand(spec.shape[0], -1, -1)

    view = views.dense(tensors(layout, shape, fill=False))
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    assert grid_of(view, table, BLOCK, [0], writing=False) is not None
    assert grid_of(view, table, BLOCK, [0], writing=True) is None


def test_no_rule_across_odd_page_borders_or_for_other_shapes() -> None:
    layout = LAYOUTS["kv"]
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    odd = paged(layout, "HND", 10, "in order", fill=False)
    assert odd.map(table, BLOCK) is None
    assert dense(LAYOUTS["wide rows"], "roomy", fill=False).map(table, BLOCK) is None
    assert dense(layout, "roomy", fill=False).map(table, BLOCK) is not None


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_a_partial_block_across_a_page_border_is_not_copied_by_one_rule(order: str) -> None:
    """Blocks of 12 tokens, pages of 8: the 8 tokens of a tail are no page of their own."""
    layout = Layout.uniform(8, 2, 8, "float32")
    space = Space(tierkv.Identity("m", "1"), layout, block_tokens=12)
    source, back = (paged(layout, order, 8, "scattered", fill=fill) for fill in (True, False))
    table = Pipeline(space).table(0, 8)
    assert grid_of(source, table, 8, [24], writing=False) is not None
    assert grid_of(source, table, 8, [24, 12], writing=False) is None
    assert grid_of(back, table, 8, [12], writing=True) is None


def test_a_rule_that_serves_two_tables_gives_each_its_own_grid() -> None:
    """A view need not know that two groups with like tensors have other offsets in their frames."""
    layout = LAYOUTS["kv"]
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    moved = tuple(section._replace(offset=section.offset + PAGE) for section in table)
    view = dense(layout, "roomy", fill=False)
    rule = view.map(table, BLOCK)
    assert rule is not None

    class Forgetful(views.DenseView):
        def map(self, sections: Sequence[tuple[Any, ...]], tokens: int) -> Any:
            return rule

    lazy = Forgetful(view._tensors)  # type: ignore[attr-defined]
    one = grid_of(lazy, table, BLOCK, [0], writing=True)
    other = grid_of(lazy, moved, BLOCK, [0], writing=True)
    assert one is not None
    assert other is not None
    assert one.cuts != other.cuts
    assert grid_of(lazy, moved, BLOCK, [0], writing=True) is other


def test_pieces_of_a_subclass_are_not_passed_over() -> None:
    class Shifted(views.DenseView):
        def pieces(
            self, layer: int, tensor: str, start: int, stop: int
        ) -> Sequence[tuple[int, torch.Tensor]]:
            return [(start, self._find(layer, tensor)[:, start + 1 : stop + 1])]

    layout = LAYOUTS["kv"]
    plain = dense(layout, "roomy", fill=False)
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    assert plain.map(table, BLOCK) is not None
    assert Shifted(plain._tensors).map(table, BLOCK) is None  # type: ignore[attr-defined]


def test_m2_what_is_remembered_keeps_no_tensor_alive() -> None:
    """Without the garbage collector: KV of gigabytes must not wait for it."""
    layout = LAYOUTS["kv"]
    view = dense(layout, "transposed", fill=False)
    views.check(view, layout, BLOCK, writing=True)
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    grid = grid_of(view, table, BLOCK, [0], writing=True)
    assert grid is not None
    assert grid.loose
    tensor = weakref.ref(view._every[0])  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        del view, grid
        assert tensor() is None
    finally:
        gc.enable()


def test_memory_shorter_than_its_frame_is_refused() -> None:
    layout = LAYOUTS["kv"]
    pipeline = Pipeline(space_of(layout))
    view = dense(layout, "roomy", fill=True)
    (frame,) = frames(pipeline.max_bytes(0), (0,))
    grid = grid_of(view, pipeline.table(0, BLOCK), BLOCK, [0], writing=False)
    assert grid is not None
    Blocks(grid, view, [0], [frame])
    with pytest.raises(tierkv.errors.CapacityError):
        Blocks(grid, view, [0], [frame[:-1]])


def test_a_tensor_that_moved_since_the_check_is_looked_at_again() -> None:
    layout = LAYOUTS["kv"]
    view = dense(layout, "roomy", fill=False)
    views.check(view, layout, BLOCK, writing=True)
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    first = view.map(table, BLOCK)
    moved = view._every[0]  # type: ignore[attr-defined]
    moved.data = torch.zeros(*moved.shape, dtype=moved.dtype)
    second = view.map(table, BLOCK)
    assert second is not None
    assert second is not first
    moved.data = moved.data.view(torch.int16)  # the same bits where they were
    with pytest.raises(tierkv.errors.LayoutError, match="int16"):
        views.check(view, layout, BLOCK, writing=True)


def test_a_view_whose_tensor_moved_is_looked_at_again() -> None:
    """What was found out of a tensor does not outlive its memory."""
    layout = LAYOUTS["kv"]
    view = dense(layout, "roomy", fill=False)
    views.check(view, layout, BLOCK, writing=True)
    table = Pipeline(space_of(layout)).table(0, BLOCK)
    first = view.map(table, BLOCK)
    assert view.map(table, BLOCK) is first
    moved = view._every[0]  # type: ignore[attr-defined]
    moved.data = torch.zeros(*moved.shape, dtype=moved.dtype)
    views.check(view, layout, BLOCK, writing=True)
    second = view.map(table, BLOCK)
    assert second is not None
    assert second is not first
    moved.data = torch.zeros(1, 1, 1, dtype=moved.dtype).expand(*moved.shape)
    with pytest.raises(tierkv.errors.LayoutError, match="expanded"):
        views.check(view, layout, BLOCK, writing=True)


def test_the_address_of_memory_is_where_it_begins() -> None:
    data = bytearray(b"0123456789")
    view = memoryview(data)
    assert address_of(view[4:]) == address_of(view) + 4
    assert address_of(view.toreadonly()[4:]) == address_of(view) + 4
