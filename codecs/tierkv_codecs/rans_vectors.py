"""Decoding of lanes by the vectors' loops, which are given (:mod:`tierkv_codecs.rans_decoder`)."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierkv_codecs.rans_decoder import SLACK
from tierkv_codecs.rans_format import LANES, Piece
from tierkv_codecs.rans_tables import SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv_codecs.rans_headers import Header

__all__ = ["Rows", "by_vectors"]

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


def by_vectors(
    loops: Sequence[Callable[..., int]],
    data: _Bytes,
    found: Sequence[Header],
    target: Any,
    lower: _Bytes | None = None,
    rows: Rows | None = None,
) -> bool:
    """Decode every piece by its loop; False if one is damaged."""
    control = _control
    source, out = _address(data), _address(target)
    below = 0 if lower is None else _address(lower)
    means = 0 if rows is None else _address(rows.means)
    for loop, piece in zip(loops, found, strict=True):
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
        whole = lower is not None or part.filled
        room = None if whole else np.empty(part.steps * part.streams * LANES, np.uint8)
        well = loop(
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
