"""Columns of a byte plane centred on their means, where the bytes stand in rows.

The channels of keys differ in size and hardly change from token to token: what is left of an
exponent, once the mean of its channel over 64 rows is taken away, takes fewer bits (measured over
blocks of 64 tokens, SmolLM2 and Gemma 3: keys 2.80 to 2.50 and 3.02 to 2.62, values hardly any).
How long a row is, nobody says to a codec of bytes: it is the shortest period after which bytes
are nearest to each other.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tierkv_codecs.kernels import kernel

__all__ = ["ROWS", "base_bytes", "center", "period", "restore", "wrapped"]

ROWS: Final = 64
"""Rows of a piece, which has a mean for each column; format."""
_PERIODS: Final = np.array(
    (24, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 512, 576)
)
_SAMPLE: Final = 4096  # bytes looked at, beyond the longest period
_NEAR: Final = 0.97  # of the distance at any other period but its multiples
_SAME: Final = 1.03  # multiples of a period are as near, but for chance
_BIAS: Final = 24  # differences are small numbers of either sign: now small numbers

_Bytes = Any


def period(plane: _Bytes) -> int:
    """Length of a row of bytes; 0 if there seem to be none."""
    fit = _PERIODS[plane.size >= 4 * _PERIODS]
    if not fit.size or plane.size < 1024:
        return 0
    sample = plane[: _SAMPLE + int(fit[-1])]
    found = np.zeros(fit.size, np.int64)
    loop = kernel("distances")
    if loop is not None:
        loop(sample, fit, found)
    else:
        wide = sample.astype(np.int16)
        pairs = sample.size - int(fit[-1])
        for at, length in enumerate(fit.tolist()):
            found[at] = np.abs(wide[length : length + pairs] - wide[:pairs]).sum()
    best = int(fit[found <= _SAME * found.min()][0])
    if best == fit[0]:  # the nearer, the more alike: no sign of rows
        return 0
    others = found[fit % best != 0]
    return best if others.size and found.min() < _NEAR * others.min() else 0


def base_bytes(count: int, columns: int) -> int:
    """Bytes of the means of a plane of ``count`` bytes in rows of ``columns``."""
    return -(-count // (ROWS * columns)) * columns


def _halves(plane: _Bytes, columns: int) -> tuple[_Bytes, _Bytes]:
    """Whole rows, and what fills none."""
    end = plane.size // columns * columns
    return plane[:end].reshape(-1, columns), plane[end:]


def center(plane: _Bytes, columns: int, rest: _Bytes) -> _Bytes:
    """Write the differences from the means to ``rest``; returns the means."""
    base = np.zeros((base_bytes(plane.size, columns) // columns, columns), np.uint8)
    (whole, spare), (target, over) = (_halves(t, columns) for t in (plane, rest))
    loop = kernel("centered")
    if loop is not None:
        loop(whole, ROWS, _BIAS, base, target)
    else:
        for at in range(0, len(whole), ROWS):
            piece = whole[at : at + ROWS]
            sums = piece.sum(0, dtype=np.int64)
            base[at // ROWS] = (2 * sums + len(piece)) // (2 * len(piece))
            np.subtract(piece, base[at // ROWS] - np.uint8(_BIAS), out=target[at : at + ROWS])
    np.subtract(spare, base[-1, : spare.size] - np.uint8(_BIAS), out=over)
    return base.reshape(-1)


def restore(rest: _Bytes, columns: int, base: _Bytes, plane: _Bytes) -> None:
    """Undo :func:`center`."""
    means = base.reshape(-1, columns)
    (whole, spare), (target, over) = (_halves(t, columns) for t in (rest, plane))
    loop = kernel("restored")
    if loop is not None:
        loop(whole, ROWS, _BIAS, means, target)
    else:
        for at in range(0, len(whole), ROWS):
            piece = whole[at : at + ROWS]
            np.add(piece, means[at // ROWS] - np.uint8(_BIAS), out=target[at : at + ROWS])
    np.add(spare, means[-1, : spare.size] - np.uint8(_BIAS), out=over)


def wrapped(columns: int, base: _Bytes, more: int) -> _Bytes:
    """What :func:`restore` adds to each column, for every piece of rows.

    Returns:
        uint8 ``[pieces, columns + more]``, contiguous: behind the last column the first ones come
        again, so that ``more`` numbers can be read from any column on.
    """
    means = base.reshape(-1, columns) - np.uint8(_BIAS)
    if more <= columns:
        return np.concatenate([means, means[:, :more]], axis=1)
    # an index in brackets would give the transposed order in memory
    return means.take(np.arange(columns + more) % columns, axis=1)
