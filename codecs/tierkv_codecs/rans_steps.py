"""Decoding of lanes in numpy: what vectors and compiled loops do otherwise, to the same bytes.

What a step costs is calls, not numbers. So all that a state determines is looked up at once, by the
whole state: the state that follows, and whether it wants a byte. Some pieces are decoded side by
side; symbols are found afterwards, for many steps in one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv_codecs.rans_format import LANES, START, STATES
from tierkv_codecs.rans_tables import SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_codecs.rans_headers import Header

__all__ = ["decode_steps"]

_WORDS: Final = 1 << 16  # states
_TOGETHER: Final = 8  # pieces: more tables than that leave the cache
_KEPT: Final = 64  # steps whose states are kept until their symbols are found

_Bytes = Any  # NDArray[np.uint8]


def decode_steps(data: _Bytes, found: Sequence[Header], out: _Bytes) -> bool:
    """Decode pieces; False if one is damaged.

    Raises:
        CodecError: if the shares of a piece make no table.
    """
    alike: dict[tuple[int, int], list[Header]] = {}
    for piece in found:
        alike.setdefault((piece.part.steps, piece.part.streams), []).append(piece)
    return all(
        _Pieces(data, pieces[at : at + _TOGETHER]).decoded(out)
        for pieces in alike.values()
        for at in range(0, len(pieces), _TOGETHER)
    )


class _Pieces:
    """Pieces of as many steps and streams each."""

    def __init__(self, data: _Bytes, pieces: Sequence[Header]) -> None:
        self.data, self.pieces = data, pieces
        self.steps, self.streams = pieces[0].part.steps, pieces[0].part.streams
        begins = [piece.marks[2 * s] for piece in pieces for s in range(self.streams)]
        self.ends = [piece.marks[2 * s + 1] for piece in pieces for s in range(self.streams)]
        self._tables()
        words = np.stack([data[begin : begin + STATES].view("<u2") for begin in begins])
        self.at = [begin + STATES for begin in begins]
        # a row of states for each step; the tables of a piece begin where its states do
        self.states = np.empty((_KEPT + 1, len(begins), LANES), np.intp)
        self.states[0] = words
        self.states[0] += _WORDS * (np.arange(len(begins)) // self.streams)[:, None]

    def _tables(self) -> None:
        by_slot = np.empty((len(self.pieces), 3, SLOTS), np.uint8)
        for piece, own in zip(self.pieces, by_slot, strict=True):
            piece.tables(own)
        self.symbols = by_slot[:, 0]
        wide = by_slot.astype(np.intp)
        after = wide[:, 1, None] * np.arange(_WORDS // SLOTS)[:, None]
        after += wide[:, 2, None]
        low = after < START
        np.left_shift(after, 8, out=after, where=low)  # makes room for the byte
        after += _WORDS * np.arange(len(self.pieces))[:, None, None]
        self.after, self.wants = after.reshape(-1), low.reshape(-1)

    def decoded(self, out: _Bytes) -> bool:
        """Decode into each piece's place."""
        each = (len(self.pieces), self.steps, self.streams, LANES)
        found = np.empty(each, np.uint8)
        for first in range(0, self.steps, _KEPT):
            count = min(_KEPT, self.steps - first)
            self._walk(count)
            slots = (self.states[:count] & (SLOTS - 1)).reshape(count, -1, self.streams, LANES)
            for i, symbols in enumerate(self.symbols):
                found[i, first : first + count] = symbols[slots[:, i]]
            self.states[0] = self.states[count]
        if self.at != self.ends or (self.states[0] & (_WORDS - 1) != START).any():
            return False
        return all(
            self._placed(piece, mine.reshape(-1), out)
            for piece, mine in zip(self.pieces, found, strict=True)
        )

    def _walk(self, count: int) -> None:
        """Some steps: every lane is given the byte that is next, times whether it wants one."""
        data, at = self.data, np.array(self.at)[:, None] - 1
        wants = np.empty(self.states.shape[1:], bool)
        ones, bytes_ = wants.view(np.uint8), np.empty(wants.shape, np.uint8)
        ahead = np.empty(wants.shape, np.intp)
        for now, then in zip(self.states[:count], self.states[1:], strict=False):
            self.after.take(now, out=then, mode="wrap")
            self.wants.take(now, out=wants, mode="wrap")
            np.add.accumulate(ones, 1, out=ahead)
            ahead += at
            data.take(ahead, out=bytes_, mode="clip")
            bytes_ *= ones
            then += bytes_
            at = ahead[:, -1:].copy()
        self.at = (at[:, 0] + 1).tolist()

    def _placed(self, piece: Header, mine: _Bytes, out: _Bytes) -> bool:
        """Put literals where symbols are escapes; False if there are more or fewer of them."""
        part = piece.part
        begin, end = piece.marks[-2:]
        escaped = np.flatnonzero(mine == piece.escape)
        if escaped.size != end - begin:
            return False
        mine[escaped] = self.data[begin:end]
        out[part.start : part.start + part.symbols] = mine[: part.symbols]
        return True
