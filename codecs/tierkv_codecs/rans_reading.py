"""Decoding of what :mod:`tierkv_codecs.rans` encodes, where its format is told."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv.errors import CodecError
from tierkv_codecs.kernels import kernel
from tierkv_codecs.rans_encoder import encoder
from tierkv_codecs.rans_format import LANES, pieces
from tierkv_codecs.rans_headers import Header, headers
from tierkv_codecs.rans_steps import decode_steps
from tierkv_codecs.rans_tables import SLOTS
from tierkv_codecs.rans_trials import decoder
from tierkv_codecs.rans_vectors import Rows, by_vectors

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Rows", "at_once", "decode", "decode_words", "quick"]

_DAMAGED: Final = "rans: damaged: states, streams and literals do not end together"

_Bytes = Any  # NDArray[np.uint8]


def quick() -> bool:
    """Whether this processor codes faster in this way than in others: not before it was tried."""
    loops = encoder(1), encoder(2), decoder(1, "bytes"), decoder(2, "bytes")
    return None not in loops


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
    found = headers(data, start, end, out.size)
    vectors = _loops(found, "bytes")
    if vectors is not None:
        whole = by_vectors(vectors, data, found, out)
    else:
        loop = kernel("decode_lanes")
        each = (_piece_by_loop(loop, data, piece, out) for piece in found)
        whole = all(each) if loop is not None else decode_steps(data, found, out)
    if not whole:
        raise CodecError(_DAMAGED)


def at_once(count: int, columns: int) -> bool:
    """Whether :func:`decode_words` can be called here: for so many words, in rows or not (0)."""
    # a step goes ahead by less than the rows of one mean, and writes whole blocks
    if columns == 1 or not (kinds := _streams(count)):
        return False
    sink = "rows" if columns else "words"
    return None not in [decoder(streams, sink) for streams in kinds]


@functools.lru_cache(maxsize=256)
def _streams(count: int) -> frozenset[int]:
    """Of the pieces of so many symbols; none if a block of them is not full."""
    parts = pieces(count)
    return frozenset(p.streams for p in parts) if all(p.filled for p in parts) else frozenset()


def _loops(found: list[Header], sink: str) -> list[Callable[..., int]] | None:
    """The vectors' loop of each piece; None unless all are there."""
    loops = [decoder(piece.part.streams, sink) for piece in found]
    ready = [loop for loop in loops if loop is not None]
    return ready if len(ready) == len(found) else None


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
    found = headers(data, start, end, words.size)
    vectors = _loops(found, "words" if rows is None else "rows")
    assert vectors is not None, "at_once() said that there are loops"
    if not by_vectors(vectors, data, found, words, lower, rows):
        raise CodecError(_DAMAGED)


def _piece_by_loop(loop: Any, data: _Bytes, piece: Header, out: _Bytes) -> bool:
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
