"""Loops that encode for the rotated codecs; as :mod:`tierkv_codecs.rotation_loops`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierkv_codecs.rotation_loops import lane_by_lane, transform

__all__ = [
    "counted",
    "fit_rows",
    "magnitude",
    "nearest_levels",
    "repeated",
    "rotate_rows",
    "side_by_side",
    "signed",
    "squares",
    "summed",
    "weighed",
]

_Array = Any
_HIGH = np.uint32(16)
_LOWER = np.uint16(0x7FFF)
_LANES = 16
_NONE = np.float32(0)
_UNIT = np.float32(1)


def side_by_side(source: _Array, first: int, rows: int, target: _Array) -> None:
    """Undo :func:`lane_by_lane`, for lanes one from the other."""
    for i in range(rows):
        for d in range(source.shape[1]):
            target[d * _LANES + i] = source[first + i, d]


def magnitude(bits: _Array) -> Any:
    """Largest magnitude of bfloat16 numbers, as their bits; NaN is beyond infinity."""
    largest = np.uint16(0)
    for i in range(bits.size):
        largest = max(largest, np.uint16(bits[i] & _LOWER))
    return largest


def signed(bits: _Array, sign: _Array, target: _Array) -> None:
    """Numbers of bfloat16 (bits, uint16) times ``sign``."""
    for i in range(sign.size):
        target[i] = np.uint32(np.uint32(bits[i]) << _HIGH).view(np.float32) * sign[i]


def rotate_rows(
    source: _Array,
    root: _Array,
    sign: _Array,
    starts: _Array,
    sizes: _Array,
    work: _Array,
    found: _Array,
) -> Any:
    """Rotate rows, norm kept.

    Args:
        source: bfloat16 as its bits, uint16 ``[rows, dim]``.
        root: float32 ``[dim]``.
        sign: float32 ``[dim * 16]``, each sixteen times.
        starts: First number of each piece.
        sizes: Length of each piece.
        work: float32 ``[2, dim * 16]``.
        found: float32 ``[rows / 16, dim * 16]``, rounded up: number by number, sixteen rows to a
            tile; 0 beyond the last row.

    Returns:
        The largest magnitude, as in :func:`magnitude`.
    """
    rows = source.shape[0]
    largest = np.uint16(0)
    ones = np.ones(_LANES, np.float32)
    for piece in range(starts.size):
        start, size = starts[piece], sizes[piece]
        end, scale = start + size, root[start]
        columns, signs = source[:, start:end], sign[start * _LANES : end * _LANES]
        bits = work[1].view(np.uint16)[: size * _LANES]
        for tile in range(found.shape[0]):
            first = tile * _LANES
            if rows - first < _LANES:
                bits[:] = np.uint16(0)
            side_by_side(columns, first, min(_LANES, rows - first), bits)
            largest = max(largest, magnitude(bits))
            signed(bits, signs, work[0])
            column, target = work[transform(work, ones, size)], found[tile, start * _LANES :]
            for i in range(size * _LANES):
                target[i] = column[i] * scale
    return largest


def repeated(numbers: _Array) -> None:
    """Repeat the first sixteen numbers until the array is full."""
    known = _LANES
    while known < numbers.size:
        rest = numbers[known:]
        for i in range(min(known, rest.size)):
            rest[i] = numbers[i]
        known *= 2


def squares(source: _Array, target: _Array) -> None:
    """Squares."""
    for i in range(source.size):
        target[i] = source[i] * source[i]


def summed(numbers: _Array) -> None:
    """Add the numbers of each lane up, into the first of them: the upper half to the lower."""
    count = numbers.size // _LANES
    while count > 1:
        left = (count + 1) // 2
        upper = numbers[left * _LANES :]
        for i in range((count - left) * _LANES):
            numbers[i] += upper[i]
        count = left


def weighed(
    numbers: _Array,
    inverse: _Array,
    cuts: tuple[Any, ...],
    levels: tuple[Any, ...],
    above: _Array,
    below: _Array,
) -> None:
    """Nearest levels of ``number * inverse``, times the magnitude and times themselves."""
    for i in range(numbers.size):
        place = np.abs(np.float32(numbers[i] * inverse[i]))
        level = _NONE
        for at in range(len(cuts)):
            level = levels[at] if place >= cuts[at] else level
        above[i] = np.abs(numbers[i]) * level
        below[i] = level * level


def fit_rows(
    found: _Array, share: Any, cuts: tuple[Any, ...], levels: tuple[Any, ...], step: _Array
) -> None:
    """The scale of each row that fits its codes best.

    Args:
        found: Of :func:`rotate_rows`.
        share: ``1 / dim``, float32.
        cuts: From where on each of ``levels`` is the nearest, the first of them 0; float32.
        levels: The positive levels, float32.
        step: float32 ``[rows]``, rounded up to a multiple of 16.
    """
    room = np.empty((3, found.shape[1]), np.float32)
    inverse, above, below = room[0], room[1], room[2]
    for tile in range(found.shape[0]):
        numbers = found[tile]
        squares(numbers, above)
        summed(above)
        for lane in range(_LANES):
            spread = np.sqrt(np.float32(above[lane] * share))
            inverse[lane] = _UNIT / spread if spread > _NONE else _NONE
        repeated(inverse)
        weighed(numbers, inverse, cuts, levels, above, below)
        summed(above)
        summed(below)
        for lane in range(_LANES):
            fits = inverse[lane] > _NONE
            step[tile * _LANES + lane] = above[lane] / below[lane] if fits else _NONE


def counted(numbers: _Array, inverse: _Array, cuts: tuple[Any, ...], target: _Array) -> None:
    """How many of ``cuts`` are below ``number * inverse``."""
    for i in range(numbers.size):
        number = np.float32(numbers[i] * inverse[i])
        above = np.uint32(0)
        for cut in cuts:
            above += np.uint32(number > cut)
        target[i] = above


def nearest_levels(found: _Array, inverse: _Array, cuts: tuple[Any, ...], codes: _Array) -> None:
    """Codes of the levels that are nearest to ``number * inverse``.

    Args:
        found: Of :func:`rotate_rows`.
        inverse: float32 ``[rows]``.
        cuts: Limits between all levels; float32, as a tuple: its length is part of the loop.
        codes: uint8 ``[rows, dim]``.
    """
    rows = codes.shape[0]
    factors = np.zeros(found.shape[1], np.float32)
    room = np.empty(found.shape[1], np.uint8)
    for tile in range(found.shape[0]):
        first = tile * _LANES
        lanes = min(_LANES, rows - first)
        for lane in range(lanes):
            factors[lane] = inverse[first + lane]
        repeated(factors)
        counted(found[tile], factors, cuts, room)
        lane_by_lane(room, 1, first, lanes, codes)
