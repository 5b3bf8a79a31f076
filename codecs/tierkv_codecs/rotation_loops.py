"""Loops of the rotated codecs; the rules of :mod:`tierkv_codecs.loops` hold here too.

The transform has the same geometry in every step: it reads neighbours and writes the sums to the
front and the differences to the back, so that a step turns the bits of the place by one; after the
last step they are where they were. What is added to what, and when, is as in
:mod:`tierkv_codecs.hadamard`, so that the results are the same to the bit; wide registers are full
in every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "count_above",
    "levels_by_row",
    "look_up",
    "odd_steps",
    "pick",
    "rotate_rows",
    "spread",
    "transform",
]

_Array = Any
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_HIGH = np.uint32(16)
_FEW = 4
_MANY = 16
_MIDDLE = np.float32(7.5)
_PLACES = tuple(np.float32(place) for place in range(8))


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


def odd_steps(size: int) -> int:
    """1 if the transform of ``size`` numbers has an odd number of steps, else 0."""
    odd = 0
    while size > 1:
        odd = 1 - odd
        size //= 2
    return odd


def transform(work: _Array, count: int, size: int) -> None:
    """Walsh-Hadamard transform of several rows at once, neighbours first.

    Args:
        work: float32 ``[2, >= count]``: the rows, one by one, are in the first line if the number
            of steps is even, otherwise in the second; the result is in the first, column by column.
        count: Numbers of all rows.
        size: Length of a row, a power of two.
    """
    half = count // 2
    here = odd_steps(size)
    left = size
    while left > 1:
        source = work[here, :count]
        first, second = work[1 - here, :half], work[1 - here, half:count]
        for i in range(half):
            a, b = source[2 * i], source[2 * i + 1]
            first[i] = a + b
            second[i] = a - b
        here = 1 - here
        left //= 2


def levels_by_row(
    packed: _Array,
    levels: tuple[Any, ...],
    step: _Array,
    root: _Array,
    sign: _Array,
    starts: _Array,
    sizes: _Array,
    work: _Array,
    out: _Array,
) -> None:
    """Look 4-bit codes up, scale, rotate back.

    Args:
        packed: uint8 ``[rows of bytes, dim]``.
        levels: The eight positive levels, float32.
        step: float32 ``[rows]``.
        root: float32 ``[dim]``.
        sign: float32 ``[dim]``.
        starts: First number of each piece.
        sizes: Length of each piece.
        work: float32 ``[3, dim * 16]``, room for a few rows.
        out: ``[rows, dim]``.
    """
    rows, dim = out.shape
    count = packed.shape[0]
    codes = packed.reshape(packed.size)
    for piece in range(starts.size):
        start, size = starts[piece], sizes[piece]
        here, signs, roots = odd_steps(size), sign[start : start + size], root[start : start + size]
        row = 0
        while row < rows:
            part = 0 if row < count else 1
            # rows of the lower and of the upper halves of the bytes are not mixed
            lanes = min(_FEW, (count if part == 0 else rows) - row)
            mask = np.uint8(15) if part == 0 else np.uint8(240)
            down = np.float32(1) if part == 0 else np.float32(1 / 16)
            for lane in range(lanes):
                factors, s = work[2, lane * size : (lane + 1) * size], step[row + lane]
                for d in range(size):
                    factors[d] = s * roots[d]
            at = (row - part * count) * dim + start
            if size == dim:
                end = lanes * size
                look_up(codes[at : at + end], mask, down, levels, work[2, :end], work[here, :end])
            else:
                for lane in range(lanes):
                    low, high, place = lane * size, (lane + 1) * size, at + lane * dim
                    some, factors = codes[place : place + size], work[2, low:high]
                    look_up(some, mask, down, levels, factors, work[here, low:high])
            transform(work, _FEW * size, size)
            if lanes == _FEW:
                end = start + size
                a, b = out[row, start:end], out[row + 1, start:end]
                spread(work[0], signs, a, b, out[row + 2, start:end], out[row + 3, start:end])
            else:
                for lane in range(lanes):
                    pick(work[0], signs, lane, out[row + lane, start : start + size])
            row += lanes


def pick(numbers: _Array, signs: _Array, lane: int, target: _Array) -> None:
    """Give one row of a few its signs back, and round it to bfloat16 (bits in uint16)."""
    for d in range(target.size):
        bits = np.float32(numbers[_FEW * d + lane] * signs[d]).view(np.uint32)
        target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def look_up(
    codes: _Array,
    mask: _Array,
    down: _Array,
    levels: tuple[Any, ...],
    factors: _Array,
    numbers: _Array,
) -> None:
    """Levels of the masked codes, times ``factors``."""
    l0, l1, l2, l3, l4, l5, l6, l7 = levels
    for d in range(numbers.size):
        # compared, not looked up: a register is compared at once
        code = np.float32(np.float32(np.uint8(codes[d] & mask)) * down) - _MIDDLE
        place = np.abs(code)
        level = l1 if place > _PLACES[1] else l0
        level = l2 if place > _PLACES[2] else level
        level = l3 if place > _PLACES[3] else level
        level = l4 if place > _PLACES[4] else level
        level = l5 if place > _PLACES[5] else level
        level = l6 if place > _PLACES[6] else level
        level = l7 if place > _PLACES[7] else level
        numbers[d] = np.float32(np.copysign(level, code) * factors[d])


def spread(
    done: _Array, signs: _Array, first: _Array, second: _Array, third: _Array, fourth: _Array
) -> None:
    """Columns of four numbers to four rows, with their signs, as bfloat16."""
    for d in range(signs.size):
        sign = signs[d]
        a = np.float32(done[4 * d] * sign).view(np.uint32)
        b = np.float32(done[4 * d + 1] * sign).view(np.uint32)
        c = np.float32(done[4 * d + 2] * sign).view(np.uint32)
        e = np.float32(done[4 * d + 3] * sign).view(np.uint32)
        first[d] = (a + _HALF + ((a >> _HIGH) & _ONE)) >> _HIGH
        second[d] = (b + _HALF + ((b >> _HIGH) & _ONE)) >> _HIGH
        third[d] = (c + _HALF + ((c >> _HIGH) & _ONE)) >> _HIGH
        fourth[d] = (e + _HALF + ((e >> _HIGH) & _ONE)) >> _HIGH


def rotate_rows(
    source: _Array,
    root: _Array,
    sign: _Array,
    starts: _Array,
    sizes: _Array,
    work: _Array,
    found: _Array,
) -> None:
    """Rotate rows, norm kept; arguments as in :func:`levels_by_row`.

    Args:
        source: bfloat16 as its bits, uint16 ``[rows, dim]``.
        root: float32 ``[dim]``.
        sign: float32 ``[dim]``.
        starts: First number of each piece.
        sizes: Length of each piece.
        work: float32 ``[3, dim * 16]``, room for a few rows.
        found: float32 ``[dim, rows]``.
    """
    rows = source.shape[0]
    for piece in range(starts.size):
        start, size = starts[piece], sizes[piece]
        here = odd_steps(size)
        signs = sign[start : start + size]
        for first in range(0, rows, _MANY):
            lanes = min(_MANY, rows - first)
            for lane in range(lanes):
                numbers = source[first + lane, start : start + size]
                target = work[here, lane * size : (lane + 1) * size]
                for d in range(size):
                    number = np.uint32(np.uint32(numbers[d]) << _HIGH).view(np.float32)
                    target[d] = number * signs[d]
            transform(work, _MANY * size, size)
            for d in range(size):
                column, factor = work[0, d * _MANY : d * _MANY + lanes], root[start + d]
                place = found[start + d, first : first + lanes]
                for lane in range(lanes):
                    place[lane] = column[lane] * factor
