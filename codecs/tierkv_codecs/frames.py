"""Zstandard frames into memory that is there already.

The library's own ``decompress`` makes a new object for every result, and the first touch of new
memory takes as long as decoding into it. A reader fills memory of ours in one call, but it does not
tell where a frame ends: so that trailing bytes and second frames are refused, the blocks of the
frame are walked first (RFC 8878, section 3.1.1; a few bytes for each 128 KiB).
"""

from __future__ import annotations

import threading
from typing import Final

import zstandard

from tierkv.errors import CodecError

__all__ = ["decode_frame"]

_BLOCK_HEADER: Final = 3
_CHECKSUM: Final = 4
_RLE: Final = 1  # the block type of which one byte is stored


class _PerThread(threading.local):
    # contexts of zstd that are shared between threads give wrong bytes
    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_own = _PerThread()


def _length(data: memoryview, checksum: bool) -> int:
    """Bytes of the frame that ``data`` begins with; more than there are if it is cut."""
    at, last = zstandard.frame_header_size(data), False
    while not last and at < len(data):
        header = int.from_bytes(data[at : at + _BLOCK_HEADER], "little")
        last = bool(header & 1)
        at += _BLOCK_HEADER + (1 if header >> 1 & 3 == _RLE else header >> 3)
    return at + (_CHECKSUM if checksum else 0) + (0 if last else 1)


def decode_frame(name: str, data: memoryview, out: memoryview) -> None:
    """Decode exactly one frame that states its size into ``out``, which it fills.

    Args:
        name: Of the codec, for messages.
        data: The frame.
        out: Its content; at least one byte.

    Raises:
        CodecError: if ``data`` is anything else. The stated size is compared with that of ``out``
            before anything is decoded; nothing is allocated but the context's tables.
    """
    try:
        claimed = zstandard.get_frame_parameters(data)
        if claimed.content_size != len(out) or claimed.dict_id:
            raise CodecError(f"{name}: a frame of other than {len(out)} bytes, or a dictionary")
        if (length := _length(data, claimed.has_checksum)) != len(data):
            raise CodecError(f"{name}: {len(data)} bytes, but the frame in them has {length}")
        with _own.decompressor.stream_reader(data, closefd=False) as reader:
            found = 0
            while found < len(out) and (more := reader.readinto(out[found:])):
                found += more
            # the end of the frame is read too, and with it a checksum where there is one
            if found < len(out) or reader.read(1):
                raise CodecError(f"{name}: {found} bytes came out, {len(out)} are due")
    except zstandard.ZstdError as error:
        raise CodecError(f"{name}: {error}") from error
