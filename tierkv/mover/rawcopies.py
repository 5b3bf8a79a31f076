"""Raw sections in host memory: where they go, and where they are. Few calls per section.

A frame of a deep model has many small sections, so that what is called per section counts as much
as the copies themselves: one whose memory in the view is contiguous is copied by address, without
a tensor made for it.
"""

from __future__ import annotations

from ctypes import memmove
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tierkv.errors import IntegrityError, LayoutError
from tierkv.layout import DTYPE_BYTES
from tierkv.sections import bits_over, find_pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import View
    from tierkv.frame import Header, Section

__all__ = ["Pair", "copy_pairs", "raw_pairs"]

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Pair(NamedTuple):
    """One copy, bit for bit.

    Attributes:
        target: Memory of the view.
        source: Integers of the same shape and size; None if both sides are contiguous.
        address: Where the source begins.
        nbytes: Its length.
    """

    target: torch.Tensor
    source: torch.Tensor | None
    address: int = 0
    nbytes: int = 0


@lru_cache(maxsize=64)
def _torch_dtypes(name: str) -> tuple[torch.dtype, torch.dtype]:
    """A dtype by its name, and the integer of the same size: its bits."""
    import torch

    return getattr(torch, name), getattr(torch, _INTEGERS[DTYPE_BYTES[name]])


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
    words: dict[str, torch.Tensor] = {}
    length, stop = len(frame), start + header.tokens
    for section in sections:
        layer, tensor, dtype, shape, _, offset, nbytes, _ = section
        low, size = offset - base, DTYPE_BYTES[dtype]
        if low < 0 or low + nbytes > length:
            raise IntegrityError(f"layer {layer}, {tensor!r} is not inside the {length} bytes")
        if not nbytes:
            continue
        whole = words.get(dtype)
        if whole is None:
            whole = words[dtype] = bits_over(frame, dtype, (length // size,))
        kind, bits = _torch_dtypes(dtype)
        found = view.pieces(layer, tensor, start, stop) if header.per_token else ()
        target = found[0][1] if len(found) == 1 and found[0][0] == start else None
        if target is not None and (target.dtype is not kind or target.shape != shape):
            target = None  # `find_pieces` says what is wrong with it
        if target is not None and target.is_cpu and target.is_contiguous():
            out.append([Pair(target, None, whole.data_ptr() + low, nbytes)])
            continue
        source = whole.as_strided(shape, _strides(shape), low // size)
        if target is not None:
            _check(section, target)
            out.append([Pair(target.view(bits), source)])
            continue
        out.append(pairs := [])
        for at, piece in find_pieces(view, section[:4], start, header.tokens, header.per_token):
            _check(section, piece)
            some = source if piece.shape == shape else source.narrow(1, at, piece.shape[1])
            pairs.append(Pair(piece.view(bits), some))
    return out


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
