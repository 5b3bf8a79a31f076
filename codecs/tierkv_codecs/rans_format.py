"""What every way of :mod:`tierkv_codecs.rans` shares: how a plane is cut, and encoding in numpy."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["FORMAT", "LANES", "START", "STATES", "Piece", "encode_steps", "pieces"]

FORMAT: Final = 1
"""First byte of an encoding; a frame of zstd begins with 0x28."""
_PIECE: Final = 1 << 18  # symbols of a piece, at most
_TWO: Final = 1 << 15  # symbols from which on a piece has two streams
LANES: Final = 64
"""Symbols of a block, one for each lane of a stream."""
STATES: Final = 2 * LANES
"""Bytes of the states that a stream begins with."""
START: Final = 256
"""The state that encoding begins with, and decoding ends with."""

_Bytes = Any  # NDArray[np.uint8]


class Piece(NamedTuple):
    """A part of a plane that is encoded by itself.

    Attributes:
        start: Place of its first symbol in the plane.
        symbols: Number of symbols.
        streams: Number of streams, 1 or 2.
        steps: Blocks of each stream.
    """

    start: int
    symbols: int
    streams: int
    steps: int

    @property
    def filled(self) -> bool:
        """Whether its symbols fill every block."""
        return self.symbols == self.steps * self.streams * LANES


@functools.lru_cache(maxsize=256)
def pieces(count: int) -> tuple[Piece, ...]:
    """The pieces of a plane of ``count`` symbols: as few as possible, and of equal size."""
    blocks = -(-count // (2 * LANES))
    parts = -(-count // _PIECE)
    cuts = [2 * LANES * (blocks * i // parts) for i in range(parts)] + [count]
    found = []
    for start, end in itertools.pairwise(cuts):
        streams = 2 if end - start >= _TWO else 1
        found.append(Piece(start, end - start, streams, -(-(end - start) // (LANES * streams))))
    return tuple(found)


def encode_steps(plane: _Bytes, steps: int, tables: Any, marks: Any, room: _Bytes) -> None:
    """Numpy's twin of the loop (:func:`tierkv_codecs.rans_loops.encode_lanes`): block by block."""
    streams = marks.size - 1
    blocks = plane.reshape(steps, streams, LANES)
    wide = tables.astype(np.int64)
    shares, firsts = wide[0][blocks], wide[1][blocks]
    states = np.full((streams, LANES), START)
    emitted, which = np.empty(blocks.shape, np.uint8), np.empty(blocks.shape, bool)
    for step in range(steps - 1, -1, -1):
        share = shares[step]
        full = states >> 8 >= share
        emitted[step], which[step] = states & 255, full
        states = np.where(full, states >> 8, states)
        quotient, rest = np.divmod(states, share)
        states = (quotient << 8) + wide[5][firsts[step] + rest]
    for s in range(streams):
        bytes_ = emitted[:, s][which[:, s]]
        end = int(marks[s])
        room[end - bytes_.size : end] = bytes_
        marks[s] = end - bytes_.size - STATES
        room[marks[s] : marks[s] + STATES] = states[s].astype("<u2").view(np.uint8)
    literals = plane[tables[4][plane] != 0]
    room[marks[streams] - literals.size : marks[streams]] = literals
    marks[streams] -= literals.size
