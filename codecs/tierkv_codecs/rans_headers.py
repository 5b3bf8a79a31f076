"""What stands before the pieces of an encoding in lanes (:mod:`tierkv_codecs.rans`)."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from tierkv.errors import CodecError
from tierkv_codecs.rans_format import FORMAT, STATES, Piece, pieces
from tierkv_codecs.rans_tables import SLOTS, read_shares

__all__ = ["Header", "headers"]

_LONGEST: Final = 4 + 256 + 4 * 3  # bytes of a piece's header

_Bytes = Any  # NDArray[np.uint8]


class Header(NamedTuple):
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


def headers(data: _Bytes, start: int, end: int, count: int) -> list[Header]:
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
        found.append(Header(part, head[0], head[2], head[3], shares, tuple(marks)))
        at = place
    if at != end:
        raise CodecError(f"rans: {end - at} bytes behind the last piece")
    return found
