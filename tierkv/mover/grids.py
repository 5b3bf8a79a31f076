"""Whole blocks in host memory, copied by address: a few operations for a batch of them.

A :class:`Grid` joins a view's :class:`tierkv.abc.MemoryMap` to the section table of a kind of
frame: which bytes of a frame go where. With machine code it is a table of places for
:class:`tierkv.jit.copying.Run`; without, :class:`tierkv.mover.rowgrids.Rows`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from tierkv.jit.copying import Place, suits, table_of
from tierkv.jit.xxh3 import STRIPE
from tierkv.layout import DTYPE_BYTES
from tierkv.mover.rowgrids import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import MemoryMap, View
    from tierkv.frame import Section
    from tierkv.jit.copying import Numbers

__all__ = ["Grid", "grid_of", "worthwhile"]

_MANY_SECTIONS: Final = 12
"""Sections, of all blocks together, from which on a few numpy operations for all of them cost less
than looking at each."""
_MANY_BYTES: Final = 1024 * 1024
"""Bytes of all blocks from which on the copies count more than that."""


def worthwhile(blocks: int, sections: Sequence[Section]) -> bool:
    """Whether a grid for so many blocks of a table costs less than looking at each section."""
    if blocks * len(sections) >= _MANY_SECTIONS:
        return True
    return bool(sections) and blocks * sections[-1].end >= _MANY_BYTES


class Grid:
    """Where the raw sections of one kind of frame are in a view, for every block of it.

    Attributes:
        tokens: Tokens of a range.
        units: Ranges of a block.
        shared: Whether elements of the view share memory: then it can be read only.
        places: The table for machine code; None if that cannot do these sections.
        cuts: Each section of the frame with its padding.
        pads: The paddings, where there are any.
        nbytes: Bytes of a frame.
    """

    def __init__(self, found: MemoryMap, sections: Sequence[Section]) -> None:
        self.tokens = found.tokens
        self.units = sections[0].shape[1] // found.tokens
        self._layer = sections[0].layer  # all of them are of one group
        self._sections = sections
        # not `found` itself, which keeps this: a cycle would keep the caller's memory
        self._tensors, self._steps = found.tensors, found.steps
        self.shared = False
        self.cuts = [slice(s.offset, s.end) for s in sections]
        self.pads = [(s.offset + s.nbytes, s.end) for s in sections if s.offset + s.nbytes < s.end]
        self.nbytes = self.cuts[-1].stop
        self._distances: dict[tuple[int, int], int] = {}  # of pages and tokens, to their kind
        self._kinds: list[int] = []
        self.places = self._places()

    def __repr__(self) -> str:
        how = "row by row" if self.places is None else "in machine code"
        return f"<Grid: {len(self.cuts)} sections a block, {how}>"

    @cached_property
    def rows(self) -> Rows:
        """How to copy with library calls."""
        table = (self._sections, self._tensors, self._steps, self._kinds)
        return Rows(*table, self.tokens, self.units)

    def _places(self) -> Numbers | None:
        patterns: dict[tuple[object, ...], tuple[int, int, int, int, int] | None] = {}
        found: list[Place] = []
        able = True
        for section, tensor, step in zip(self._sections, self._tensors, self._steps, strict=True):
            size, shape = DTYPE_BYTES[section.dtype], section.shape
            distances = step[0] * size, step[2] * size
            kind = self._distances.setdefault(distances, len(self._distances))
            self._kinds.append(kind)
            key = (shape, size, step)
            if key not in patterns:
                patterns[key] = self._pattern(shape, size, step[1:])
            pattern = patterns[key]
            if pattern is None:
                able = False
            elif able:
                stripes = (section.end - section.offset) // STRIPE
                found.append(Place(section.offset, tensor.data_ptr(), kind, *pattern, stripes))
        return table_of(found) if able and suits(found) else None

    def _pattern(
        self, shape: tuple[int, ...], size: int, step: tuple[int, ...]
    ) -> tuple[int, int, int, int, int] | None:
        """Heads, step of heads, rows, step of rows, width; None if elements are apart."""
        heads, tokens, dim = shape
        head, token, element = step
        mine = self.tokens
        for count, distance in ((heads, head), (tokens, token), (dim, element)):
            self.shared |= count > 1 and distance == 0
        if (element != 1 and dim > 1) or 0 in shape:
            return None
        rows, width = mine, dim
        if token == dim or mine == 1:
            rows, width = 1, mine * dim
            if self.units == 1 and (head == width or heads == 1):
                heads, width = 1, heads * width
        return heads, head * size, rows, token * size, width * size

    def shifts(self, view: View, starts: Sequence[int]) -> Numbers:
        """Bytes from the beginning of a tensor to each range: ``[kind, block, unit]``.

        Raises:
            LayoutError: if the view does not hold a block.
        """
        units = np.arange(self.units, dtype=np.int64) * self.tokens
        first = np.array(starts, np.int64)[:, None] + units
        pages, lows = view.locate_in(self._layer, first.ravel(), self.tokens)
        found = [pages * page + lows * token for page, token in self._distances]
        return np.array(found, np.int64).reshape(len(found), len(starts), self.units)


def grid_of(
    view: View,
    sections: Sequence[Section],
    tokens: int,
    starts: Sequence[int],
    *,
    writing: bool,
) -> Grid | None:
    """The grid of raw frames with these sections in a view; inside ``view.writing()``.

    Args:
        view: The caller's memory.
        sections: Their section table, of a group that has a token axis.
        tokens: Tokens of a block.
        starts: First token of each block.
        writing: Whether the view is written.

    Returns:
        None if the view has no rule for where its blocks are, or has to be looked at block by
        block to say what is wrong with it. Nor for a partial block that does not begin at a
        multiple of its ranges: these could then cross the border of a page.
    """
    found = view.map(sections, tokens) if tokens else None
    if found is None or any(start % found.tokens for start in starts):
        return None
    made = found.made
    if made is None or made[0] is not sections:
        made = found.made = sections, Grid(found, sections)
    grid = cast("Grid", made[1])
    return None if writing and grid.shared else grid
