"""Loops of ``int8``: a whole encoding in one call, both ways.

The rules of :mod:`tierkv_codecs.loops` hold here too, but for a few numbers a head that are put
into arrays of their own. Groups are whole channels of a head, or whole rows; how the numbers of a
group and the codes lie is told in :mod:`tierkv_codecs.int8`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bytes_by_channel", "bytes_by_row", "to_bytes_by_channel", "to_bytes_by_row"]

_Array = Any
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_HIGH = np.uint32(16)
_LOWER = np.int16(0x7FFF)
_TINY = np.float32(2.0**-126)
_STEPS = np.float32(255)
_NONE = np.float32(0)
_UNIT = np.float32(1)


def bytes_by_channel(data: _Array, tokens: int, out: _Array) -> None:
    """Decode.

    Args:
        data: uint8, the encoding.
        tokens: Rows of a head.
        out: ``[heads * tokens, dim]``.
    """
    rows, dim = out.shape
    groups = rows // tokens * dim
    lows, highs = data[: 2 * groups].view(np.uint16), data[2 * groups : 4 * groups].view(np.uint16)
    codes = data[4 * groups :].reshape(rows, dim)
    scale, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for head in range(rows // tokens):
        for d in range(dim):
            m = np.uint32(np.uint32(lows[head * dim + d]) << _HIGH).view(np.float32)
            most = np.uint32(np.uint32(highs[head * dim + d]) << _HIGH).view(np.float32)
            s = np.float32(np.float32(most - m) / _STEPS)
            scale[d] = _TINY if s < _TINY and most > m else s
            low[d] = m
        for row in range(head * tokens, (head + 1) * tokens):
            bytes_, target = codes[row], out[row]
            for d in range(dim):
                bits = np.float32(np.float32(bytes_[d]) * scale[d] + low[d]).view(np.uint32)
                target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def bytes_by_row(data: _Array, out: _Array) -> None:
    """As :func:`bytes_by_channel` with a group a row."""
    rows, dim = out.shape
    lows, highs = data[: 2 * rows].view(np.uint16), data[2 * rows : 4 * rows].view(np.uint16)
    codes = data[4 * rows :].reshape(rows, dim)
    for row in range(rows):
        m = np.uint32(np.uint32(lows[row]) << _HIGH).view(np.float32)
        most = np.uint32(np.uint32(highs[row]) << _HIGH).view(np.float32)
        s = np.float32(np.float32(most - m) / _STEPS)
        if s < _TINY and most > m:
            s = _TINY
        bytes_, target = codes[row], out[row]
        for d in range(dim):
            bits = np.float32(np.float32(bytes_[d]) * s + m).view(np.uint32)
            target[d] = (bits + _HALF + ((bits >> _HIGH) & _ONE)) >> _HIGH


def to_bytes_by_channel(source: _Array, tokens: int, limit: _Array, data: _Array) -> bool:
    """Encode; False if a number is not within ``limit``, or none.

    Args:
        source: bfloat16 as its bits, int16 ``[heads * tokens, dim]``.
        tokens: Rows of a head.
        limit: Largest magnitude, float32.
        data: uint8, room for the encoding.
    """
    rows, dim = source.shape
    groups = rows // tokens * dim
    lows, highs = data[: 2 * groups].view(np.uint16), data[2 * groups : 4 * groups].view(np.uint16)
    codes = data[4 * groups :].reshape(rows, dim)
    least, most = np.empty(dim, np.int16), np.empty(dim, np.int16)
    inverse, low = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for head in range(rows // tokens):
        least[:] = 0x7FFF
        most[:] = -0x8000
        for row in range(head * tokens, (head + 1) * tokens):
            numbers = source[row]
            for d in range(dim):
                # a key orders like its number: the lower bits inverted where it is negative
                number = np.int16(numbers[d])
                key = np.int16(number ^ ((number >> 15) & _LOWER))
                least[d] = min(least[d], key)
                most[d] = max(most[d], key)
        for d in range(dim):
            # -1 is the key of minus zero: one zero is as good as the other
            one = np.int16(0) if least[d] == -1 else least[d]
            two = np.int16(0) if most[d] == -1 else most[d]
            lows[head * dim + d] = np.uint16(one ^ ((one >> 15) & _LOWER))
            highs[head * dim + d] = np.uint16(two ^ ((two >> 15) & _LOWER))
            m = np.uint32(np.uint32(lows[head * dim + d]) << _HIGH).view(np.float32)
            top = np.uint32(np.uint32(highs[head * dim + d]) << _HIGH).view(np.float32)
            if not (m >= -limit and top <= limit):
                return False
            s = np.float32(np.float32(top - m) / _STEPS)
            if s < _TINY and top > m:
                s = _TINY
            inverse[d] = _NONE if s == _NONE else np.float32(_UNIT / s)
            low[d] = m
        for row in range(head * tokens, (head + 1) * tokens):
            numbers, target = source[row], codes[row]
            for d in range(dim):
                bits = np.uint32(np.uint32(np.uint16(numbers[d])) << _HIGH)
                scaled = np.rint(np.float32(bits.view(np.float32) - low[d]) * inverse[d])
                target[d] = np.uint8(np.int32(min(scaled, _STEPS)))
    return True


def to_bytes_by_row(source: _Array, limit: _Array, data: _Array) -> bool:
    """As :func:`to_bytes_by_channel` with a group a row."""
    rows, dim = source.shape
    lows, highs = data[: 2 * rows].view(np.uint16), data[2 * rows : 4 * rows].view(np.uint16)
    codes = data[4 * rows :].reshape(rows, dim)
    for row in range(rows):
        numbers, target = source[row], codes[row]
        least, most = np.int16(0x7FFF), np.int16(-0x8000)
        for d in range(dim):
            number = np.int16(numbers[d])
            key = np.int16(number ^ ((number >> 15) & _LOWER))
            least = min(least, key)
            most = max(most, key)
        least = np.int16(0) if least == -1 else least
        most = np.int16(0) if most == -1 else most
        lows[row] = np.uint16(least ^ ((least >> 15) & _LOWER))
        highs[row] = np.uint16(most ^ ((most >> 15) & _LOWER))
        m = np.uint32(np.uint32(lows[row]) << _HIGH).view(np.float32)
        top = np.uint32(np.uint32(highs[row]) << _HIGH).view(np.float32)
        if not (m >= -limit and top <= limit):
            return False
        s = np.float32(np.float32(top - m) / _STEPS)
        if s < _TINY and top > m:
            s = _TINY
        inverse = _NONE if s == _NONE else np.float32(_UNIT / s)
        for d in range(dim):
            bits = np.uint32(np.uint32(np.uint16(numbers[d])) << _HIGH)
            scaled = np.rint(np.float32(bits.view(np.float32) - m) * inverse)
            target[d] = np.uint8(np.int32(min(scaled, _STEPS)))
    return True
