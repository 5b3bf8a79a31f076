"""``lz4``: LZ4 blocks: fast, and useless on most KV, which it leaves alone at little cost.

Blocks carry no size of their own: the size that is due comes from the frame, which checks it, and
the decoder accepts neither trailing bytes nor a second block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import lz4.block

from tierkv.abc import BytesCodec
from tierkv.errors import CodecError

__all__ = ["Lz4"]

_MAX_INPUT = 0x7E000000  # LZ4_MAX_INPUT_SIZE: the format's own limit


@dataclass(frozen=True, slots=True)
class Lz4(BytesCodec):
    """Exactly one LZ4 block without a size field; nothing at all for no bytes."""

    name: ClassVar[str] = "lz4"

    def encode(self, data: memoryview, out: memoryview) -> int | None:
        """Compress ``data``; None if the result is longer than ``out`` or the input too long."""
        if len(data) == 0:
            return 0
        if len(data) > _MAX_INPUT:
            return None
        packed: bytes = lz4.block.compress(data, store_size=False)
        if len(packed) > len(out):
            return None
        out[: len(packed)] = packed
        return len(packed)

    def decode(self, data: memoryview, out: memoryview) -> None:
        """Decompress one block that fills ``out`` exactly.

        Raises:
            CodecError: if ``data`` is anything else; nothing larger than ``out`` is allocated.
        """
        if len(out) == 0 or len(data) == 0:
            if len(out) != len(data):
                raise CodecError(f"lz4: {len(data)} bytes cannot hold {len(out)}")
            return
        if len(out) > _MAX_INPUT:
            raise CodecError(f"lz4: a block never holds {len(out)} bytes")
        try:
            plain: bytes = lz4.block.decompress(data, uncompressed_size=len(out))
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"lz4: {error}") from error
        if len(plain) != len(out):
            raise CodecError(f"lz4: {len(plain)} bytes came out, {len(out)} are due")
        out[:] = plain
