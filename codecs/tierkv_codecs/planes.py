"""``planes``: bytes of equal significance together, each plane entropy-coded where that pays.

Method: the exponents of KV take few values and its mantissas all of them, so that floats shrink by
a third once the two are told apart (ZipNN, Hershcovitch et al., arXiv 2411.05239; Heilper and
Singer, arXiv 2508.19263). Words are rotated left by one bit first, which puts the whole exponent
of bfloat16 and float32 into one byte and the sign beside the mantissa. Exponents have no memory:
looking for repeats loses ratio and time, so that zstd codes literals only (plain zstd reaches
1.27 on bfloat16 KV, planes 1.48 to 1.50).

The codec sees bytes, not a dtype: it takes the width of a word (1, 2, 4 or 8 bytes) for which the
order-0 entropy of a sample is least. A wrong width costs ratio and nothing else.

Keys have a second kind of order: the exponents of a channel hardly change. Where that pays, the
most significant plane is centred (:mod:`tierkv_codecs.centering`), and its means are one more part.

Encoding: one byte of width; if the last plane is centred, 64 is added to it and the length of a row
follows (u16); then for each plane, least significant first, and for the means, a u32 (length of the
zstd frame; 0: stored as it is); then the planes, the means, and the bytes that fill no word. All
integers are little-endian.

Passes over memory, 2-byte words: encode reads the source once and writes two planes, in tiles that
stay in the cache, and zstd reads one of them; decode writes one plane (zstd) and then reads both
and writes the target once. With the extra ``fast`` a tile is one loop instead of six.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import zstandard

from tierkv.abc import BytesCodec
from tierkv.errors import CodecError
from tierkv_codecs.centering import base_bytes, center, period, restore
from tierkv_codecs.frames import decode_frame
from tierkv_codecs.kernels import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Planes"]

_WIDTHS = (1, 2, 4, 8)
_TILE = 1 << 14  # words: source, target and temporary of a tile stay in the cache
_SAMPLE = 512  # groups of 8 bytes looked at to find the width
_WORTH = 0.1  # bits a byte by which a wider word must win
_NOISE = 7.85  # bits a byte from which on a plane is left alone
_MAX_PLANE = (1 << 32) - 1
_CENTERED = 0x40  # added to the width: the most significant plane is centred
_MIN_PLANE = 64  # zstd's own header would eat the gain

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


def _entropy_terms() -> NDArray[np.float64]:
    counts = np.arange(8 * _SAMPLE + 1, dtype=np.float64)
    counts[0] = 1.0
    return counts * np.log2(counts)


_TERMS = _entropy_terms()


def _plane_numbers() -> NDArray[np.intp]:
    """For each byte of the sample, once for each width: 256 times the number of its plane."""
    numbers, first = [], 0
    for width in _WIDTHS:
        numbers.append(np.tile(first + np.arange(width), 8 * _SAMPLE // width))
        first += width
    return 256 * np.concatenate(numbers).astype(np.intp)


_PLANES = sum(_WIDTHS)
_NUMBERS = _plane_numbers()


def _rotated(data: _Bytes, width: int) -> _Bytes:
    """Words rotated left by one bit, as bytes; bytes stay as they are."""
    if width == 1:
        return data
    words = data.view(f"<u{width}")
    return ((words << 1) | (words >> (8 * width - 1))).view(np.uint8)


def _choose(data: _Bytes) -> tuple[int, list[bool]]:
    """Width of a word, and which planes are worth coding."""
    groups = data.size // 8
    if groups < _SAMPLE:  # too little to tell: the commonest width, and zstd decides
        return (2, [True, True]) if data.size > 1 else (1, [True])
    whole = data[: groups * 8].reshape(-1, 8)
    sample = whole[:: groups // _SAMPLE][:_SAMPLE].reshape(-1)
    keys = np.concatenate([_rotated(sample, width) for width in _WIDTHS]) + _NUMBERS
    counts = np.bincount(keys, minlength=256 * _PLANES).reshape(_PLANES, 256)
    totals = counts.sum(1)
    # order-0 entropy in bits a byte, corrected for the size of the sample (Miller and Madow)
    noise = (np.count_nonzero(counts, axis=1) - 1) / (2 * np.log(2) * totals)
    bits = np.log2(totals) - _TERMS[counts].sum(1) / totals + noise
    best, least, coded, first = 1, float("inf"), [True], 0
    for width in _WIDTHS:
        mine = bits[first : first + width]
        first += width
        if (mean := float(mine.mean())) < least - _WORTH:
            best, least, coded = width, mean, [bool(b < _NOISE) for b in mine]
    return best, coded


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
        tile = _rotated(data[at * width : (at + _TILE) * width], width)
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
        width, coded = _choose(source)
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
        for plane, worth in parts:
            due = plane.size
            packed = _own.compressor.compress(plane.data) if worth and due > _MIN_PLANE else b""
            used = 0 < len(packed) < due - due // 32  # worth decoding from 3 % on
            header += (len(packed) if used else 0).to_bytes(4, "little")
            stored.append(np.frombuffer(packed, np.uint8) if used else plane)
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
        target = np.frombuffer(out, np.uint8)
        target[count * width :] = np.frombuffer(data, np.uint8)[len(data) - len(out) % width :]
        if not count:
            return
        room = _own.room(count + sum(due for due, length in sizes if length))
        planes, used = [], count
        for due, length in sizes:
            piece = data[at : at + (length or due)]
            at += len(piece)
            if length:
                decode_frame(self.name, piece, room[used : used + due].data)
                planes.append(room[used : used + due])
                used += due
            else:
                planes.append(np.frombuffer(piece, np.uint8))
        if columns:
            rest, base = planes[-2:]
            planes[-2:] = [room[:count]]
            restore(rest, columns, base, room[:count])
        _merge(planes, width, target[: count * width])


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
    if width not in _WIDTHS or len(data) < start or centered != (columns > 0) or width < parts - 1:
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
    terms, bits = _TERMS, []
    for numbers in (plane, rest):
        counts = np.bincount(numbers[: 8 * _SAMPLE], minlength=256)
        total = int(counts.sum())
        bits.append(np.log2(total) - float(terms[counts].sum()) / total)
    spare = 8 * base.size / plane.size  # bits a byte that the means take at most
    return (columns, base) if bits[0] - bits[1] > spare else (0, None)
