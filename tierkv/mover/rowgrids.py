"""Whole blocks in host memory as rows for ``memmove`` and ``copy_``: what library calls can do.

The way without machine code (:mod:`tierkv.jit.copying`), with the same bytes. A row is contiguous
on both sides: one ``memmove``, which lets go of the GIL, and is called from C for all rows of a
block. Sections whose rows are short (where tokens come before heads, say) are *loose*: torch copies
them, many blocks in one operation where both sides are at equal distances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tierkv.layout import DTYPE_BYTES
from tierkv.pipeline import TILE
from tierkv.sections import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tierkv.frame import Section
    from tierkv.jit.copying import Numbers

__all__ = ["Loose", "Rows", "Tile"]

_LEAST_ROW: Final = 2048
"""Shorter rows cost more to call for than torch needs to copy them with strides."""
_WHOLE: Final = 512 * 1024
"""A section up to this is summed in one call all the same: piece by piece it takes half as long
again."""


class _Pattern(NamedTuple):
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


class Tile(NamedTuple):
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


class Rows:
    """The rows of one kind of frame, and where they are in a view.

    Args:
        sections: The section table.
        tensors: Which tensor each is of.
        steps: Of each: elements from one page, head, token and element to the next.
        kinds: Of each: how its ranges follow each other in the view.
        tokens: Tokens of a range.
        units: Ranges of a block.

    Attributes:
        loose: Sections without rows.
        lengths: Bytes of each row.
        tiles: In which order to copy and sum; empty if there are loose sections.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        tensors: Sequence[torch.Tensor],
        steps: Sequence[tuple[int, int, int, int]],
        kinds: Sequence[int],
        tokens: int,
        units: int,
    ) -> None:
        self._tokens, self._count = tokens, units
        self.loose: list[Loose] = []
        patterns: dict[tuple[object, ...], _Pattern | None] = {}
        rows: list[_Pattern] = []
        places: list[tuple[int, int, int]] = []  # section's offset, tensor's address, kind
        counts: list[int] = []
        for section, tensor, step, kind in zip(sections, tensors, steps, kinds, strict=True):
            size, shape = DTYPE_BYTES[section.dtype], section.shape
            if not section.nbytes:
                counts.append(0)
                continue
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
        return f"<Rows: {len(self.lengths)} a block, {len(self.loose)} loose sections>"

    def _pattern(self, shape: tuple[int, ...], size: int, step: tuple[int, ...]) -> _Pattern | None:
        """Rows of one section; None if they are short."""
        heads, _, dim = shape
        head, token, element = step
        mine = self._tokens
        if (element != 1 and dim > 1) or (token != dim and mine > 1):
            return None
        width = mine * dim * size
        if self._count == 1 and (head == mine * dim or heads == 1):
            heads, width = 1, heads * width
        if width < _LEAST_ROW and heads * self._count > 1:
            return None
        cut = np.arange(0, width, TILE, dtype=np.int64)  # rows that can be summed from the cache
        number = np.arange(heads * self._count, dtype=np.int64)[:, None]  # in the frame's order
        inside = number * width + cut
        ahead = number // self._count * (head * size) + cut
        lengths = np.broadcast_to(np.minimum(width - cut, TILE), inside.shape)
        units = np.broadcast_to(number % self._count, inside.shape)
        return _Pattern(inside.ravel(), ahead.ravel(), lengths.ravel(), units.ravel())

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
        shape = (heads, self._tokens, dim)
        return Loose(bits, section.offset, size, shape, tokens, step[1:], kind)

    def _join(self, rows: Sequence[_Pattern], places: Numbers) -> None:
        counts = [len(r.inside) for r in rows]
        offsets, addresses, kinds = np.repeat(places, counts, axis=0).T
        empty = np.zeros(0, np.int64)
        self._inside = np.concatenate([empty, *(r.inside for r in rows)]) + offsets
        self._address = np.concatenate([empty, *(r.ahead for r in rows)]) + addresses
        self._units = np.concatenate([empty, *(r.units for r in rows)])
        self._kinds = kinds
        self.lengths: list[int] = np.concatenate([empty, *(r.lengths for r in rows)]).tolist()

    def _tiles(self, sections: Sequence[Section], counts: Sequence[int]) -> Iterator[Tile]:
        at = count = size = 0
        cuts: list[slice] = []
        for number, section in enumerate(sections):
            if cuts and size + section.nbytes > TILE:
                yield Tile(count, cuts, more=False, whole=True)
                count, size, cuts = 0, 0, []
            if section.nbytes <= _WHOLE:
                count, size = count + counts[number], size + section.nbytes
                cuts.append(slice(section.offset, section.end))
                at += counts[number]
                continue
            low, rows = section.offset, 0
            for row in range(at, at + counts[number]):
                rows, size = rows + 1, size + self.lengths[row]
                last = row == at + counts[number] - 1
                if size >= TILE or last:
                    high = section.end if last else low + size
                    yield Tile(rows, [slice(low, high)], more=not last, whole=False)
                    low, rows, size = high, 0, 0
            at += counts[number]
        if cuts:
            yield Tile(count, cuts, more=False, whole=True)

    def addresses(self, shifts: Numbers, frames: Numbers) -> tuple[Numbers, Numbers]:
        """Addresses of each row of each block: in the view, and in its frame."""
        near = self._address[:, None] + shifts[self._kinds, :, self._units]
        return near.T, frames[:, None] + self._inside
