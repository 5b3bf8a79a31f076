"""Loops over memory, written for a compiler: numba's subset of Python, one pass each.

They run (slowly) as plain Python over numpy arrays too, which is how their logic is tested where
numba is missing. Nothing is allocated. ``out`` is bfloat16 as its bits, uint16, finite values only.
Products and sums are separate float32 operations, as in the torch twins, and never fused: the
results are the same to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "codes_by_channel",
    "codes_by_row",
    "count_above",
    "floats8_by_channel",
    "floats8_by_row",
    "levels_by_row",
    "merge2",
    "nibbles_by_channel",
    "nibbles_by_row",
    "rotate_rows",
    "split2",
    "transform",
]

_Array = Any
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SEVEN = np.uint32(7)
_EIGHT = np.uint32(8)
_FIFTEEN = np.uint32(15)
_BYTE = np.uint32(0xFF)
_WORD = np.uint32(0xFFFF)
_HIGH = np.uint32(16)
_SIGN = np.uint32(0x80)
_SIGN_UP = np.uint32(24)
_REST = np.uint32(0x7F)
_REST_UP = np.uint32(20)
_UP = np.float32(2.0**120)
_LANES = 16


def split2(words: _Array, low: _Array, high: _Array) -> None:
    """Rotate 16-bit words left by one and split them into their low and high bytes."""
    for i in range(words.size):
        word = np.uint32(words[i])
        low[i] = ((word << _ONE) | (word >> _FIFTEEN)) & _BYTE
        high[i] = (word >> _SEVEN) & _BYTE


def merge2(low: _Array, high: _Array, words: _Array) -> None:
    """Undo :func:`split2`."""
    for i in range(words.size):
        word = np.uint32(low[i]) | (np.uint32(high[i]) << _EIGHT)
        words[i] = ((word >> _ONE) | (word << _FIFTEEN)) & _WORD


def codes_by_channel(
    source: _Array,
    low: _Array,
    inverse: _Array,
    top: _Array,
    tokens: int,
    size: int,
    codes: _Array,
) -> None:
    """Nearest codes 0 to ``top`` of ``(number - low) * inverse``, groups of ``size`` tokens.

    Args:
        source: bfloat16 as its bits, uint16 ``[heads * tokens, dim]``.
        low: float32 ``[heads * groups, dim]``.
        inverse: As ``low``; 0 for constant groups.
        top: The highest code, float32.
        tokens: Rows of a head.
        size: Tokens of a group.
        codes: uint8, as ``source``.
    """
    rows, dim = source.shape
    count = (tokens + size - 1) // size
    for row in range(rows):
        group = row // tokens * count + row % tokens // size
        for d in range(dim):
            number = np.uint32(np.uint32(source[row, d]) << _HIGH).view(np.float32)
            scaled = np.rint(np.float32(number - low[group, d]) * inverse[group, d])
            codes[row, d] = np.uint8(min(scaled, top))


def codes_by_row(
    source: _Array, low: _Array, inverse: _Array, top: _Array, size: int, codes: _Array
) -> None:
    """As :func:`codes_by_channel` for rows, groups of ``size`` numbers; low ``[rows, groups]``."""
    for row in range(source.shape[0]):
        for group in range(low.shape[1]):
            s, m = inverse[row, group], low[row, group]
            numbers = source[row, group * size : (group + 1) * size]
            target = codes[row, group * size : (group + 1) * size]
            for d in range(target.size):
                number = np.uint32(np.uint32(numbers[d]) << _HIGH).view(np.float32)
                scaled = np.rint(np.float32(number - m) * s)
                target[d] = np.uint8(min(scaled, top))


def count_above(numbers: _Array, inverse: _Array, cuts: tuple[Any, ...], codes: _Array) -> None:
    """How many of ``cuts`` are below ``number * inverse``.

    Args:
        numbers: float32 ``[dim, rows]``.
        inverse: float32 ``[rows]``.
        cuts: float32, as a tuple: its length is part of the compiled loop.
        codes: uint8, as ``numbers``.
    """
    for d in range(numbers.shape[0]):
        row, target = numbers[d], codes[d]
        for i in range(row.size):
            scaled = np.float32(row[i] * inverse[i])
            found = np.uint32(0)
            for cut in cuts:
                found += np.uint32(scaled > cut)
            target[i] = found


def nibbles_by_channel(
    packed: _Array, step: _Array, low: _Array, tokens: int, size: int, out: _Array
) -> None:
    """``code * step + low`` for ``[heads * tokens, dim]``, groups of ``size`` tokens.

    Args:
        packed: uint8 ``[rows of bytes, dim]``, see :mod:`tierkv_codecs.packing`.
        step: float32 ``[heads * groups, dim]``.
        low: As ``step``.
        tokens: Rows of a head.
        size: Tokens of a group.
        out: ``[heads * tokens, dim]``.
    """
    rows, dim = out.shape
    half = packed.shape[0]
    count = (tokens + size - 1) // size
    for row in range(rows):
        group = row // tokens * count + row % tokens // size
        source = row if row < half else row - half
        shift = 0 if row < half else 4
        for d in range(dim):
            code = np.float32((packed[source, d] >> shift) & 15)
            bits = np.float32(code * step[group, d] + low[group, d]).view(np.uint32)
            out[row, d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def nibbles_by_row(packed: _Array, step: _Array, low: _Array, size: int, out: _Array) -> None:
    """``code * step + low`` for rows, groups of ``size`` numbers; step, low ``[rows, groups]``."""
    rows = out.shape[0]
    half = packed.shape[0]
    for row in range(rows):
        source = row if row < half else row - half
        shift = 0 if row < half else 4
        for group in range(step.shape[1]):
            s, m = step[row, group], low[row, group]
            bytes_ = packed[source, group * size : (group + 1) * size]
            target = out[row, group * size : (group + 1) * size]
            for d in range(target.size):
                code = np.float32((bytes_[d] >> shift) & 15)
                bits = np.float32(code * s + m).view(np.uint32)
                target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def floats8_by_channel(codes: _Array, scale: _Array, tokens: int, out: _Array) -> None:
    """``e4m3 * scale`` for ``[heads * tokens, dim]``; uint8 codes, none a NaN.

    An e4m3 number, seen as the upper bits of a float32, is too small by exactly ``2 ** 120``; this
    holds for its subnormals too.

    Args:
        codes: uint8 ``[heads * tokens, dim]``.
        scale: float32 ``[heads, dim]``.
        tokens: Rows of a head.
        out: As ``codes``.
    """
    rows, dim = out.shape
    for row in range(rows):
        head = row // tokens
        for d in range(dim):
            code = np.uint32(codes[row, d])
            small = np.uint32(((code & _SIGN) << _SIGN_UP) | ((code & _REST) << _REST_UP))
            value = np.float32(small.view(np.float32) * _UP)
            bits = np.float32(value * scale[head, d]).view(np.uint32)
            out[row, d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def floats8_by_row(codes: _Array, scale: _Array, out: _Array) -> None:
    """As :func:`floats8_by_channel` with one scale a row."""
    rows, dim = out.shape
    for row in range(rows):
        s = scale[row]
        for d in range(dim):
            code = np.uint32(codes[row, d])
            small = np.uint32(((code & _SIGN) << _SIGN_UP) | ((code & _REST) << _REST_UP))
            value = np.float32(small.view(np.float32) * _UP)
            bits = np.float32(value * s).view(np.uint32)
            out[row, d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def transform(work: _Array) -> None:
    """Walsh-Hadamard transform of sixteen columns, neighbours first, two steps in one pass.

    Args:
        work: float32 ``[16 * n]``: the sixteen first numbers, the sixteen second ones, ...
    """
    size = work.size
    span = _LANES
    while 4 * span <= size:
        for start in range(0, size, 4 * span):
            one = work[start : start + span]
            two = work[start + span : start + 2 * span]
            three = work[start + 2 * span : start + 3 * span]
            four = work[start + 3 * span : start + 4 * span]
            for i in range(one.size):
                a, b, c, d = one[i], two[i], three[i], four[i]
                ab, cd = a + b, c + d
                one[i] = ab + cd
                three[i] = ab - cd
                ab, cd = a - b, c - d
                two[i] = ab + cd
                four[i] = ab - cd
        span *= 4
    if 2 * span <= size:
        one = work[:span]
        two = work[span : 2 * span]
        for i in range(one.size):
            a, b = one[i], two[i]
            one[i] = a + b
            two[i] = a - b


def levels_by_row(
    packed: _Array,
    levels: _Array,
    step: _Array,
    root: _Array,
    sign: _Array,
    starts: _Array,
    sizes: _Array,
    work: _Array,
    out: _Array,
) -> None:
    """Look 4-bit codes up, scale, rotate back; see :mod:`tierkv_codecs.hadamard`.

    Args:
        packed: uint8 ``[rows of bytes, dim]``.
        levels: float32 ``[16]``.
        step: float32 ``[rows]``.
        root: float32 ``[dim]``.
        sign: float32 ``[dim]``.
        starts: First number of each piece.
        sizes: Length of each piece.
        work: float32 ``[dim * 16]``, room for the rows of a tile.
        out: ``[rows, dim]``.
    """
    rows, dim = out.shape
    half_rows = packed.shape[0]
    for first in range(0, rows, _LANES):
        lanes = min(_LANES, rows - first)
        for lane in range(lanes):
            row = first + lane
            source = row if row < half_rows else row - half_rows
            shift = 0 if row < half_rows else 4
            s = step[row]
            for d in range(dim):
                work[d * _LANES + lane] = levels[(packed[source, d] >> shift) & 15] * (s * root[d])
        for piece in range(starts.size):
            start = starts[piece] * _LANES
            transform(work[start : start + sizes[piece] * _LANES])
        for lane in range(lanes):
            target = out[first + lane]
            for d in range(dim):
                bits = np.float32(work[d * _LANES + lane] * sign[d]).view(np.uint32)
                target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def rotate_rows(
    source: _Array,
    root: _Array,
    sign: _Array,
    starts: _Array,
    sizes: _Array,
    work: _Array,
    found: _Array,
) -> None:
    """Rotate rows into columns, norm kept; arguments as in :func:`levels_by_row`.

    Args:
        source: bfloat16 as its bits, uint16 ``[rows, dim]``.
        root: float32 ``[dim]``.
        sign: float32 ``[dim]``.
        starts: First number of each piece.
        sizes: Length of each piece.
        work: float32 ``[dim * 16]``, room for the rows of a tile.
        found: float32 ``[dim, rows]``.
    """
    rows, dim = source.shape
    for first in range(0, rows, _LANES):
        lanes = min(_LANES, rows - first)
        for lane in range(lanes):
            numbers = source[first + lane]
            for d in range(dim):
                number = np.uint32(np.uint32(numbers[d]) << _HIGH).view(np.float32)
                work[d * _LANES + lane] = number * sign[d]
        for piece in range(starts.size):
            start = starts[piece] * _LANES
            transform(work[start : start + sizes[piece] * _LANES])
        for d in range(dim):
            target = found[d, first : first + lanes]
            for lane in range(lanes):
                target[lane] = work[d * _LANES + lane] * root[d]
