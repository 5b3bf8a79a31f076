"""Zstandard frames into given memory: exactly one frame, of exactly the size that is due."""

from __future__ import annotations

import pytest
import zstandard

from tierkv.errors import CodecError
from tierkv_codecs.frames import decode_frame

DATA = {
    "one block": bytes(range(256)) * 8,
    "several blocks": bytes(i * i % 251 for i in range(300_000)),
    "raw": bytes((i * 2654435761 >> 13) & 0xFF for i in range(5000)),
    "run": bytes(200_000),
    "one byte": b"x",
}


def frame(data: bytes, **settings: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **settings).compress(data)  # type: ignore[arg-type]


def decoded(packed: bytes, size: int) -> bytes:
    out = bytearray(b"\xa5" * (size + 64))
    decode_frame("test", memoryview(packed), memoryview(out)[:size])
    assert out[size:] == b"\xa5" * 64
    return bytes(out[:size])


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("checksum", [False, True])
def test_a_frame_fills_its_memory(kind: str, checksum: bool) -> None:
    data = DATA[kind]
    assert decoded(frame(data, write_checksum=checksum), len(data)) == data


@pytest.mark.parametrize("kind", DATA)
def test_f036_more_or_less_than_one_frame_is_refused(kind: str) -> None:
    data = DATA[kind]
    packed = frame(data, write_checksum=True)
    wrong = [
        packed + b"\0",
        packed + b"junk",
        packed * 2,
        packed[:-1],
        packed[:-5],
        packed[:7],
        b"",
    ]
    for broken in wrong:
        with pytest.raises(CodecError):
            decoded(broken, len(data))
    for size in (len(data) + 1, 2 * len(data), max(1, len(data) - 1)):
        if size != len(data):
            with pytest.raises(CodecError, match="other than"):
                decoded(packed, size)


def test_f037_a_wrong_checksum_is_seen() -> None:
    packed = bytearray(frame(DATA["raw"], write_checksum=True))
    packed[-1] ^= 1
    with pytest.raises(CodecError):
        decoded(bytes(packed), 5000)


def test_f035_an_unstated_size_is_refused() -> None:
    packed = frame(DATA["raw"], write_content_size=False)
    with pytest.raises(CodecError):
        decoded(packed, 5000)
    claims = bytes.fromhex("28b52ffde06c06060663636363")  # a terabyte in 13 bytes
    with pytest.raises(CodecError, match="other than 5000"):
        decoded(claims, 5000)
