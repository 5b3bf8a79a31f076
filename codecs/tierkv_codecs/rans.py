"""Bytes of few common values, entropy-coded for vectors of lanes.

Method: range variant of asymmetric numeral systems (Duda, arXiv 1311.2540) with 16-bit states,
refilled by bytes, and shares of 256 slots. Slots of a symbol are spread evenly, as in the table
variant: with states of so few bits a contiguous range would cost 0.01 bits a symbol. Lanes take
turns in one stream (Giesen, arXiv 1402.3392). Beside a prefix code (what zstd does to literals)
0.03 to 0.05 bits a symbol are saved on exponents of KV, and no branch depends on the data.

Rare symbols have no slots: an escape stands for the next of the literals, which stand apart.

Encoding: one byte of format, then pieces. A piece of the plane (:func:`pieces`) is: first symbol,
number of shares - 1, escape, share of the escape (a byte each), the shares of the symbols from the
first on (a byte each; 0 comes after 255), length of each stream and of the literals (u32), the
streams, the literals.
A piece has two streams from 32,768 symbols on, else one; blocks of 64 symbols go to them in turn.
A stream begins with the states (u16), and goes on with the bytes in the order in which decoding
asks for them: block by block, lane by lane. The last blocks are filled up with the commonest
symbol. Integers are little-endian. Decoding has to end with every state at 256, every stream and
the literals used up.

Decoding is in :mod:`tierkv_codecs.rans_reading`. Three ways with the same bytes: vectors
(:mod:`tierkv_codecs.rans_ir`), numba's loops, and numpy, one step of all pieces at a time, which is
slow (tens of MB/s): without vectors this coder is not chosen, but read.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any, Final, NamedTuple

import numpy as np

from tierkv_codecs.kernels import kernel
from tierkv_codecs.rans_encoder import encoder
from tierkv_codecs.rans_ir import able
from tierkv_codecs.rans_tables import counted, lookups, shared_out

__all__ = [
    "FORMAT",
    "LANES",
    "START",
    "STATES",
    "Piece",
    "encode",
    "pieces",
    "quick",
]

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


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.room: _Bytes = np.empty(0, np.uint8)

    def bytes(self, count: int) -> _Bytes:
        if self.room.size < count:
            self.room = np.empty(count, np.uint8)
        return self.room[:count]


_own = _PerThread()


def quick() -> bool:
    """Whether this processor codes faster in this way than in others."""
    return able()


def encode(plane: _Bytes) -> list[_Bytes]:
    """Encode.

    Args:
        plane: uint8, contiguous, at least one.

    Returns:
        What the encoding consists of, one after the other. The arrays may be views of memory that
        the thread's next call overwrites.
    """
    parts = pieces(plane.size)
    # a symbol takes a byte and at most a literal; the states of two streams beside them
    padded = [2 * LANES * p.steps * p.streams + 2 * STATES for p in parts]
    room = _own.bytes(sum(padded) + 2 * LANES * (parts[-1].steps + 1))
    found: list[_Bytes] = [np.array([FORMAT], np.uint8)]
    at = 0
    for part, need in zip(parts, padded, strict=True):
        found += _encode_piece(plane[part.start :][: part.symbols], part, room[at : at + need])
        at += need
    return found


def _encode_piece(plane: _Bytes, part: Piece, room: _Bytes) -> list[_Bytes]:
    shares, escape = shared_out(counted(plane))
    tables = lookups(shares, escape)
    whole = part.steps * part.streams * LANES
    if plane.size < whole:
        usual = shares.copy()
        usual[escape] = 0
        fill = np.full(whole - plane.size, usual.argmax(), np.uint8)
        plane = np.concatenate([plane, fill])
    each = LANES * part.steps + STATES
    ends = np.array([each * (s + 1) for s in range(part.streams)] + [room.size], np.int64)
    marks = ends.copy()
    if able():
        addresses = (tables.ctypes.data, marks.ctypes.data, room.ctypes.data)
        encoder(part.streams)(plane.ctypes.data, part.steps, *addresses)
    else:
        (kernel("encode_lanes") or _encode_lanes)(plane, part.steps, tables, marks, room)
    share = int(shares[escape])
    shares[escape] = 0
    run = _run(np.flatnonzero(shares))
    header = bytearray([run[0], len(run) - 1, escape, share])
    header += shares[run].astype(np.uint8).tobytes()
    for begin, end in zip(marks.tolist(), ends.tolist(), strict=True):
        header += (end - begin).to_bytes(4, "little")
    streams = [room[b:e] for b, e in zip(marks.tolist(), ends.tolist(), strict=True)]
    return [np.frombuffer(header, np.uint8), *streams]


def _run(used: Any) -> Any:
    """The shortest run of symbols that holds those that are used; 0 comes after 255."""
    if not used.size:
        return np.zeros(1, np.int64)
    gaps = np.diff(used, prepend=used[-1] - 256)
    return (used[gaps.argmax()] + np.arange(257 - gaps.max())) & 255


def _encode_lanes(plane: _Bytes, steps: int, tables: Any, marks: Any, room: _Bytes) -> None:
    """Numpy's twin of the loop: one block of every stream at a time."""
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
