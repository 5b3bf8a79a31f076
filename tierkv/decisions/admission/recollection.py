"""Which parts were asked for of late: Bloom filters that forget, in a few bytes a part."""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["Recollection", "fold"]

_BITS: Final = 16  # a part: with four probes about one in 400 is taken for another one
_PROBES: Final = 4
_ODD: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def fold(bits: bytearray, size: int) -> bytearray:
    """A Bloom filter of another size (bytes, a power of two) that knows whom the old one knew.

    Its places must be low bits of a hash.
    """
    if size >= len(bits):
        return bits * (size // len(bits))
    pieces = np.frombuffer(bits, np.uint8).reshape(-1, size)
    return bytearray(np.bitwise_or.reduce(pieces, axis=0).tobytes())


class Recollection:
    """Remembers between ``size`` and twice as many of the last distinct parts.

    Two Bloom filters: the younger one takes what comes, until it has taken ``size`` parts; then it
    becomes the older one, and what only that one knew is forgotten. It never forgets earlier, and
    may take a part for known that is not (about 1 in 200).

    Args:
        size: Parts; a power of two.
    """

    __slots__ = ("_count", "_old", "_size", "_young")

    def __init__(self, size: int) -> None:
        self._size = size
        self._young = bytearray(size * _BITS // 8)
        self._old = bytearray(len(self._young))
        self._count = 0

    def _places(self, ident: int) -> list[int]:
        mixed = ((ident ^ (ident >> 31)) * _ODD) & _MASK
        mixed ^= mixed >> 32
        step, mask = (mixed >> 24) | 1, self._size * _BITS - 1
        return [(mixed + probe * step) & mask for probe in range(_PROBES)]

    def __contains__(self, ident: int) -> bool:
        places = self._places(ident)
        return _has(self._young, places) or _has(self._old, places)

    def add(self, ident: int) -> bool:
        """Remember a part; whether it was known."""
        places = self._places(ident)
        if _has(self._young, places):
            return True
        known = _has(self._old, places)
        if self._count >= self._size:
            self._old, self._young, self._count = self._young, bytearray(len(self._young)), 0
        for place in places:
            self._young[place >> 3] |= 1 << (place & 7)
        self._count += 1
        return known

    def resize(self, size: int) -> None:
        """Remember more or fewer parts from now on; a power of two of them."""
        self._young = fold(self._young, size * _BITS // 8)
        self._old = fold(self._old, size * _BITS // 8)
        self._size, self._count = size, min(self._count, size)


def _has(bits: bytearray, places: list[int]) -> bool:
    return all(bits[place >> 3] >> (place & 7) & 1 for place in places)
