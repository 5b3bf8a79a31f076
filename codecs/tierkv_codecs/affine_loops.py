"""Loops of the codecs whose groups share a minimum and a step.

The rules of :mod:`tierkv_codecs.loops` hold here too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "bounds",
    "codes_by_channel",
    "codes_by_row",
    "extremes_by_channel",
    "extremes_by_row",
    "field_by_channel",
    "field_by_row",
    "group_of",
    "pack_field",
    "places",
    "two_fields_by_channel",
    "two_fields_by_row",
]

_Array = Any
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_HIGH = np.uint32(16)
_FIFTEEN16 = np.int16(15)
_LOWER = np.int16(0x7FFF)
_NONE = np.float32(0)
_INFINITE = np.float32(np.inf)


def extremes_by_channel(source: _Array, tokens: int, size: int, low: _Array, high: _Array) -> None:
    """Smallest and largest of each group of ``size`` tokens, as keys that order like the numbers.

    The key of a number is its bits as int16, the lower 15 inverted where it is negative; NaN lies
    beyond the infinities.

    Args:
        source: bfloat16 as its bits, int16 ``[heads * tokens, dim]``.
        tokens: Rows of a head.
        size: Tokens of a group.
        low: int16 ``[heads * groups, dim]``, filled with the largest key.
        high: As ``low``, filled with the smallest.
    """
    rows, dim = source.shape
    group = taken = token = 0  # counted: a division takes longer than a row
    for row in range(rows):
        numbers, least, most = source[row], low[group], high[group]
        for d in range(dim):
            number = np.int16(numbers[d])
            key = np.int16(number ^ ((number >> _FIFTEEN16) & _LOWER))
            least[d] = min(least[d], key)
            most[d] = max(most[d], key)
        taken += 1
        token += 1
        if taken == size or token == tokens:
            group += 1
            taken = 0
            token %= tokens


def extremes_by_row(source: _Array, size: int, low: _Array, high: _Array) -> None:
    """As :func:`extremes_by_channel` for rows, groups of ``size`` numbers, ``[rows, groups]``."""
    for row in range(source.shape[0]):
        for group in range(low.shape[1]):
            numbers = source[row, group * size : (group + 1) * size]
            least, most = low[row, group], high[row, group]
            for d in range(numbers.size):
                number = np.int16(numbers[d])
                key = np.int16(number ^ ((number >> _FIFTEEN16) & _LOWER))
                least = min(least, key)
                most = max(most, key)
            low[row, group] = least
            high[row, group] = most


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
    group = taken = token = 0
    for row in range(rows):
        numbers, m, s, target = source[row], low[group], inverse[group], codes[row]
        for d in range(dim):
            number = np.uint32(np.uint32(numbers[d]) << _HIGH).view(np.float32)
            scaled = np.rint(np.float32(number - m[d]) * s[d])
            target[d] = np.uint8(np.int32(min(scaled, top)))
        taken += 1
        token += 1
        if taken == size or token == tokens:
            group += 1
            taken = 0
            token %= tokens


def codes_by_row(
    source: _Array, low: _Array, inverse: _Array, top: _Array, size: int, codes: _Array
) -> None:
    """As :func:`codes_by_channel` for rows, groups of ``size`` numbers, ``[rows, groups]``."""
    for row in range(source.shape[0]):
        for group in range(low.shape[1]):
            s, m = inverse[row, group], low[row, group]
            numbers = source[row, group * size : (group + 1) * size]
            target = codes[row, group * size : (group + 1) * size]
            for d in range(target.size):
                number = np.uint32(np.uint32(numbers[d]) << _HIGH).view(np.float32)
                scaled = np.rint(np.float32(number - m) * s)
                target[d] = np.uint8(np.int32(min(scaled, top)))


def pack_field(codes: _Array, low: int, width: int, area: _Array) -> None:
    """Pack ``width`` bits of every code, from bit ``low`` on; see :mod:`tierkv_codecs.packing`.

    Args:
        codes: uint8 ``[rows, dim]``.
        low: Lowest bit of the field.
        width: Bits of the field.
        area: uint8 ``[byte rows, dim]``.
    """
    rows, dim = codes.shape
    step = area.shape[0]
    mask = np.uint32((1 << width) - 1)
    down = np.uint32(low)
    for first in range(step):
        target = area[first]
        for part in range(8 // width):
            up = np.uint32(part * width)
            if part == 0:
                source = codes[first]
                for d in range(dim):
                    target[d] = np.uint8((np.uint32(source[d]) >> down) & mask)
            elif part * step + first < rows:
                source = codes[part * step + first]
                for d in range(dim):
                    field = ((np.uint32(source[d]) >> down) & mask) << up
                    target[d] = np.uint8(np.uint32(target[d]) | field)


def group_of(scale: _Array, index: _Array, lows: _Array, step: _Array, low: _Array) -> None:
    """Steps and minima of a group for each channel; see :func:`field_by_channel`."""
    for d in range(index.size):
        step[d] = scale[index[d]]
        low[d] = np.uint32(np.uint32(lows[d]) << _HIGH).view(np.float32)


def field_by_channel(
    area: _Array,
    width: int,
    scale: _Array,
    index: _Array,
    lows: _Array,
    tokens: int,
    size: int,
    out: _Array,
) -> None:
    """``code * step + low`` for ``[heads * tokens, dim]``, groups of ``size`` tokens.

    Args:
        area: uint8 ``[byte rows, dim]``: codes of one field, see :mod:`tierkv_codecs.packing`.
        width: Bits of a code, 1 to 8.
        scale: float32 ``[256]``: the steps that there are.
        index: uint8 ``[heads * groups, dim]``: which of them a group has.
        lows: As ``index``: the minimum of each group, bfloat16 as its bits.
        tokens: Rows of a head.
        size: Tokens of a group.
        out: ``[heads * tokens, dim]``.
    """
    rows, dim = out.shape
    step, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
    count = area.shape[0]
    group = taken = token = part = at = 0
    # a shift by a variable would need registers of twice the width; a product is exact as well
    mask, down = np.uint8((1 << width) - 1), np.float32(1.0)
    for row in range(rows):
        if taken == 0:
            group_of(scale, index[group], lows[group], step, low)
        bytes_, target = area[at], out[row]
        for d in range(dim):
            code = np.float32(np.float32(np.uint8(bytes_[d] & mask)) * down)
            bits = np.float32(code * step[d] + low[d]).view(np.uint32)
            target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH
        taken += 1
        token += 1
        if taken == size or token == tokens:
            group += 1
            taken = 0
            token %= tokens
        at += 1
        if at == count:
            at = 0
            part += 1
            mask = np.uint8(((1 << width) - 1) << part * width & 0xFF)
            down = np.float32(1.0 / (1 << part * width))


def field_by_row(
    area: _Array,
    width: int,
    scale: _Array,
    index: _Array,
    lows: _Array,
    size: int,
    out: _Array,
) -> None:
    """As :func:`field_by_channel` for rows, ``size`` numbers a group; index ``[rows, groups]``."""
    count = area.shape[0]
    part = at = 0
    mask, down = np.uint8((1 << width) - 1), np.float32(1.0)
    for row in range(out.shape[0]):
        for group in range(index.shape[1]):
            s = scale[index[row, group]]
            m = np.uint32(np.uint32(lows[row, group]) << _HIGH).view(np.float32)
            bytes_ = area[at, group * size : (group + 1) * size]
            target = out[row, group * size : (group + 1) * size]
            for d in range(target.size):
                code = np.float32(np.float32(np.uint8(bytes_[d] & mask)) * down)
                bits = np.float32(code * s + m).view(np.uint32)
                target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH
        at += 1
        if at == count:
            at = 0
            part += 1
            mask = np.uint8(((1 << width) - 1) << part * width & 0xFF)
            down = np.float32(1.0 / (1 << part * width))


def two_fields_by_channel(
    lower: _Array,
    upper: _Array,
    widths: tuple[int, int],
    scale: _Array,
    index: _Array,
    lows: _Array,
    tokens: int,
    size: int,
    out: _Array,
) -> None:
    """As :func:`field_by_channel` for codes of two fields, each with an area of its own."""
    rows, dim = out.shape
    step, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
    one, two = lower.shape[0], upper.shape[0]
    group = taken = token = 0
    for row in range(rows):
        if taken == 0:
            group_of(scale, index[group], lows[group], step, low)
        part, other = row // one, row // two
        mask = np.uint8(((1 << widths[0]) - 1) << part * widths[0])
        more = np.uint8(((1 << widths[1]) - 1) << other * widths[1])
        down = np.float32(1.0 / (1 << part * widths[0]))
        turn = np.float32((1 << widths[0]) / (1 << other * widths[1]))
        first, second = lower[row - part * one], upper[row - other * two]
        target = out[row]
        for d in range(dim):
            field = np.float32(np.float32(np.uint8(first[d] & mask)) * down)
            rest = np.float32(np.float32(np.uint8(second[d] & more)) * turn)
            code = np.float32(field + rest)
            bits = np.float32(code * step[d] + low[d]).view(np.uint32)
            target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH
        taken += 1
        token += 1
        if taken == size or token == tokens:
            group += 1
            taken = 0
            token %= tokens


def two_fields_by_row(
    lower: _Array,
    upper: _Array,
    widths: tuple[int, int],
    scale: _Array,
    index: _Array,
    lows: _Array,
    size: int,
    out: _Array,
) -> None:
    """As :func:`field_by_row` for codes of two fields, each with an area of its own."""
    for row in range(out.shape[0]):
        part, other = row // lower.shape[0], row // upper.shape[0]
        first, second = lower[row - part * lower.shape[0]], upper[row - other * upper.shape[0]]
        mask = np.uint8(((1 << widths[0]) - 1) << part * widths[0])
        more = np.uint8(((1 << widths[1]) - 1) << other * widths[1])
        down = np.float32(1.0 / (1 << part * widths[0]))
        turn = np.float32((1 << widths[0]) / (1 << other * widths[1]))
        for group in range(index.shape[1]):
            s = scale[index[row, group]]
            m = np.uint32(np.uint32(lows[row, group]) << _HIGH).view(np.float32)
            one = first[group * size : (group + 1) * size]
            two = second[group * size : (group + 1) * size]
            target = out[row, group * size : (group + 1) * size]
            for d in range(target.size):
                field = np.float32(np.float32(np.uint8(one[d] & mask)) * down)
                rest = np.float32(np.float32(np.uint8(two[d] & more)) * turn)
                code = np.float32(field + rest)
                bits = np.float32(code * s + m).view(np.uint32)
                target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def bounds(numbers: _Array) -> tuple[Any, Any]:
    """Smallest positive and largest of float32 numbers that are at least 0; 0 if there is none."""
    least, most = _INFINITE, _NONE
    for i in range(numbers.size):
        number = numbers[i]
        most = max(most, number)
        least = min(least, number if number > _NONE else _INFINITE)
    return (least if most > _NONE else _NONE), most


def places(numbers: _Array, limits: _Array, index: _Array) -> None:
    """One more than how many of ``limits`` are below each number; 0 for 0.

    Args:
        numbers: float32, at least 0.
        limits: float32 ``[255]``, ascending; at most 254 are counted.
        index: uint8, as ``numbers``.
    """
    for i in range(numbers.size):
        number = numbers[i]
        at = 0
        for half in (128, 64, 32, 16, 8, 4, 2, 1):  # no branch: which way it goes is anyone's guess
            at += half * int(limits[at + half - 1] < number)
        index[i] = min(at, 254) + 1 if number > _NONE else 0
