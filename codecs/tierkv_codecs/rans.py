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
(:mod:`tierkv_codecs.rans_ir`), numba's loops, and numpy (:mod:`tierkv_codecs.rans_steps`), one step
of some pieces at a time, which is slow (tens of MB/s): without vectors this coder is not chosen,
but read.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from tierkv_codecs.kernels import kernel
from tierkv_codecs.rans_encoder import encoder
from tierkv_codecs.rans_format import FORMAT, LANES, STATES, Piece, encode_steps, pieces
from tierkv_codecs.rans_tables import counted, lookups, shared_out

__all__ = ["encode"]

_Bytes = Any  # NDArray[np.uint8]


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.room: _Bytes = np.empty(0, np.uint8)

    def bytes(self, count: int) -> _Bytes:
        if self.room.size < count:
            self.room = np.empty(count, np.uint8)
        return self.room[:count]


_own = _PerThread()


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
    vectors = encoder(part.streams)
    if vectors is not None:
        addresses = (tables.ctypes.data, marks.ctypes.data, room.ctypes.data)
        vectors(plane.ctypes.data, part.steps, *addresses)
    else:
        (kernel("encode_lanes") or encode_steps)(plane, part.steps, tables, marks, room)
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
