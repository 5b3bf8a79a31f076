"""Whole blocks copied by address are what copying piece by piece makes of them.

Each test runs with machine code, where that is installed, and with library calls alone.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tests import blocks_world
from tests.blocks_world import (
    BLOCK,
    COUNT,
    LAYOUTS,
    ROOT,
    WAYS,
    dense,
    frames,
    label,
    make,
    paged,
    same,
    space_of,
    tensors,
    who,
)
from tierkv import views
from tierkv.frame import PAGE
from tierkv.layout import Layout, Space, TensorSpec
from tierkv.mover.blockcopies import Blocks, address_of
from tierkv.mover.grids import grid_of
from tierkv.pipeline import Pipeline, deliver, open_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

way_to_copy = blocks_world.way_to_copy


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
            (digests,) = mine.gather(number, number + 1)
            header = open_frame(theirs[number], pipeline.space, *who(number), ROOT)
            assert digests == header.digests
            low = header.payload_offset
            assert ours[number][low:] == theirs[number][low:]
            deliver(header, theirs[number], naive, start)
        grid = grid_of(back, table, BLOCK, starts, writing=True)
        assert grid is not None
        to = Blocks(grid, back, starts, theirs)
        to.scatter(1, COUNT)
        to.scatter(0, 1)
    same(naive, source)
    same(back, source)


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
    assert grid.rows.loose
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
