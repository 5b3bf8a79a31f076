"""Landing whole blocks: verified, in place up to the first that is damaged, stopped in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import blocks_world
from tests.blocks_world import (
    BLOCK,
    COUNT,
    LAYOUTS,
    ROOT,
    encoded,
    frames,
    label,
    make,
    same,
    space_of,
    who,
)
from tierkv.mover.blockcopies import Blocks
from tierkv.mover.grids import grid_of
from tierkv.pipeline import Pipeline, deliver, open_frame

way_to_copy = blocks_world.way_to_copy

DAMAGED = [("large sections", ("dense", "roomy")), ("wide rows", ("paged", ("NHD", 4, "in runs")))]


BYTES = ("_RUN_BYTES", "_TOGETHER_BYTES", "_SPENT_BYTES")


@pytest.mark.parametrize("loosely", [False, True])
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(("name", "way"), [*DAMAGED, ("wide rows", ("dense", "roomy"))], ids=str)
def test_landing_ends_at_the_first_damaged_frame(
    name: str, way: tuple[str, Any], size: str, loosely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is before it is in place; of what is behind it, not a byte is written.

    Nor of itself, unless the view may hold wrong bytes.
    """
    for each in BYTES if size == "large" else ():
        monkeypatch.setattr(f"tierkv.mover.blockcopies.{each}", 1)
    layout = LAYOUTS[name]
    pipeline = Pipeline(space_of(layout))
    source, back = (make(layout, way, fill=fill) for fill in (True, False))
    memory, due = encoded(pipeline, source, layout)
    starts = [n * BLOCK for n in range(COUNT)]
    table = pipeline.table(0, BLOCK)
    with torch.inference_mode():
        grid = grid_of(back, table, BLOCK, starts, writing=True)
        assert grid is not None
        assert Blocks(grid, back, starts, memory).land(0, COUNT, due, loosely=loosely) == COUNT
        same(back, source)
        for wrong, section, at in ((COUNT - 1, table[-1], -1), (1, table[0], 0), (0, table[1], 7)):
            for tensor in back._every:  # type: ignore[attr-defined]
                tensor.zero_()
            memory[wrong][section.offset + at % section.nbytes] ^= 1
            blocks = Blocks(grid, back, starts, memory)
            assert blocks.land(0, COUNT, due, loosely=loosely) == wrong
            memory[wrong][section.offset + at % section.nbytes] ^= 1
            for layer, tensor, *_ in table if loosely else ():
                for _, piece in back.pieces(layer, tensor, starts[wrong], starts[wrong] + BLOCK):
                    piece.zero_()
            naive = make(layout, way, fill=False)
            for number in range(wrong):
                header = open_frame(memory[number], pipeline.space, *who(number), ROOT)
                deliver(header, memory[number], naive, starts[number])
            same(back, naive)


@pytest.mark.parametrize("verified", [False, True])
def test_landing_stops_between_groups_of_frames(
    verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever cancelled waits for a group: what is counted is in place, and nothing behind it."""
    for name in BYTES[:2]:
        monkeypatch.setattr(f"tierkv.mover.blockcopies.{name}", 1)
    layout = LAYOUTS["wide rows"]
    pipeline = Pipeline(space_of(layout))
    source, back = (make(layout, ("dense", "roomy"), fill=fill) for fill in (True, False))
    memory, due = encoded(pipeline, source, layout)
    starts = [n * BLOCK for n in range(COUNT)]
    for calls in range(1, COUNT + 2):
        answers = iter([False] * calls + [True] * COUNT)
        for tensor in back._every:  # type: ignore[attr-defined]
            tensor.zero_()
        with torch.inference_mode():
            grid = grid_of(back, pipeline.table(0, BLOCK), BLOCK, starts, writing=True)
            assert grid is not None
            blocks = Blocks(grid, back, starts, memory)
            done = blocks.land(
                0,
                COUNT,
                None if verified else due,
                stopped=lambda it=answers: next(it),  # type: ignore[misc]
            )
        assert calls - 1 <= done <= calls
        for mine, theirs in zip(back._every, source._every, strict=True):  # type: ignore[attr-defined]
            assert torch.equal(
                mine[:, : done * BLOCK].view(torch.uint8),
                theirs[:, : done * BLOCK].view(torch.uint8),
            )
            assert not mine[:, done * BLOCK :].view(torch.uint8).any()


@pytest.mark.parametrize("name", ["large sections", "wide rows"])
def test_a_checked_scatter_finds_damage(name: str) -> None:
    layout = LAYOUTS[name]
    pipeline = Pipeline(space_of(layout))
    source, back = (make(layout, ("dense", "roomy"), fill=fill) for fill in (True, False))
    (frame,) = frames(pipeline.max_bytes(0), (0,))
    pipeline.encode(label(layout, 0), source, 0, frame)
    header = open_frame(frame, pipeline.space, *who(0), ROOT)
    with torch.inference_mode():
        grid = grid_of(back, header.sections, BLOCK, [0], writing=True)
        assert grid is not None
        assert Blocks(grid, back, [0], [frame]).checked_scatter(0, header.digests)
        last = header.sections[-1]
        frame[last.offset + last.nbytes - 1] ^= 1
        assert not Blocks(grid, back, [0], [frame]).checked_scatter(0, header.digests)
