"""Loops over memory, written for a compiler: numba's subset of Python, one pass each.

They run (slowly) as plain Python too, which is how their logic is checked where numba is missing.
Arrays are one-dimensional and contiguous unless said otherwise; nothing is allocated.
"""

from __future__ import annotations

from typing import Any

__all__ = ["merge2", "split2"]

_Array = Any


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
