"""The vectors' decoding loops, tried on a sample that is encoded without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv import jit
from tierkv_codecs import rans, rans_decoder
from tierkv_codecs.centering import base_bytes, restore, wrapped
from tierkv_codecs.rans_format import LANES
from tierkv_codecs.rans_headers import headers
from tierkv_codecs.rans_vectors import Rows, by_vectors
from tierkv_codecs.samples import mixed, rare_ones

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["decoder"]

_COLUMNS: Final = 96


def _read(loop: Callable[..., int], data: Any, target: Any, lower: Any, rows: Rows | None) -> bool:
    found = headers(data, 0, data.size, target.size)
    return by_vectors([loop] * len(found), data, found, target, lower, rows)


def _right(loop: Callable[..., int], streams: int, sink: str) -> bool:
    """Whether a loop reads a sample, and refuses damage."""
    plane = rare_ones(streams)
    data = np.concatenate(rans.encode(plane))
    lower = None if sink == "bytes" else plane[::-1] ^ np.uint8(0x5A)
    target, due, rows = np.zeros(plane.size, np.uint8), plane, None
    if lower is not None:
        upper = plane
        if sink == "rows":
            means = (mixed(base_bytes(plane.size, _COLUMNS), 2) & 255).astype(np.uint8)
            rows = Rows(_COLUMNS, wrapped(_COLUMNS, means, LANES))
            upper = np.empty_like(plane)
            restore(plane, _COLUMNS, means, upper)
        words = upper.astype(np.uint16) << np.uint16(8) | lower
        target, due = np.zeros(plane.size, np.uint16), words >> 1 | words << 15
    if not _read(loop, data, target, lower, rows):
        return False
    right = np.array_equal(target, due)
    middle = data.size // 2
    data[middle : middle + 16] ^= np.uint8(0x15)  # in a stream: some state ends as another one
    return right and not _read(loop, data, target, lower, rows)


decoder: Final = jit.Tried("lanes", rans_decoder.loop, _right)
"""The loop of :func:`tierkv_codecs.rans_decoder.loop`; None: not here, or not yet."""
