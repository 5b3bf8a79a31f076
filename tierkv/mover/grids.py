"""Whole blocks in host memory, copied by address: a few numpy operations for a batch of them.

A :class:`Grid` joins a view's :class:`tierkv.abc.MemoryMap` to the section table of a kind of
frame: which bytes of a frame go where, as *rows* of contiguous bytes. Each row is one ``memmove``,
which lets go of the GIL, and is called from C for all rows of a block. Sections whose rows are
short (where tokens come before heads, say) are *loose*: torch copies them, many blocks in one
operation where both sides are at equal distances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np

from tierkv.layout import DTYPE_BYTES
from tierkv.pipeline import TILE
from tierkv.sections import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from tierkv.abc import MemoryMap, View
    from tierkv.frame import Section

    Numbers = NDArray[np.int64]

__all__ = ["WORTHWHILE", "Grid", "Loose", "grid_of"]

_LEAST_ROW: Final = 2048
"""Shorter rows cost more to call for than torch needs to copy them with strides."""
_WHOLE: Final = 512 * 1024
"""A section up to this is summed in one call all the same: piece by piece it takes half as long
again."""
WORTHWHILE: Final = 12
"""Sections, of all blocks together, below which looking at each of them costs less than a few
numpy operations for all."""


class _Rows(NamedTuple):
    """Rows of the sections of one shape and stride.

    Attributes:
        inside: Where each begins in the section.
        ahead: How far behind the beginning of its range it begins in the view.
        lengths: Bytes of each.
        units: The range of the block that it is in.
    """

    inside: Numbers
    ahead: Numbers
    lengths: Numbers
    units: Numbers


class _Tile(NamedTuple):
    """Rows that are copied together, and what can be summed then.

    Attributes:
        rows: How many.
        cuts: Complete sections, or one piece of a section.
        more: Whether it is a piece that is not the last of its section.
        whole: Whether they are complete sections.
    """

    rows: int
    cuts: list[slice]
    more: bool
    whole: bool


class Loose(NamedTuple):
    """A section that torch copies. Numbers are elements of ``size`` bytes.

    Attributes:
        bits: All of the tensor, as integers.
        offset: Where the section begins in the frame.
        size: Bytes of an element.
        shape: Heads, tokens of a range, dim.
        tokens: Tokens of a block.
        step: From one head, token and element to the next, in the view.
        kind: How its ranges follow each other in the view.
    """

    bits: torch.Tensor
    offset: int
    size: int
    shape: tuple[int, int, int]
    tokens: int
    step: tuple[int, int, int]
    kind: int


class Grid:
    """Where the raw sections of one kind of frame are in a view, for every block of it.

    Attributes:
        tokens: Tokens of a range.
        units: Ranges of a block.
        shared: Whether elements of the view share memory: then it can be read only.
        loose: Sections without rows.
        lengths: Bytes of each row.
        cuts: Each section of the frame with its padding.
        pads: The paddings, where there are any.
        tiles: In which order to copy and sum; empty if there are loose sections.
    """

    def __init__(self, found: MemoryMap, sections: Sequence[Section]) -> None:
        self.tokens = found.tokens
        self.units = sections[0].shape[1] // found.tokens
        self._layer = sections[0].layer  # all of them are of one group
        # not `found` itself, which keeps this: a cycle would keep the caller's memory
        self._tensors = found.tensors
        self.shared = False
        self.loose: list[Loose] = []
        self.cuts = [slice(s.offset, s.end) for s in sections]
        self.pads = [(s.offset + s.nbytes, s.end) for s in sections if s.offset + s.nbytes < s.end]
        self._steps: dict[tuple[int, int], int] = {}
        patterns: dict[tuple[object, ...], _Rows | None] = {}
        rows: list[_Rows] = []
        places: list[tuple[int, int, int]] = []  # section's offset, tensor's address, kind
        counts: list[int] = []
        for section, tensor, step in zip(sections, found.tensors, found.steps, strict=True):
            size, shape = DTYPE_BYTES[section.dtype], section.shape
            if not section.nbytes:
                counts.append(0)
                continue
            kind = self._steps.setdefault((step[0] * size, step[2] * size), len(self._steps))
            key = (shape, size, step)
            if key not in patterns:
                patterns[key] = self._pattern(shape, size, step[1:])
            pattern = patterns[key]
            if pattern is None:
                self.loose.append(self._left_over(section, tensor, step, kind))
                continue
            rows.append(pattern)
            counts.append(len(pattern.inside))
            places.append((section.offset, tensor.data_ptr(), kind))
        self._join(rows, np.array(places, np.int64).reshape(-1, 3))
        self.tiles = [] if self.loose else list(self._tiles(sections, counts))

    def __repr__(self) -> str:
        return f"<Grid: {len(self.lengths)} rows a block, {len(self.loose)} loose sections>"

    def _pattern(self, shape: tuple[int, ...], size: int, step: tuple[int, ...]) -> _Rows | None:
        """Rows of one section; None if they are short."""
        heads, tokens, dim = shape
        head, token, element = step
        mine = self.tokens
        for count, distance in ((heads, head), (tokens, token), (dim, element)):
            self.shared |= count > 1 and distance == 0
        if (element != 1 and dim > 1) or (token != dim and mine > 1):
            return None
        width = mine * dim * size
        if self.units == 1 and (head == mine * dim or heads == 1):
            heads, width = 1, heads * width
        if width < _LEAST_ROW and heads * self.units > 1:
            return None
        cut = np.arange(0, width, TILE, dtype=np.int64)  # rows that can be summed from the cache
        number = np.arange(heads * self.units, dtype=np.int64)[:, None]  # in the frame's order
        inside = number * width + cut
        ahead = number // self.units * (head * size) + cut
        lengths = np.broadcast_to(np.minimum(width - cut, TILE), inside.shape)
        units = np.broadcast_to(number % self.units, inside.shape)
        return _Rows(inside.ravel(), ahead.ravel(), lengths.ravel(), units.ravel())

    def _left_over(
        self,
        section: Section,
        tensor: torch.Tensor,
        step: tuple[int, int, int, int],
        kind: int,
    ) -> Loose:
        import torch

        size = DTYPE_BYTES[section.dtype]
        heads, tokens, dim = section.shape
        bits = tensor.view(getattr(torch, INTEGERS[size]))
        shape = (heads, self.tokens, dim)
        return Loose(bits, section.offset, size, shape, tokens, step[1:], kind)

    def _join(self, rows: Sequence[_Rows], places: Numbers) -> None:
        counts = [len(r.inside) for r in rows]
        offsets, addresses, kinds = np.repeat(places, counts, axis=0).T
        empty = np.zeros(0, np.int64)
        self._inside = np.concatenate([empty, *(r.inside for r in rows)]) + offsets
        self._address = np.concatenate([empty, *(r.ahead for r in rows)]) + addresses
        self._units = np.concatenate([empty, *(r.units for r in rows)])
        self._kinds = kinds
        self.lengths: list[int] = np.concatenate([empty, *(r.lengths for r in rows)]).tolist()

    def _tiles(self, sections: Sequence[Section], counts: Sequence[int]) -> Iterator[_Tile]:
        at = count = size = 0
        cuts: list[slice] = []
        for number, section in enumerate(sections):
            if cuts and size + section.nbytes > TILE:
                yield _Tile(count, cuts, more=False, whole=True)
                count, size, cuts = 0, 0, []
            if section.nbytes <= _WHOLE:
                count, size = count + counts[number], size + section.nbytes
                cuts.append(self.cuts[number])
                at += counts[number]
                continue
            low, rows = section.offset, 0
            for row in range(at, at + counts[number]):
                rows, size = rows + 1, size + self.lengths[row]
                last = row == at + counts[number] - 1
                if size >= TILE or last:
                    high = section.end if last else low + size
                    yield _Tile(rows, [slice(low, high)], more=not last, whole=False)
                    low, rows, size = high, 0, 0
            at += counts[number]
        if cuts:
            yield _Tile(count, cuts, more=False, whole=True)

    def rows(self, shifts: Numbers, frames: Numbers) -> tuple[Numbers, Numbers]:
        """Addresses of each row of each block: in the view, and in its frame."""
        near = self._address[:, None] + shifts[self._kinds, :, self._units]
        return near.T, frames[:, None] + self._inside

    def shifts(self, view: View, starts: Sequence[int]) -> Numbers:
        """Bytes from the beginning of a tensor to each range: ``[kind, block, unit]``.

        Raises:
            LayoutError: if the view does not hold a block.
        """
        units = np.arange(self.units, dtype=np.int64) * self.tokens
        first = np.array(starts, np.int64)[:, None] + units
        pages, lows = view.locate_in(self._layer, first.ravel(), self.tokens)
        found = [pages * page + lows * token for page, token in self._steps]
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
