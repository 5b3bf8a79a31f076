"""Frequency sketch: who is asked for more often than the one it would push out (TinyLFU)."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from tierkv.abc import Admission
from tierkv.decisions.admission.recollection import fold

__all__ = ["TinyLfu"]

_ROWS: Final = 4
_MOST: Final = 15  # counters of four bits, as in the paper
_SAMPLE: Final = 10  # uses a counter after which all of them are halved
_LEAST: Final = 1024
_LARGEST: Final = (1 << 22) - 1  # 16 MiB of counters
_AT_FIRST: Final = 65536
_MASK: Final = (1 << 64) - 1
_ODD: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


class TinyLfu(Admission):
    """Admits a part that was asked for more often, of late, than the part that would leave for it.

    TinyLFU (Einziger, Friedman and Manes, ACM Trans. Storage 13(4), 2017): a count-min sketch of
    four rows with saturating counters up to 15, a doorkeeper that takes the first use of every
    part, and ageing: after ten uses a counter all counts are halved and the doorkeeper is emptied.
    While there is room, everything is admitted. On public chat traces it beats plain recency in
    small tiers and loses in ample ones; on agentic traffic, where recency is all, it loses: measure
    before using it there.

    Memory: four bytes (a row of one-byte counters each) and two bits a part that the tier holds.
    """

    name: ClassVar[str] = "tinylfu"
    compares = True

    def __init__(self, option: str = "") -> None:
        super().__init__(option)
        self._bits = _AT_FIRST.bit_length()  # counters: a power of two above the parts held
        self._counts = [bytearray(1 << self._bits) for _ in range(_ROWS)]
        self._door = bytearray(_door_bytes(self._bits))
        self._uses = 0

    def _places(self, ident: int) -> list[int]:
        shift = 64 - self._bits
        return [((ident * odd) & _MASK) >> shift for odd in _ODD]

    def _doors(self, ident: int) -> tuple[int, int]:
        size = len(self._door) * 8
        mixed = ((ident ^ (ident >> 29)) * _ODD[0]) & _MASK
        return mixed % size, (mixed >> 32) % size

    def _known(self, ident: int) -> bool:
        return all(self._door[bit >> 3] >> (bit & 7) & 1 for bit in self._doors(ident))

    def seen(self, ident: int, now: float) -> None:
        """Count a use."""
        del now
        self._uses += 1
        if not self._known(ident):
            for bit in self._doors(ident):
                self._door[bit >> 3] |= 1 << (bit & 7)
        else:
            places = self._places(ident)
            low = min(row[place] for row, place in zip(self._counts, places, strict=True))
            if low < _MOST:
                for row, place in zip(self._counts, places, strict=True):
                    if row[place] == low:  # conservative: only the counters that tell
                        row[place] = low + 1
        if self._uses >= _SAMPLE << self._bits:
            self._age()

    def _age(self) -> None:
        halves = bytes(value >> 1 for value in range(256))
        self._counts = [row.translate(halves) for row in self._counts]
        self._door = bytearray(len(self._door))
        self._uses //= 2

    def frequency(self, ident: int) -> int:
        """Uses of a part of late, at most 16; never too few but for ageing."""
        low = min(row[place] for row, place in zip(self._counts, self._places(ident), strict=True))
        return low + self._known(ident)

    def admit(
        self, ident: int, nbytes: int, now: float, *, demand: bool, victim: int | None = None
    ) -> bool:
        """Say whether it is asked for more often than ``victim``."""
        del nbytes, now, demand
        return victim is None or self.frequency(ident) > self.frequency(victim)

    def resize(self, capacity_parts: float) -> None:
        """Have a counter a part and row; what was counted is kept as well as it can be."""
        parts = int(min(max(capacity_parts, _LEAST), _LARGEST))
        wanted, before = parts.bit_length(), self._bits
        while self._bits > wanted:  # a place is the top bits of a product: neighbours fall together
            self._bits -= 1
            self._counts = [_halved(row) for row in self._counts]
        while self._bits < wanted:
            self._bits += 1
            self._counts = [_doubled(row) for row in self._counts]
        if wanted != before:
            self._door = fold(self._door, _door_bytes(wanted))


def _halved(row: bytearray) -> bytearray:
    return bytearray(np.frombuffer(row, np.uint8).reshape(-1, 2).max(axis=1).tobytes())


def _doubled(row: bytearray) -> bytearray:
    out = bytearray(2 * len(row))
    out[::2] = out[1::2] = row
    return out


def _door_bytes(bits: int) -> int:
    return 1 << (bits - 2)  # two bits a counter of a row
