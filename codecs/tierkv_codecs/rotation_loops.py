"""Loops that rotate; the rules of :mod:`tierkv_codecs.loops` hold here too.

Sixteen rows at a time are worked on side by side: number ``d`` of all of them lies in one place
(``work[line, 16 * d : 16 * d + 16]``, a lane a row), so that every step of the transform is plain
arithmetic on whole registers, three steps to a pass over memory that stays in the nearest cache.
What is added to what, and when, is as in :mod:`tierkv_codecs.hadamard`: the results are the same
to the bit. Decoding has code of its own (:mod:`tierkv_codecs.rotation_code`).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "eight",
    "eight_scaled",
    "four",
    "lane_by_lane",
    "transform",
    "two",
]

_Array = Any
_LANES = 16
_BY_1, _BY_8, _BY_64 = (0,), (0,) * 8, (0,) * 64


def two(source: _Array, target: _Array, size: int, near: tuple[int, ...]) -> None:
    """One step of the transform: numbers that are ``len(near)`` apart.

    The length of a tuple is part of the compiled loop, which a mere number would not be; and a
    slice is indexed from zero, so that no index has to be looked at for its sign.
    """
    h = len(near) * _LANES
    for block in range(0, size * _LANES, 2 * h):
        s, t = source[block:], target[block:]
        for i in range(h):
            a, b = s[i], s[i + h]
            t[i] = a + b
            t[i + h] = a - b


def four(source: _Array, target: _Array, size: int, near: tuple[int, ...]) -> None:
    """Two steps: ``len(near)`` and twice as far apart."""
    h = len(near) * _LANES
    for block in range(0, size * _LANES, 4 * h):
        s, t = source[block:], target[block:]
        for i in range(h):
            a, b, c, d = s[i], s[i + h], s[i + 2 * h], s[i + 3 * h]
            a, b, c, d = a + b, a - b, c + d, c - d
            t[i] = a + c
            t[i + h] = b + d
            t[i + 2 * h] = a - c
            t[i + 3 * h] = b - d


def eight(source: _Array, target: _Array, size: int, near: tuple[int, ...]) -> None:
    """Three steps: ``len(near)``, twice and four times as far apart."""
    m = len(near) * _LANES
    for block in range(0, size * _LANES, 8 * m):
        s, t = source[block:], target[block:]
        for i in range(m):
            a, b, c, d = s[i], s[i + m], s[i + 2 * m], s[i + 3 * m]
            e, f, g, h = s[i + 4 * m], s[i + 5 * m], s[i + 6 * m], s[i + 7 * m]
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            t[i] = a + e
            t[i + m] = b + f
            t[i + 2 * m] = c + g
            t[i + 3 * m] = d + h
            t[i + 4 * m] = a - e
            t[i + 5 * m] = b - f
            t[i + 6 * m] = c - g
            t[i + 7 * m] = d - h


def eight_scaled(source: _Array, factors: _Array, target: _Array, size: int) -> None:
    """As :func:`eight` for neighbours, of numbers times the factors of their lanes."""
    m = _LANES
    for block in range(0, size * _LANES, 8 * m):
        s, t = source[block:], target[block:]
        for i in range(m):
            x = factors[i]
            a, b, c, d = s[i] * x, s[i + m] * x, s[i + 2 * m] * x, s[i + 3 * m] * x
            e, f, g, h = s[i + 4 * m] * x, s[i + 5 * m] * x, s[i + 6 * m] * x, s[i + 7 * m] * x
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            t[i] = a + e
            t[i + m] = b + f
            t[i + 2 * m] = c + g
            t[i + 3 * m] = d + h
            t[i + 4 * m] = a - e
            t[i + 5 * m] = b - f
            t[i + 6 * m] = c - g
            t[i + 7 * m] = d - h


def transform(work: _Array, factors: _Array, size: int) -> int:
    """Walsh-Hadamard transform of sixteen rows, neighbours first.

    Args:
        work: float32 ``[2, >= 16 * size]``; the rows are in the first line.
        factors: float32 ``[16]``: what each row is multiplied by first.
        size: Length of a row, a power of two.

    Returns:
        The line in which the result is.
    """
    one, other = work[0], work[1]
    if size < 8:
        for i in range(size * _LANES):
            one[i] *= factors[i % _LANES]
        if size == 4:
            four(one, other, size, _BY_1)
        elif size == 2:
            two(one, other, size, _BY_1)
        return 0 if size == 1 else 1
    eight_scaled(one, factors, other, size)
    if size == 8:
        return 1
    if size < 64:
        if size == 16:
            two(other, one, size, _BY_8)
        else:
            four(other, one, size, _BY_8)
        return 0
    eight(other, one, size, _BY_8)
    if size == 128:
        two(one, other, size, _BY_64)
    elif size == 256:
        four(one, other, size, _BY_64)
    elif size > 256:
        eight(one, other, size, _BY_64)
    here, half = 0 if size == 64 else 1, 512 * _LANES
    while half < size * _LANES:  # as long as this they are rare
        source, target = work[here], work[1 - here]
        for block in range(0, size * _LANES, 2 * half):
            for i in range(block, block + half):
                target[i] = source[i] + source[i + half]
                target[i + half] = source[i] - source[i + half]
        half *= 2
        here = 1 - here
    return here


def lane_by_lane(source: _Array, apart: int, first: int, rows: int, target: _Array) -> None:
    """Copy lanes to rows of their own.

    Args:
        source: ``[size * 16]``, number by number.
        apart: Lanes from one row to the next.
        first: The first of the rows.
        rows: How many.
        target: ``[all rows, size]``.
    """
    for i in range(rows):
        for d in range(target.shape[1]):
            target[first + i, d] = source[d * _LANES + apart * i]
