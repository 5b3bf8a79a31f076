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
    "centered",
    "distances",
    "floats8_by_channel",
    "floats8_by_row",
    "merge2",
    "restored",
    "split2",
]

_Array = Any
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SEVEN = np.uint32(7)
_FIFTEEN = np.uint32(15)
_BYTE = np.uint32(0xFF)
_HIGH = np.uint32(16)
_ONE16 = np.uint16(1)
_SEVEN16 = np.uint16(7)
_FIFTEEN16 = np.uint16(15)
_SIGN = np.uint32(0x80)
_SIGN_UP = np.uint32(24)
_REST = np.uint32(0x7F)
_REST_UP = np.uint32(20)
_UP = np.float32(2.0**120)


def split2(words: _Array, low: _Array, high: _Array) -> None:
    """Rotate 16-bit words left by one and split them into their low and high bytes."""
    for i in range(words.size):
        word = np.uint32(words[i])
        low[i] = ((word << _ONE) | (word >> _FIFTEEN)) & _BYTE
        high[i] = (word >> _SEVEN) & _BYTE


def merge2(low: _Array, high: _Array, words: _Array) -> None:
    """Undo :func:`split2`."""
    for i in range(words.size):
        first, second = np.uint16(low[i]), np.uint16(high[i])
        words[i] = np.uint16((first >> _ONE16) | (second << _SEVEN16) | (first << _FIFTEEN16))


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


def distances(plane: _Array, periods: _Array, found: _Array) -> None:
    """Sum of the differences between bytes that are a period apart, for several periods.

    Args:
        plane: uint8.
        periods: int64 ``[n]``.
        found: int64 ``[n]``; as many pairs count for each.
    """
    pairs = plane.size - periods.max()
    for at in range(periods.size):
        later, total = plane[periods[at] :], 0
        for i in range(pairs):
            one, other = plane[i], later[i]
            total += int(max(one, other) - min(one, other))
        found[at] = total


def centered(plane: _Array, piece: int, bias: int, base: _Array, rest: _Array) -> None:
    """Take its mean from every column of each piece.

    Args:
        plane: uint8 ``[rows, columns]``.
        piece: Rows of a piece, 256 at most.
        bias: Added to the differences.
        base: uint8 ``[pieces, columns]``: the means, rounded.
        rest: uint8, as ``plane``: the differences, modulo 256.
    """
    rows, columns = plane.shape
    sums = np.empty(columns, np.uint16)
    for first in range(0, rows, piece):
        count, means = min(piece, rows - first), base[first // piece]
        sums[:] = np.uint16(0)
        for row in range(first, first + count):
            numbers = plane[row]
            for i in range(columns):
                sums[i] = np.uint16(sums[i] + numbers[i])
        for i in range(columns):
            means[i] = (2 * int(sums[i]) + count) // (2 * count)
        for row in range(first, first + count):
            numbers, target = plane[row], rest[row]
            for i in range(columns):
                target[i] = np.uint8(int(numbers[i]) - int(means[i]) + bias & 0xFF)


def restored(rest: _Array, piece: int, bias: int, base: _Array, plane: _Array) -> None:
    """Undo :func:`centered`."""
    for row in range(rest.shape[0]):
        numbers, target, means = rest[row], plane[row], base[row // piece]
        for i in range(means.size):
            target[i] = np.uint8(int(numbers[i]) + int(means[i]) - bias & 0xFF)
