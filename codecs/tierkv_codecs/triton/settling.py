"""Kernels over groups: from what the tensor is like to what its codes are made with, and back.

One number for each group here, a row of them for each section; grid as in
:mod:`tierkv_codecs.triton.groups`.
"""

from __future__ import annotations

from tierkv_codecs.triton.arithmetic import bytes_in, bytes_out, quotient, reciprocal
from tierkv_codecs.triton.language import jit, tl

__all__ = [
    "magnitudes",
    "magnitudes_in",
    "ranges",
    "ranges_in",
    "rows",
    "steps",
    "steps_in",
    "widths",
]


def _width(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Width of a step of ``int8``; see :func:`tierkv_codecs.int8`."""
    scale = quotient(high - low, tl.full(low.shape, 255.0, tl.float32))
    tiny = 1.1754943508222875e-38  # 2 ** -126
    return tl.where((scale < tiny) & (high > low), tiny, scale)


width = jit(_width)


def _ranges(
    low: tl.tensor,
    high: tl.tensor,
    out: tl.tensor,
    groups: tl.tensor,
    pitch: tl.tensor,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``int8``: write minima and maxima; ``high`` becomes the inverse of the step."""
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    least = tl.load(low + section * groups + g, inside, 0)
    most = tl.load(high + section * groups + g, inside, 0)
    to = out + section * pitch + g * ITEM
    bytes_out(to, least, inside, ITEM, BF16, F16)
    bytes_out(to + groups * ITEM, most, inside, ITEM, BF16, F16)
    tl.store(high + section * groups + g, reciprocal(width(least, most)), mask=inside)


def _ranges_in(
    data: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    groups: tl.tensor,
    pitch: tl.tensor,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``int8``: read minima and maxima; minima and steps come out."""
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    at = data + section * pitch + g * ITEM
    least = bytes_in(at, inside, ITEM, BF16, F16)
    most = bytes_in(at + groups * ITEM, inside, ITEM, BF16, F16)
    tl.store(low + section * groups + g, least, mask=inside)
    tl.store(scale + section * groups + g, width(least, most), mask=inside)


def _magnitudes(
    low: tl.tensor,
    high: tl.tensor,
    out: tl.tensor,
    groups: tl.tensor,
    pitch: tl.tensor,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``fp8``: write magnitudes; ``high`` becomes what numbers are multiplied by."""
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    least = tl.load(low + section * groups + g, inside, 0)
    most = tl.load(high + section * groups + g, inside, 0)
    largest = tl.maximum(most, 0.0 - least)
    bytes_out(out + section * pitch + g * ITEM, largest, inside, ITEM, BF16, F16)
    tiny = 3.009265538105056e-36  # 2 ** -118
    inverse = reciprocal(tl.maximum(largest, tiny)) * 256.0
    tl.store(high + section * groups + g, tl.where(largest == 0, 0.0, inverse), mask=inside)


def _magnitudes_in(
    data: tl.tensor,
    scale: tl.tensor,
    groups: tl.tensor,
    pitch: tl.tensor,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``fp8``: read magnitudes; scales come out."""
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    largest = bytes_in(data + section * pitch + g * ITEM, inside, ITEM, BF16, F16)
    tl.store(scale + section * groups + g, largest * 0.00390625, mask=inside)


def _widths(
    low: tl.tensor, high: tl.tensor, groups: tl.tensor, top: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Steps that cover each group exactly; they take the place of the maxima.

    Of steps below the normal numbers all that counts is whether they are 0: rows of steps begin
    above them. They become the smallest normal number, whatever a division makes of them.
    """
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    least = tl.load(low + section * groups + g, inside, 0)
    most = tl.load(high + section * groups + g, inside, 0)
    every = tl.zeros([BLOCK], tl.float32) + top
    step = quotient(most - least, every)
    # as bits, denormal numbers count the smallest one, and half of it is rounded to 0
    some = 2 * (most - least).to(tl.int32, bitcast=True) > every.to(tl.int32)
    tiny = 1.1754943508222875e-38  # 2 ** -126
    step = tl.where(step < tiny, tl.where(some, tiny, 0.0), step)
    tl.store(high + section * groups + g, step, mask=inside)


def _steps(
    step: tl.tensor,
    low: tl.tensor,
    row: tl.tensor,
    limits: tl.tensor,
    out: tl.tensor,
    groups: tl.tensor,
    pitch: tl.tensor,
    MINIMA: tl.constexpr,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Round steps to the row of steps of their section; see :func:`tierkv_codecs.affine.write_row`.

    Writes the index of each to ``out``, and the minima behind if there are any. ``step`` (float32
    ``[sections, groups]``) becomes its inverse. Of ``limits`` at most 254 are counted.
    """
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    wanted = tl.load(step + section * groups + g, inside, 0)
    at = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(8):
        half = 128 >> k
        below = tl.load(limits + section * 255 + at + (half - 1)) < wanted
        at += tl.where(below, half, 0)
    index = tl.where(wanted > 0, tl.minimum(at, 254) + 1, 0)
    target = out + section * pitch
    tl.store(target + g, index.to(tl.uint8), mask=inside)
    if MINIMA:
        least = tl.load(low + section * groups + g, inside, 0)
        bytes_out(target + groups + g * ITEM, least, inside, ITEM, BF16, F16)
    found = tl.load(row + section * 256 + index)
    tl.store(step + section * groups + g, reciprocal(found), mask=inside)


def _steps_in(
    data: tl.tensor,
    low: tl.tensor,
    step: tl.tensor,
    row: tl.tensor,
    groups: tl.tensor,
    pitch: tl.tensor,
    MINIMA: tl.constexpr,
    ITEM: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Undo :func:`_steps`: steps (not inverted) and minima come out."""
    section = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = g < groups
    at = data + section * pitch
    index = tl.load(at + g, inside, 0).to(tl.int32)
    tl.store(step + section * groups + g, tl.load(row + section * 256 + index), mask=inside)
    if MINIMA:
        least = bytes_in(at + groups + g * ITEM, inside, ITEM, BF16, F16)
        tl.store(low + section * groups + g, least, mask=inside)


def _rows(
    heads: tl.tensor,
    row: tl.tensor,
    limits: tl.tensor,
    sections: tl.tensor,
    UP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rows of steps from their descriptions; products one by one in float64, as the host does.

    A section is one lane here, and the grid has one axis. ``limits`` of rows that are not rounded
    ``UP`` lie half-way between neighbours, geometrically, and end with infinity.
    """
    section = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = section < sections
    factor = tl.load(heads + section * 2, inside, 1.0).to(tl.float64)
    ratio = tl.load(heads + section * 2 + 1, inside, 1.0).to(tl.float64)
    tl.store(row + section * 256, tl.zeros([BLOCK], tl.float32), inside)
    for i in range(1, 256):
        here = factor.to(tl.float32)
        tl.store(row + section * 256 + i, here, inside)
        factor *= ratio
        if UP:
            limit = here
        else:
            after = factor.to(tl.float32).to(tl.float64)
            limit = tl.math.sqrt(here.to(tl.float64) * after).to(tl.float32)
            limit = tl.where(i == 255, float("inf"), limit)
        tl.store(limits + section * 255 + i - 1, limit, inside)


rows = jit(_rows, ["sections"])
ranges = jit(_ranges)
ranges_in = jit(_ranges_in)
magnitudes = jit(_magnitudes)
magnitudes_in = jit(_magnitudes_in)
widths = jit(_widths, ["top"])
steps = jit(_steps)
steps_in = jit(_steps_in)
