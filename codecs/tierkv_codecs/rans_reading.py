"""Decoding of what :mod:`tierkv_codecs.rans` encodes, where its format is told."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any, Final, NamedTuple

import numpy as np

from tierkv.errors import CodecError
from tierkv_codecs.kernels import kernel
from tierkv_codecs.rans import FORMAT, LANES, START, STATES, Piece, pieces
from tierkv_codecs.rans_decoder import SLACK, decoder
from tierkv_codecs.rans_ir import able
from tierkv_codecs.rans_tables import SLOTS, read_shares

__all__ = ["Rows", "at_once", "decode", "decode_words"]

_DAMAGED: Final = "rans: damaged: states, streams and literals do not end together"
_LONGEST: Final = 4 + 256 + 4 * 3  # bytes of a piece's header

_Bytes = Any  # NDArray[np.uint8]


class Rows(NamedTuple):
    """What is added to bytes that stand in rows.

    Attributes:
        columns: Length of a row.
        means: Of every :data:`tierkv_codecs.centering.ROWS` rows, uint8, 64 more than columns
            (:func:`tierkv_codecs.centering.wrapped`).
    """

    columns: int
    means: Any


class _Control(threading.local):
    """What a loop is told, in one place: marks, rows (int64) and tables (bytes).

    Numpy takes longer to tell an address than a loop to decode a thousand symbols.
    """

    def __init__(self) -> None:
        numbers = np.zeros(6 + 9 + 3 * SLOTS // 8, np.int64)
        self.marks, self.rows = numbers[:6], numbers[6:15]
        self.tables: _Bytes = numbers[15:].view(np.uint8).reshape(3, SLOTS)
        self.at_marks = numbers.ctypes.data
        self.at_rows, self.at_tables = self.at_marks + 8 * 6, self.at_marks + 8 * 15


_control = _Control()


class _Header(NamedTuple):
    """What stands before a piece: its table, and where its streams and literals are.

    Attributes:
        part: The piece.
        first: The first symbol that ``shares`` speaks of.
        escape: The symbol that stands for the next literal.
        share: Of the escape.
        shares: uint8.
        marks: Begin and end of each stream and of the literals.
    """

    part: Piece
    first: int
    escape: int
    share: int
    shares: _Bytes
    marks: tuple[int, ...]

    def tables(self, by_slot: _Bytes) -> None:
        """Fill uint8 ``[3, 256]``: symbol, share and rank of each slot.

        Raises:
            CodecError: if the shares are not 256 in all, or the escape has two.
        """
        if not read_shares(self.shares, self.first, self.escape, self.share, by_slot):
            raise CodecError(f"rans: shares that are not {SLOTS} in all")


def _headers(data: _Bytes, start: int, end: int, count: int) -> list[_Header]:
    """Every piece of ``data[start:end]``.

    Raises:
        CodecError: if it is no encoding of ``count`` symbols, or there is more.
    """
    if end <= start or data[start] != FORMAT:
        raise CodecError("rans: an encoding of another format")
    at, found = start + 1, []
    for part in pieces(count):
        head = data[at : min(at + _LONGEST, end)].tobytes()
        more = head[1] if len(head) > 1 else 0
        sizes_at = 5 + more
        if len(head) < sizes_at + 4 * (part.streams + 1):
            raise CodecError(f"rans: {end - at} bytes are no piece of {part.symbols} symbols")
        sizes = struct.unpack_from(f"<{part.streams + 1}I", head, sizes_at)
        place = at + sizes_at + 4 * len(sizes)
        marks: list[int] = []
        for size in sizes:
            marks += (place, place + size)
            place += size
        if place > end or min(sizes[:-1]) < STATES:
            raise CodecError(f"rans: streams of {sizes} bytes in {end - at}")
        shares = data[at + 4 : at + 5 + more]
        found.append(_Header(part, head[0], head[2], head[3], shares, tuple(marks)))
        at = place
    if at != end:
        raise CodecError(f"rans: {end - at} bytes behind the last piece")
    return found


def decode(data: _Bytes, start: int, end: int, out: _Bytes) -> None:
    """Decode ``data[start:end]`` into ``out``, which is filled exactly.

    Args:
        data: uint8, contiguous; what stands behind ``end`` may be looked at, but changes nothing.
        start: Of the encoding.
        end: Of the encoding, within ``data``.
        out: uint8, contiguous, at least one.

    Raises:
        CodecError: if it is anything but one encoding of that many bytes. Lengths are checked
            before anything is decoded.
    """
    found = _headers(data, start, end, out.size)
    if able():
        whole = _vectors(data, found, "bytes", out)
    else:
        loop = kernel("decode_lanes")
        each = (_by_loop(loop, data, piece, out) for piece in found)
        whole = all(each) if loop is not None else _decode_steps(data, found, out)
    if not whole:
        raise CodecError(_DAMAGED)


def at_once(count: int, columns: int) -> bool:
    """Whether :func:`decode_words` can be called here: for so many words, in rows or not (0)."""
    # a step goes ahead by less than the rows of one mean, and writes whole blocks
    return able() and columns != 1 and _filled(count)


@functools.lru_cache(maxsize=256)
def _filled(count: int) -> bool:
    return all(piece.filled for piece in pieces(count))


def decode_words(
    data: _Bytes, start: int, end: int, lower: _Bytes, words: Any, rows: Rows | None
) -> None:
    """Decode ``data[start:end]`` into the upper bytes of words, then rotate those right by one bit.

    One pass: the target is written once, and no plane of upper bytes is. Ask :func:`at_once` first.

    Args:
        data: As for :func:`decode`.
        start: As for :func:`decode`.
        end: As for :func:`decode`.
        lower: The lower bytes; uint8, contiguous.
        words: uint16, contiguous, of the length of ``lower``.
        rows: What to add to upper bytes first.

    Raises:
        CodecError: as :func:`decode`.
    """
    found = _headers(data, start, end, words.size)
    sink = "words" if rows is None else "rows"
    if not _vectors(data, found, sink, words, lower, rows):
        raise CodecError(_DAMAGED)


def _address(array: Any) -> int:
    """Of the first element; numpy's own way takes three times as long."""
    if array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return int(array.ctypes.data)


def _geometry(rows: Rows, stride: int, part: Piece) -> list[int]:
    """Where each stream of a piece begins in its rows."""
    columns = rows.columns
    found = [columns, stride, LANES * part.streams % columns]
    for s in range(part.streams):
        place = part.start + LANES * s
        block = place // LANES  # ROWS rows of so many columns are so many blocks
        found += [place % columns, block % columns, block // columns * stride]
    return found


def _vectors(
    data: _Bytes,
    found: list[_Header],
    sink: str,
    target: Any,
    lower: _Bytes | None = None,
    rows: Rows | None = None,
) -> bool:
    """Decode every piece by the vectors' loop; False if one is damaged."""
    control = _control
    source, out = _address(data), _address(target)
    below = 0 if lower is None else _address(lower)
    means = 0 if rows is None else _address(rows.means)
    for piece in found:
        part, marks = piece.part, piece.marks
        piece.tables(control.tables)
        if data.size - marks[-1] < SLACK:
            begin = marks[0]
            tail = np.concatenate([data[begin : marks[-1]], np.zeros(SLACK, np.uint8)])
            source, marks = _address(tail), tuple(mark - begin for mark in marks)
        control.marks[: len(marks)] = marks
        if rows is not None:
            geometry = _geometry(rows, rows.means.shape[1], part)
            control.rows[: len(geometry)] = geometry
        whole = sink != "bytes" or part.filled
        room = None if whole else np.empty(part.steps * part.streams * LANES, np.uint8)
        well = decoder(part.streams, sink)(
            source,
            control.at_marks,
            control.at_tables,
            piece.escape,
            part.steps,
            out + part.start * target.itemsize if room is None else _address(room),
            below + part.start,
            means,
            control.at_rows,
        )
        if room is not None:
            target[part.start : part.start + part.symbols] = room[: part.symbols]
        if not well:
            return False
    return True


def _by_loop(loop: Any, data: _Bytes, piece: _Header, out: _Bytes) -> bool:
    part = piece.part
    target = out[part.start : part.start + part.symbols]
    room = target if part.filled else np.empty(part.steps * part.streams * LANES, np.uint8)
    by_slot = np.empty((3, SLOTS), np.uint8)
    piece.tables(by_slot)
    marks = np.array(piece.marks, np.int64)
    well = bool(loop(data, marks, by_slot, piece.escape, part.steps, room))
    if room is not target:
        target[:] = room[: part.symbols]
    return well


def _decode_steps(data: _Bytes, found: list[_Header], out: _Bytes) -> bool:
    """Numpy's twin of the loop: one step of all streams of all pieces at a time."""
    lanes = [(p, s) for p in range(len(found)) for s in range(found[p].part.streams)]
    order = [number for number, _ in lanes]
    begins = np.array([found[p].marks[2 * s] for p, s in lanes])
    ends = np.array([found[p].marks[2 * s + 1] for p, s in lanes])
    by_slot = np.empty((len(found), 3, SLOTS), np.uint8)
    for piece, own in zip(found, by_slot, strict=True):
        piece.tables(own)
    tables = by_slot.astype(np.int64)
    symbols, shares, ranks = (tables[:, i].reshape(-1) for i in range(3))
    base = SLOTS * np.array(order)[:, None]
    states = np.stack([data[b : b + STATES].view("<u2") for b in begins]).astype(np.int64)
    at = begins + STATES
    steps = np.array([found[p].part.steps for p in order])
    decoded = np.empty((int(steps.max()), len(lanes), LANES), np.uint8)
    most = data.size - 1
    ended = np.zeros(len(lanes), bool)
    for step in range(len(decoded)):
        slots = base + (states & 255)
        decoded[step] = symbols[slots]
        new = shares[slots] * (states >> 8) + ranks[slots]
        low = new < START
        ahead = low.cumsum(1)
        filled = new << 8 | data[np.minimum(at[:, None] + ahead - 1, most)]
        new = np.where(low, filled, new)
        if (ended := step >= steps).any():
            states[~ended], at[~ended] = new[~ended], at[~ended] + ahead[~ended, -1]
        else:
            states, at = new, at + ahead[:, -1]
    whole = bool((at == ends).all() and (states == START).all())
    column = 0
    for piece in found:
        part, escape = piece.part, piece.escape
        mine = decoded[: part.steps, column : column + part.streams].reshape(-1)
        column += part.streams
        escaped = np.flatnonzero(mine == escape)
        begin, end = piece.marks[-2:]
        if escaped.size != end - begin:
            return False
        mine[escaped] = data[begin:end]
        out[part.start : part.start + part.symbols] = mine[: part.symbols]
    return whole
