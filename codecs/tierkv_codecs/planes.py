"""``planes``: bytes of equal significance together, each plane entropy-coded where that pays.

Method: the exponents of KV take few values and its mantissas all of them, so that floats shrink by
a third once the two are told apart (ZipNN, Hershcovitch et al., arXiv 2411.05239; Heilper and
Singer, arXiv 2508.19263). Words are rotated left by one bit first, which puts the whole exponent
of bfloat16 and float32 into one byte and the sign beside the mantissa. Exponents have no memory:
looking for repeats loses ratio and time. Where the processor has what it takes, the most
significant plane is coded in lanes (:mod:`tierkv_codecs.rans`), the others, and elsewhere all, by
zstd, literals only (plain zstd reaches 1.27 on bfloat16 KV, planes with zstd 1.48 to 1.50, with
lanes 1.50 to 1.52).

The codec sees bytes, not a dtype, and finds the width of a word (:mod:`tierkv_codecs.widths`).

Keys have a second kind of order: the exponents of a channel hardly change. Where that pays, the
most significant plane is centred (:mod:`tierkv_codecs.centering`), and its means are one more part.

Encoding: one byte of width; if the last plane is centred, 64 is added to it and the length of a row
follows (u16); then for each plane, least significant first, and for the means, a u32 (length of the
coded part; 0: stored as it is); then the planes, the means, and the bytes that fill no word. A part
is a frame of zstd if it begins with 0x28, and is coded in lanes if it begins with 1; every machine
reads both. All integers are little-endian.

Passes over memory, 2-byte words: encode reads the source once and writes two planes, in tiles that
stay in the cache, and one of them is read and coded; decode reads the lower plane and writes the
target once, coded lanes becoming words in registers. Without vectors, decode writes the upper plane
first, and then reads both. With the extra ``fast`` a tile is one loop instead of six.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import zstandard

from tierkv.abc import BytesCodec
from tierkv.errors import CodecError
from tierkv_codecs import rans, rans_reading
from tierkv_codecs.centering import base_bytes, center, period, restore, wrapped
from tierkv_codecs.frames import decode_frame
from tierkv_codecs.kernels import kernel
from tierkv_codecs.rans_format import FORMAT, LANES
from tierkv_codecs.widths import SAMPLE, WIDTHS, choose, entropy, rotated

__all__ = ["Planes"]

_TILE = 1 << 14  # words: source, target and temporary of a tile stay in the cache
_MAX_PLANE = (1 << 32) - 1
_CENTERED = 0x40  # added to the width: the most significant plane is centred
_MIN_PLANE = 64  # zstd's own header would eat the gain
_MIN_LANES = 12_000  # the states of lanes would, and the time to set their loop up

_Bytes = Any  # NDArray[np.uint8]; numpy's stubs make arithmetic on it unreadable


class _PerThread(threading.local):
    # contexts of zstd that are shared between threads give wrong bytes
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                compression_level=1,
                strategy=zstandard.STRATEGY_FAST,
                min_match=7,
                hash_log=6,
                target_length=0,  # anything else switches the coding of literals off
                write_content_size=True,
                write_checksum=False,
                write_dict_id=False,
            )
        )
        self.planes: _Bytes = np.empty(0, np.uint8)

    def room(self, nbytes: int) -> _Bytes:
        if self.planes.size < nbytes:
            self.planes = np.empty(nbytes, np.uint8)
        return self.planes[:nbytes]


_own = _PerThread()


def _split(data: _Bytes, width: int, planes: _Bytes) -> None:
    """Write word ``i``'s byte ``j``, rotated, to ``planes[j, i]``."""
    if width == 1:
        planes[0] = data
        return
    fast = kernel("split2") if width == 2 else None
    if fast is not None:
        fast(data.view("<u2"), planes[0], planes[1])
        return
    for at in range(0, planes.shape[1], _TILE):
        tile = rotated(data[at * width : (at + _TILE) * width], width)
        if width == 2:
            words = tile.view("<u2")
            np.copyto(planes[0, at : at + _TILE], words, casting="unsafe")
            np.right_shift(words, 8, out=planes[1, at : at + _TILE], casting="unsafe")
        else:
            planes[:, at : at + _TILE] = tile.reshape(-1, width).T


def _merge(planes: list[_Bytes], width: int, out: _Bytes) -> None:
    """Undo :func:`_split`."""
    if width == 1:
        out[:] = planes[0]
        return
    words = out.view(f"<u{width}")
    fast = kernel("merge2") if width == 2 else None
    if fast is not None:
        fast(planes[0], planes[1], words)
        return
    room = np.empty(min(_TILE, words.size), words.dtype)
    for at in range(0, words.size, _TILE):
        tile = words[at : at + _TILE]
        np.copyto(tile, planes[-1][at : at + _TILE])
        for plane in reversed(planes[:-1]):
            np.left_shift(tile, 8, out=tile)
            np.bitwise_or(tile, plane[at : at + _TILE], out=tile)
        carry = room[: tile.size]
        np.left_shift(tile, 8 * width - 1, out=carry)
        np.right_shift(tile, 1, out=tile)
        np.bitwise_or(tile, carry, out=tile)


@dataclass(frozen=True, slots=True)
class Planes(BytesCodec):
    """Byte planes, each zstd-coded or stored; nothing at all for no bytes."""

    name: ClassVar[str] = "planes"

    def encode(self, data: memoryview, out: memoryview) -> int | None:
        """Compress ``data``; None if the result is longer than ``out`` or a plane too long."""
        if len(data) == 0:
            return 0
        if len(data) > _MAX_PLANE:
            return None
        source = np.frombuffer(data, np.uint8)
        width, coded = choose(source)
        count = source.size // width
        room = _own.room(count * (width + 1))
        planes = room[: count * width].reshape(width, count)
        _split(source[: count * width], width, planes)
        parts = list(zip(planes, coded, strict=True))
        header = bytearray([width])
        columns, base = _centered(planes[-1], room[count * width :]) if width > 1 else (0, None)
        if base is not None:
            header[0] |= _CENTERED
            header += columns.to_bytes(2, "little")
            parts[-1:] = [(room[count * width :], True), (base, True)]
        stored: list[Any] = []
        for i, (plane, worth) in enumerate(parts):
            due = plane.size
            packed = _packed(plane, top=i == width - 1 <= 3) if worth and due > _MIN_PLANE else []
            length: int = sum(piece.size for piece in packed)
            used = 0 < length < due - due // 32  # worth decoding from 3 % on
            header += (length if used else 0).to_bytes(4, "little")
            stored += packed if used else [plane]
        pieces = [np.frombuffer(header, np.uint8), *stored, source[count * width :]]
        size: int = sum(piece.size for piece in pieces)
        if size > len(out):
            return None
        np.concatenate(pieces, out=np.frombuffer(out, np.uint8, count=size))
        return size

    def decode(self, data: memoryview, out: memoryview) -> None:
        """Decompress into ``out``, which is filled exactly.

        Raises:
            CodecError: if ``data`` is anything but one encoding of ``len(out)`` bytes. Lengths are
                checked before anything is decoded; nothing larger than ``out`` is allocated.
        """
        if len(out) == 0 or len(data) == 0:
            if len(out) != len(data):
                raise CodecError(f"planes: {len(data)} bytes cannot hold {len(out)}")
            return
        width, columns, sizes, at = _header(data, len(out))
        count = len(out) // width
        target, source = np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8)
        target[count * width :] = source[len(data) - len(out) % width :]
        if not count:
            return
        room = _own.room(count + sum(due for due, length in sizes if length))
        parts, used = [], count
        for due, length in sizes:
            parts.append(_Part(source, at, at + (length or due), room[used : used + due], length))
            at += length or due
            used += due if length else 0
        base = parts.pop().plain() if columns else None
        words = target[: count * width]
        if width == 2 and _merged_at_once(parts, columns, base, words.view("<u2")):
            return
        planes = [part.plain() for part in parts]
        if base is not None:
            restore(planes[-1], columns, base, room[:count])
            planes[-1] = room[:count]
        _merge(planes, width, words)


class _Part(NamedTuple):
    """A plane, or the means, as it is stored: ``source[start:end]``; ``length`` is 0 if plain."""

    source: _Bytes
    start: int
    end: int
    room: _Bytes
    length: int

    @property
    def interleaved(self) -> bool:
        return self.length > 0 and int(self.source[self.start]) == FORMAT

    def plain(self) -> _Bytes:
        """The bytes of it; in ``room`` where they are coded.

        Raises:
            CodecError: if it is damaged.
        """
        if not self.length:
            return self.source[self.start : self.end]
        if self.interleaved:
            rans_reading.decode(self.source, self.start, self.end, self.room)
        else:
            decode_frame(Planes.name, self.source[self.start : self.end].data, self.room.data)
        return self.room


def _merged_at_once(parts: list[_Part], columns: int, base: _Bytes | None, words: Any) -> bool:
    """Decode the upper plane and put it beside the lower one in one pass, if there is a way."""
    lower, upper = parts
    if not (upper.interleaved and rans_reading.at_once(words.size, columns)):
        return False
    rows = None if base is None else rans_reading.Rows(columns, wrapped(columns, base, LANES))
    rans_reading.decode_words(upper.source, upper.start, upper.end, lower.plain(), words, rows)
    return True


def _packed(plane: _Bytes, top: bool) -> list[_Bytes]:
    """What a plane's encoding consists of; ``top`` tells the most significant one."""
    if top and plane.size >= _MIN_LANES and rans_reading.quick():
        return rans.encode(plane)
    return [np.frombuffer(_own.compressor.compress(plane.data), np.uint8)]


def _header(data: memoryview, size: int) -> tuple[int, int, list[tuple[int, int]], int]:
    """Width, columns (0: not centred), plain and stored length of each part, start of the first.

    Raises:
        CodecError: if it is no header, or not that of an encoding of this length.
    """
    width, columns, at = data[0] & ~_CENTERED, 0, 1
    if data[0] & _CENTERED and len(data) > 3:
        columns, at = int.from_bytes(data[1:3], "little"), 3
    parts = width + (columns > 0)
    start = at + 4 * parts
    centered = bool(data[0] & _CENTERED)
    if width not in WIDTHS or len(data) < start or centered != (columns > 0) or width < parts - 1:
        raise CodecError(
            f"planes: words of {width} bytes in rows of {columns}, in an encoding of {len(data)} "
            "bytes"
        )
    count, rest = divmod(size, width)
    dues = [count] * width + ([base_bytes(count, columns)] if columns else [])
    lengths = [int.from_bytes(data[i : i + 4], "little") for i in range(at, start, 4)]
    sizes = list(zip(dues, lengths, strict=True))
    due = start + sum(length or plain for plain, length in sizes) + rest
    if due != len(data):
        raise CodecError(f"planes: {len(data)} bytes, but the planes of {size} bytes take {due}")
    return width, columns, sizes, start


def _centered(plane: _Bytes, rest: _Bytes) -> tuple[int, _Bytes | None]:
    """Length of a row and the means, if it pays to take them away; ``rest`` is what remains."""
    columns = period(plane)
    if not columns:
        return 0, None
    base = center(plane, columns, rest)
    spare = 8 * base.size / plane.size  # bits a byte that the means take at most
    pays = entropy(plane[:SAMPLE]) - entropy(rest[:SAMPLE]) > spare
    return (columns, base) if pays else (0, None)
