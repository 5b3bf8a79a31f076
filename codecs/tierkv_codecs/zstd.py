"""``zstd``: Zstandard, tuned for KV: literals are entropy-coded, hardly any matches are sought.

The bytes of KV are memoryless, so that looking for repeats costs time and gains nothing: the
fast strategy with long minimum matches keeps the ratio of level 1 at a higher speed.

The library has traps, and each is closed here: contexts shared by threads give wrong bytes (one
context per thread); a frame may claim any size (the claim is compared with the size that is due
before anything is decoded); a second frame or trailing bytes are ignored by default (refused).
The frame carries its own checksum, so that zstd's is left out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import zstandard

from tierkv.abc import BytesCodec
from tierkv.errors import CodecError
from tierkv_codecs.frames import decode_frame

__all__ = ["Zstd"]


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                compression_level=1,
                strategy=zstandard.STRATEGY_FAST,
                min_match=7,
                hash_log=6,
                target_length=0,
                write_content_size=True,
                write_checksum=False,
                write_dict_id=False,
            )
        )


_contexts = _Contexts()


@dataclass(frozen=True, slots=True)
class Zstd(BytesCodec):
    """Exactly one Zstandard frame that states its content size; nothing at all for no bytes."""

    name: ClassVar[str] = "zstd"

    def encode(self, data: memoryview, out: memoryview) -> int | None:
        """Compress ``data``; None if the result is longer than ``out``."""
        if len(data) == 0:
            return 0
        packed = _contexts.compressor.compress(data)
        if len(packed) > len(out):
            return None
        out[: len(packed)] = packed
        return len(packed)

    def decode(self, data: memoryview, out: memoryview) -> None:
        """Decompress one frame that fills ``out`` exactly.

        Raises:
            CodecError: if ``data`` is anything else; nothing larger than ``out`` is allocated.
        """
        if len(out) == 0 or len(data) == 0:
            if len(out) != len(data):
                raise CodecError(f"zstd: {len(data)} bytes cannot hold {len(out)}")
            return
        decode_frame(self.name, data, out)
