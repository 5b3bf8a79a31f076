"""Shares of slots, where they stand, and what the loops of :mod:`tierkv_codecs.rans` look up."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tierkv_codecs.kernels import kernel
from tierkv_codecs.rans_loops import share_slots

__all__ = ["SLOTS", "counted", "lookups", "read_shares", "shared_out", "spread"]

SLOTS: Final = 256
"""Slots that the symbols of a piece share; format."""
_LONG: Final = 1 << 16  # symbols from which on some are counted
_STEP: Final = 4096
_RUN: Final = 512

_Bytes = Any  # NDArray[np.uint8]


def counted(plane: _Bytes) -> Any:
    """How often each byte occurs, in an eighth of what is long; int64 ``[256]``.

    With 8,192 bytes or more counted, what is not costs a thousandth or two of a bit a symbol.
    """
    if plane.size < _STEP:
        return np.bincount(plane, minlength=256)
    step = _STEP if plane.size >= _LONG else _RUN
    loop = kernel("count_bytes")
    if loop is not None:
        counts = np.zeros((4, 256), np.uint32)
        loop(plane, step, _RUN, counts)
        return counts.sum(0, dtype=np.int64)
    whole = plane[: plane.size // 4 * 4]
    end = whole.size // step * step
    runs = whole[:end].reshape(-1, step)[:, :_RUN].reshape(-1)
    rest = whole[end : end + _RUN]
    return np.bincount(runs, minlength=256) + np.bincount(rest, minlength=256)


def shared_out(counts: Any) -> tuple[Any, int]:
    """Shares of 256 slots, and the escape.

    Returns:
        The shares, int64 ``[256]``, the escape's at its own place, and the escape: a symbol that is
        rare, or does not occur.
    """
    shares = np.zeros(256, np.int64)
    escape = (kernel("share_slots") or share_slots)(counts, shares)
    return shares, int(escape)


def spread(shares: Any) -> tuple[Any, Any]:
    """Symbol, share and rank of each slot (uint8 ``[3, 256]``), and the slot of each place."""
    by_slot, slots = np.empty((3, SLOTS), np.uint8), np.empty(SLOTS, np.uint8)
    loop = kernel("spread_places")
    if loop is not None:
        loop(shares, by_slot, slots)
        return by_slot, slots
    symbols = np.repeat(np.arange(256), shares)
    mine = shares[symbols]
    ranks = np.arange(SLOTS) - (np.cumsum(shares) - shares)[symbols]
    order = np.argsort(((2 * ranks + 1) << 16) // mine, kind="stable")
    by_slot[0], by_slot[1], by_slot[2] = symbols[order], mine[order], ranks[order]
    slots[order] = np.arange(SLOTS)
    return by_slot, slots


def lookups(shares: Any, escape: int) -> Any:
    """What encoding looks up, as :func:`tierkv_codecs.rans_loops.encode_lanes` takes it."""
    tables = np.empty((6, 256), np.uint8)
    loop = kernel("encoding_tables")
    if loop is not None:
        loop(shares, escape, tables)
        return tables
    tables[5] = spread(shares)[1]
    every = np.where(shares > 0, shares, shares[escape])
    first = np.cumsum(shares) - shares
    escaped = shares == 0
    escaped[escape] = True
    tables[0] = every
    tables[1] = np.where(escaped, first[escape], first)
    inverse = np.minimum((1 << 16) // every, (1 << 16) - 1)
    tables[2], tables[3], tables[4] = inverse & 255, inverse >> 8, escaped
    return tables


def read_shares(given: _Bytes, first: int, escape: int, share: int, by_slot: _Bytes) -> bool:
    """Tables of a piece from its header; see :func:`tierkv_codecs.rans_loops.slots_of_shares`."""
    loop = kernel("slots_of_shares")
    if loop is not None:
        return bool(loop(given, first, escape, share, by_slot, np.empty(SLOTS, np.uint8)))
    shares = np.zeros(256, np.int64)
    shares[np.arange(first, first + given.size) & 255] = given
    if shares[escape] or not share or shares.sum() + share != SLOTS:
        return False
    shares[escape] = share
    by_slot[:] = spread(shares)[0]
    return True
