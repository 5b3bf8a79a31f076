"""``rans``: bytes of few common values, entropy-coded in lanes; what is coded in steps, above all.

Codes of :mod:`tierkv_codecs.ecq` have no order that looking for repeats could find, and take many
values: an entropy coder is all that they need. Where the processor has what it takes, that is
:mod:`tierkv_codecs.rans`: a payload of 200 KB is decoded in about half of zstd's time and encoded
in about the same, at equal bits. Short payloads, and all where it has not, are frames of zstd (the
states of the lanes would take more than they save, and time).

Encodings of tensors often begin with scales, whose bytes are of another kind than codes: one table
for both wastes up to 0.2 bits a code. So the front of a payload is a part of its own, as far as
that pays, which is found by counting.

Encoding: what begins with 0x28 is a frame of zstd; 0: the bytes follow as they are; 1: lengths of
the front, plain and stored (equal: as it is), and of the rest, plain (u32, little-endian); the
front as a frame of zstd; the rest in lanes. Every machine reads all of them.

Passes over memory: encode reads a third of the source to count, then all of it; decode reads and
writes once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from tierkv.abc import BytesCodec
from tierkv.errors import CodecError
from tierkv_codecs import rans, rans_reading
from tierkv_codecs.frames import decode_frame
from tierkv_codecs.rans_tables import counted
from tierkv_codecs.zstd import Zstd

__all__ = ["Rans"]

_STORED: Final = 0
_FRAME: Final = 0x28  # the first byte of a frame of zstd
_LANES: Final = 1
_HEAD: Final = struct.Struct("<BIII")
_SHORT: Final = 1 << 15  # shorter payloads are smaller, and faster, as frames of zstd
_LONG: Final = (1 << 32) - 1
_WINDOWS: Final = 64  # of a payload; the front is some of the first
_MOST: Final = 6
_WORTH: Final = 512.0  # bits that a front has to save

_Bytes = Any  # NDArray[np.uint8]


def _information(counts: Any) -> float:
    """Bits of so many symbols in a code of their own."""
    used = counts[counts > 0]
    return float((used * np.log2(used.sum() / used)).sum())


def _front(data: _Bytes) -> int:
    """How many of the first bytes are better off with a code of their own."""
    window = data.size // _WINDOWS
    rest = counted(data[-8 * window :]) + 0.25  # what does not occur may still occur
    dear = np.log2(rest.sum() / rest)
    front, best, found = np.zeros(256, np.int64), 0.0, 0
    for k in range(1, _MOST + 1):
        front += counted(data[(k - 1) * window : k * window])
        gain = float((front * dear).sum()) - _information(front)
        if gain <= best:
            break
        best, found = gain, k * window
    return found if best > _WORTH else 0


def _squeezed(data: _Bytes) -> _Bytes:
    """A frame of zstd; the bytes themselves if it is no shorter."""
    room = memoryview(bytearray(data.size))
    size = Zstd().encode(data.data, room)
    return data if size is None or size == data.size else np.frombuffer(room, np.uint8, size)


@dataclass(frozen=True, slots=True)
class Rans(BytesCodec):
    """Bytes coded in lanes, by zstd, or stored; nothing at all for no bytes."""

    name: ClassVar[str] = "rans"

    def encode(self, data: memoryview, out: memoryview) -> int | None:
        """Compress ``data``; None if the result is longer than ``out`` or the input too long."""
        if len(data) == 0:
            return 0
        if len(data) > _LONG:
            return None
        source = np.frombuffer(data, np.uint8)
        parts = self._lanes(source) if source.size >= _SHORT and rans_reading.quick() else []
        if not parts:
            parts = [_squeezed(source)]
        if sum(part.size for part in parts) >= source.size:
            parts = [np.array([_STORED], np.uint8), source]
        size: int = sum(part.size for part in parts)
        if size > len(out):
            return None
        np.concatenate(parts, out=np.frombuffer(out, np.uint8, size))
        return size

    def _lanes(self, source: _Bytes) -> list[_Bytes]:
        cut = _front(source)
        front = _squeezed(source[:cut]) if cut else source[:0]
        head = _HEAD.pack(_LANES, cut, front.size, source.size - cut)
        return [np.frombuffer(head, np.uint8), front, *rans.encode(source[cut:])]

    def decode(self, data: memoryview, out: memoryview) -> None:
        """Decompress into ``out``, which is filled exactly.

        Raises:
            CodecError: if ``data`` is anything but one encoding of ``len(out)`` bytes. Lengths are
                checked before anything is decoded; nothing as large as ``out`` is allocated.
        """
        if len(out) == 0 or len(data) == 0:
            if len(out) != len(data):
                raise CodecError(f"{self.name}: {len(data)} bytes cannot hold {len(out)}")
            return
        if data[0] == _FRAME:
            decode_frame(self.name, data, out)
        elif data[0] == _LANES:
            self._decode_lanes(data, out)
        elif data[0] != _STORED or len(data) != len(out) + 1:
            raise CodecError(
                f"{self.name}: {len(data)} bytes of kind {data[0]} are not {len(out)} of content"
            )
        else:
            out[:] = data[1:]

    def _decode_lanes(self, data: memoryview, out: memoryview) -> None:
        if len(data) < _HEAD.size:
            raise CodecError(f"{self.name}: {len(data)} bytes are no encoding")
        _, cut, length, rest = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        if not (length <= cut and cut + rest == len(out) and rest > 0 and at < len(data)):
            raise CodecError(
                f"{self.name}: {len(data)} bytes, of which {length} for {cut} and the others for "
                f"{rest}, are not {len(out)} of content"
            )
        front = data[_HEAD.size : at]
        if length == cut:
            out[:cut] = front
        else:
            decode_frame(self.name, front, out[:cut])
        target, source = np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8)
        rans_reading.decode(source, at, source.size, target[cut:])
