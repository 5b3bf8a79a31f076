"""Raw sections in host memory: where they go, and where they are. Few calls per section.

A frame of a deep model has many small sections, so that what is called per section counts as much
as the copies themselves: one whose memory in the view is contiguous is copied by address, without
a tensor made for it.
"""

from __future__ import annotations

from ctypes import memmove
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierkv.chains import RAW
from tierkv.errors import IntegrityError, LayoutError
from tierkv.layout import DTYPE_BYTES
from tierkv.sections import INTEGERS, bits_over, find_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import View
    from tierkv.frame import Header, Section

__all__ = ["Pair", "all_raw", "copy_pairs", "raw_pairs"]

_REMEMBERED = 64

Pair = tuple["torch.Tensor", "torch.Tensor | None", int, int]
"""One copy, bit for bit: memory of the view; integers of the same shape and size to copy there, or
None where both sides are contiguous; then where the source begins, and its length in bytes."""


class _Row(NamedTuple):
    """What a section needs for its copies, found out once for all frames of a group."""

    layer: int
    tensor: str
    shape: tuple[int, ...]
    kind: torch.dtype
    offset: int
    nbytes: int
    section: Section


class _Table(NamedTuple):
    sections: Sequence[Section]
    rows: list[_Row]
    raw: bool


# Frames of one group share one tuple of sections: by its identity, for a hash would read it all.
_tables: dict[int, _Table] = {}


def _table(sections: Sequence[Section]) -> _Table:
    table = _tables.get(id(sections))
    if table is not None and table.sections is sections:
        return table
    rows = [
        _Row(*s[:2], s.shape, _torch_dtypes(s.dtype)[0], s.offset, s.nbytes, s) for s in sections
    ]
    table = _Table(sections, rows, all(s.chain == RAW for s in sections))
    if isinstance(sections, tuple):  # it cannot change
        if len(_tables) >= _REMEMBERED:
            _tables.clear()
        _tables[id(sections)] = table
    return table


def all_raw(header: Header) -> bool:
    """Whether every section of a frame is stored raw."""
    return _table(header.sections).raw


@lru_cache(maxsize=64)
def _torch_dtypes(name: str) -> tuple[torch.dtype, torch.dtype]:
    """A dtype by its name, and the integer of the same size: its bits."""
    import torch

    return getattr(torch, name), getattr(torch, INTEGERS[DTYPE_BYTES[name]])


@lru_cache(maxsize=256)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def raw_pairs(
    header: Header,
    sections: Sequence[Section],
    frame: memoryview,
    base: int,
    view: View,
    start: int,
) -> list[list[Pair]]:
    """What to copy, bit for bit, for these sections, which are all stored raw.

    Args:
        header: Header of the frame.
        sections: Some of its sections.
        frame: Its verified bytes from offset ``base`` on, aligned as pages are.
        base: See ``frame``.
        view: Where they go; entered for writing.
        start: Token of the view at which the block starts.

    Returns:
        For each section that has bytes: its copies. Both sides must be kept until they ran.

    Raises:
        IntegrityError: if a section is not inside ``frame``.
        LayoutError: if the view does not fit.
    """
    out: list[list[Pair]] = []
    length, stop, per_token = len(frame), start + header.tokens, header.per_token
    address = np.frombuffer(frame, np.uint8).__array_interface__["data"][0] - base
    for layer, tensor, shape, kind, offset, nbytes, section in _table(sections).rows:
        if offset < base or offset + nbytes > base + length:
            raise IntegrityError(f"layer {layer}, {tensor!r} is not inside the {length} bytes")
        if not nbytes:
            continue
        found = view.pieces(layer, tensor, start, stop) if per_token else ()
        target = found[0][1] if len(found) == 1 and found[0][0] == start else None
        if target is not None and target.dtype is kind and target.shape == shape:
            if target.is_cpu and target.is_contiguous():
                out.append([(target, None, address + offset, nbytes)])
                continue
        else:
            target = None  # `find_pieces` says what is wrong with it
        out.append(_strided(header, section, frame, base, view, start, target))
    return out


def _strided(
    header: Header,
    section: Section,
    frame: memoryview,
    base: int,
    view: View,
    start: int,
    target: torch.Tensor | None,
) -> list[Pair]:
    """The copies of a section whose memory in the view is not contiguous, or in several pieces."""
    shape, size = section.shape, DTYPE_BYTES[section.dtype]
    whole = bits_over(frame, section.dtype, (len(frame) // size,))
    source = whole.as_strided(shape, _strides(shape), (section.offset - base) // size)
    bits = _torch_dtypes(section.dtype)[1]
    if target is not None:
        _check(section, target)
        return [(target.view(bits), source, 0, 0)]
    pairs: list[Pair] = []
    for at, piece in find_pieces(view, section[:4], start, header.tokens, header.per_token):
        _check(section, piece)
        some = source if piece.shape == shape else source.narrow(1, at, piece.shape[1])
        pairs.append((piece.view(bits), some, 0, 0))
    return pairs


def _check(section: Section, piece: torch.Tensor) -> None:
    strides = piece.stride()
    if 0 in strides and any(
        step == 0 and size > 1 for step, size in zip(strides, piece.shape, strict=True)
    ):
        raise LayoutError(
            f"layer {section.layer}, {section.tensor!r}: several elements of the view share "
            "memory (an expanded tensor); it can be stored, not loaded into"
        )


def copy_pairs(pairs: Sequence[Pair]) -> None:
    """Copy the pairs of a section, without the GIL; inside ``view.writing()``."""
    for target, source, address, nbytes in pairs:
        if source is not None:
            target.copy_(source)
        else:  # ctypes lets go of the GIL for it
            memmove(target.data_ptr(), address, nbytes)
