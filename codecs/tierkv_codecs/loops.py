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
    "floats8_by_channel",
    "floats8_by_row",
    "levels_by_row",
    "merge2",
    "nibbles_by_channel",
    "nibbles_by_row",
    "split2",
    "transform",
]

_Array = Any
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
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
        word = words[i]
        low[i] = ((word << 1) | (word >> 15)) & 0xFF
        high[i] = (word >> 7) & 0xFF


def merge2(low: _Array, high: _Array, words: _Array) -> None:
    """Undo :func:`split2`."""
    for i in range(words.size):
        word = low[i] | (high[i] << 8)
        words[i] = ((word >> 1) | (word << 15)) & 0xFFFF


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
    rows, dim = out.shape
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
    """Walsh-Hadamard transform of every column of float32 ``[n, 16]``, neighbours first."""
    size = work.shape[0]
    half = 1
    while half < size:
        for block in range(0, size, 2 * half):
            for i in range(block, block + half):
                upper, lower = work[i], work[i + half]
                for lane in range(_LANES):
                    left, right = upper[lane], lower[lane]
                    upper[lane] = left + right
                    lower[lane] = left - right
        half *= 2


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
        work: float32 ``[dim, 16]``, room for the rows of a tile.
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
                work[d, lane] = levels[(packed[source, d] >> shift) & 15] * (s * root[d])
        for piece in range(starts.size):
            transform(work[starts[piece] : starts[piece] + sizes[piece]])
        for lane in range(lanes):
            target = out[first + lane]
            for d in range(dim):
                bits = np.float32(work[d, lane] * sign[d]).view(np.uint32)
                target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH
