"""Frames and strided memory: copied both ways in one pass with their checksums, a run in one call.

A *run* is frames of one section table and where their sections are in other memory: each section
is ``heads`` times ``units`` times ``rows`` rows of ``width`` contiguous bytes, at equal steps for
heads and for rows, while each unit of each frame has a place of its own. In the frame the rows
follow each other. Any width goes; where a whole section is contiguous it is one row.

Two habits make it as fast as the memory. Every byte comes from memory once: what is summed and what
is copied go in steps of 1 KiB, the second of which finds it in the L1 cache. And where the bytes
of a run are more than what the caches are for (:data:`PAST_CACHES`), targets are written past the
caches: an ordinary store first reads the line that it is about to overwrite, a third of all
traffic.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xxhash

from tierkv import jit
from tierkv.jit import emptying, filling, walking, xxh3
from tierkv.jit.xxh3 import LEAST, STRIPE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

__all__ = ["PAST_CACHES", "TEXT", "Place", "Run", "known", "prepare", "ready", "suits", "table_of"]

PAST_CACHES: Final = 1 << 20
"""Bytes of a run from which on targets are written past the caches.

What is smaller stays in the cache for whoever reads it next. On a core with 1 MiB of L2 a copy
past the caches took 0.6 of the time from 256 KiB on; together with a pass that reads its target
afterwards 0.9 where the target had not been in the cache (0.7 from 8 MiB on), and as long as an
ordinary one where it had, up to 512 KiB.
"""

TEXT: Final = xxh3.TEXT + walking.COPY + filling.TEXT + emptying.TEXT
"""The module."""
_DIGEST: Final = 16


class Place(NamedTuple):
    """Where a section is, in its frame and in the other memory. All numbers are bytes or counts.

    Attributes:
        offset: Of the section in the frame: a multiple of 64.
        address: Where the tensor that holds it begins.
        kind: Which row of the run's ``shifts`` is its own.
        heads: How many heads.
        head: From one head to the next.
        rows: Rows of a head and unit.
        row: From one row to the next.
        width: Length of a row.
        stripes: Length of the section in the frame, padding included, in stripes of 64 bytes.
    """

    offset: int
    address: int
    kind: int
    heads: int
    head: int
    rows: int
    row: int
    width: int
    stripes: int


class _Code(NamedTuple):
    gather: Callable[[int, int, int, int], None]
    scatter: Callable[[int, int, int, int, int, int], int]


@functools.cache
def _code() -> _Code:
    number = ctypes.c_int64
    pointer: Any = ctypes.c_void_p
    gather, scatter = jit.functions(
        TEXT,
        ("gather", None, (pointer, *[number] * 3)),
        ("scatter", number, (pointer, *[number] * 5)),
    )
    return _Code(gather, scatter)


def _made() -> _Code | None:
    return _code() if jit.host() is not None and sys.byteorder == "little" else None


def _right(code: _Code) -> bool:
    """Whether it makes of a sample what library calls make of it."""
    return _sample_is_right(code, past=False) and _sample_is_right(code, past=True)


_copies = jit.Tried("copies", _made, _right)


def ready() -> bool:
    """Whether there is machine code for runs; compiled now, if it is not yet and this may wait.

    Compiling takes a quarter of a second, once in a process: not where an event loop runs in this
    thread. There the answer is no until some other thread has asked, or :func:`prepare` was called.
    """
    return _copies() is not None


def known() -> bool:
    """Whether it was found out if there is machine code: then :func:`prepare` has nothing to do."""
    return _copies.known()


def prepare() -> None:
    """Compile what runs need, if this machine can; for a worker thread, ahead of need."""
    _copies.settle()


def _sample_is_right(code: _Code, *, past: bool) -> bool:
    """Copy frames out and back: a section of rows that fill no line, and one of whole blocks."""
    rows, width, step, whole = 3, 700, 705, 4096
    padded = -(-rows * width // STRIPE) * STRIPE
    tensor = (np.arange(step * rows + whole) * 193 >> 3).astype(np.uint8)
    room = np.zeros(2 * (padded + whole) + STRIPE, np.uint8)
    shift = -room.ctypes.data % STRIPE
    frame, other = room[shift:][: 2 * (padded + whole)].reshape(2, -1)
    begin = tensor.ctypes.data
    places = (
        Place(0, begin, 0, 1, 0, rows, step, width, padded // STRIPE),
        Place(padded, begin + step * rows, 0, 1, 0, 1, 0, whole, whole // STRIPE),
    )
    at = np.array([frame.ctypes.data, other.ctypes.data])
    shifts = np.zeros((2, 1, 1), np.int64)  # both are of the same tensor
    run = Run(table_of(places), at, shifts, frame.size, past, code)
    found = run.gather(0, 1)
    lines = tensor[: step * rows].reshape(rows, step)[:, :width].tobytes()
    due = lines.ljust(padded, b"\0"), tensor[step * rows :].tobytes()
    if frame.tobytes() != b"".join(due) or found != [tuple(map(xxhash.xxh3_128_digest, due))]:
        return False
    other[:] = frame
    run.expect(0, found * 2)
    before = tensor.copy()
    for summed in (0, 1):  # the frame itself is summed on its way; another one beside it
        tensor[: step * rows].reshape(rows, step)[:, :width], tensor[step * rows :] = 0, 0
        if run.scatter(0, 1, summed, summed + 1) != -1 or not np.array_equal(tensor, before):
            return False
    other[-1] ^= 1
    return run.scatter(0, 1, 1, 2) == 1 and run.scatter(0, 0, 1, 2) == 1


def suits(places: Sequence[Place]) -> bool:
    """Whether machine code can do these: it sums long inputs only."""
    return bool(places) and min([place.stripes for place in places]) * STRIPE >= LEAST


@functools.lru_cache(maxsize=64)
def _cutter(sections: int) -> struct.Struct:
    return struct.Struct(f"{_DIGEST}s" * sections)


class Run:
    """Frames of one table, and where their sections are. It keeps no memory alive.

    Args:
        places: Of each section in the frames' order, as :func:`table_of` makes it.
        at: int64 ``[frames]``: address of each frame, a multiple of 64.
        shifts: int64 ``[kinds, frames, units]``: where each unit of each frame begins, in bytes
            behind the beginning of a tensor of the kind.
        nbytes: Bytes of a frame's sections.
        past: Whether to write past the caches; None: where the run is large.
        code: The machine code; None: what :func:`ready` found.
    """

    def __init__(
        self,
        places: Numbers,
        at: Numbers,
        shifts: Numbers,
        nbytes: int,
        past: bool | None = None,
        code: _Code | None = None,
    ) -> None:
        frames = len(at)
        self._code = code or _code()
        self._at = np.ascontiguousarray(at)
        self._shifts = np.ascontiguousarray(shifts)
        self._places = places
        self.sections = len(places)
        self._digests = np.zeros((frames, self.sections, 2), np.int64)
        arrays = (self._at, self._shifts, places, self._digests)
        counts = (self.sections, self._shifts.shape[2], frames)
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        self._job = np.array([*addresses, *counts], np.int64)
        self._address: int = self._job.__array_interface__["data"][0]
        large = frames * nbytes >= PAST_CACHES if past is None else past
        self._past = walking.PAST if large else 0

    def gather(self, low: int, high: int, sums: bool = True) -> list[tuple[bytes, ...]]:
        """Fill frames ``low`` to ``high``, padding of sections included.

        Returns:
            The checksums of the sections of each; of no use without ``sums``.
        """
        self._code.gather(self._address, low, high, self._past | walking.SUMS * sums)
        return list(_cutter(self.sections).iter_unpack(self._digests[low:high].data))

    def expect(self, low: int, due: Sequence[Sequence[bytes]]) -> None:
        """Say which checksums the sections of frames from ``low`` on should have."""
        sums = np.frombuffer(b"".join(chain.from_iterable(due)), np.int64)
        self._digests[low : low + len(due)] = sums.reshape(len(due), self.sections, 2)

    def scatter(
        self, low: int, high: int, first: int = 0, stop: int = 0, spent: bool = False
    ) -> int:
        """Copy frames ``low`` to ``high`` out, and verify ``first`` to ``stop`` meanwhile.

        Args:
            low: First frame to copy.
            high: The one behind the last.
            first: First frame to verify.
            stop: The one behind the last.
            spent: Whether the frames to copy leave the caches by that, to make room for others.

        Returns:
            The first of those that is wrong, or -1. If they are the same frames, those behind it
            are left alone; other frames ``low`` to ``high`` are copied anyway.
        """
        flags = self._past | walking.SPENT * spent
        return self._code.scatter(self._address, low, high, first, stop, flags)


def table_of(places: Sequence[Place]) -> Numbers:
    """The places of a :class:`Run`, as machine code reads them."""
    return np.array(places, np.int64).reshape(-1, walking.FIELDS)
