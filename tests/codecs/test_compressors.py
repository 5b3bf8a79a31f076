"""``zstd`` and ``lz4``: the traps of their libraries."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import lz4.block
import pytest
import torch
import zstandard

from tierkv.errors import CodecError
from tierkv.testing.codecs import sample
from tierkv_codecs.lz4 import Lz4
from tierkv_codecs.zstd import Zstd

if TYPE_CHECKING:
    from tierkv.abc import BytesCodec

CODECS = (Zstd(), Lz4())


def kv(seed: int, size: int = 20_000) -> bytes:
    # values of few bits repeat, so that both compressors have something to do
    rounded = (sample("float32", (size // 2,), seed) * 2).round().bfloat16()
    return rounded.view(torch.uint8).numpy().tobytes()


def pack(codec: BytesCodec, data: bytes) -> bytes:
    out = memoryview(bytearray(len(data) + 100))
    nbytes = codec.encode(memoryview(data), out)
    assert nbytes is not None
    return bytes(out[:nbytes])


def unpack(codec: BytesCodec, data: bytes, size: int) -> bytes:
    out = bytearray(size)
    codec.decode(memoryview(data), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_f053_eight_threads_share_a_codec(codec: BytesCodec) -> None:
    data = [kv(seed) for seed in range(8)]

    def work(index: int) -> int:
        mine = data[index % 8]
        return sum(unpack(codec, pack(codec, mine), len(mine)) != mine for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(80))) == 0


def test_f035_the_bomb_allocates_nothing() -> None:
    bomb = bytes.fromhex("28b52ffde06c06060663636363")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for due in (1, 1000, 1 << 20):
        with pytest.raises(CodecError, match="other than"):
            unpack(Zstd(), bomb, due)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_f035_a_claim_that_fits_but_is_false_is_refused() -> None:
    # the content size is right and the content is not: what comes out decides
    frame = bytearray(pack(Zstd(), kv(1)))
    short = pack(Zstd(), kv(1)[:-1])
    claimed = zstandard.get_frame_parameters(bytes(frame)).content_size
    assert claimed == 20_000
    size_at = bytes(short).index((19_999 - 256).to_bytes(2, "little"))
    forged = bytearray(short)
    forged[size_at : size_at + 2] = (20_000 - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(bytes(forged)).content_size == 20_000
    with pytest.raises(CodecError):
        unpack(Zstd(), bytes(forged), 20_000)


def test_f036_zstd_frames_without_a_size_are_refused() -> None:
    data = kv(2)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    with pytest.raises(CodecError):
        unpack(Zstd(), unsized, len(data))


def test_f036_zstd_skippable_frames_are_refused() -> None:
    data = kv(3)
    skip = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"abcd"
    for wrong in (skip, skip + pack(Zstd(), data), pack(Zstd(), data) + skip):
        with pytest.raises(CodecError):
            unpack(Zstd(), wrong, len(data))
    with pytest.raises(CodecError):
        unpack(Zstd(), skip, 4)


def test_zstd_frames_with_a_dictionary_are_refused() -> None:
    words = zstandard.ZstdCompressionDict(kv(4), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    trained = zstandard.train_dictionary(2048, [kv(s, 400) for s in range(200)])
    data = kv(5)
    plain = zstandard.ZstdCompressor(dict_data=words).compress(data)
    named = zstandard.ZstdCompressor(dict_data=trained).compress(data)
    assert zstandard.get_frame_parameters(named).dict_id
    with pytest.raises(CodecError):
        unpack(Zstd(), named, len(data))
    with pytest.raises(CodecError):
        unpack(Zstd(), plain, len(data))


def test_any_zstd_frame_of_the_right_size_is_read() -> None:
    # other versions may compress differently; the format is the contract
    data = kv(6)
    for level in (-5, 1, 9, 19):
        packed = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)
        assert unpack(Zstd(), packed, len(data)) == data


def test_a_zstd_checksum_that_is_there_is_used() -> None:
    data = kv(7)
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(data))
    packed[-1] ^= 1
    with pytest.raises(CodecError):
        unpack(Zstd(), bytes(packed), len(data))


def test_lz4_blocks_carry_no_size_field() -> None:
    data = kv(8)
    assert lz4.block.decompress(pack(Lz4(), data), uncompressed_size=len(data)) == data
    with pytest.raises(CodecError):
        unpack(Lz4(), lz4.block.compress(data), len(data))


def test_lz4_refuses_what_the_format_cannot_hold() -> None:
    class Long(bytearray):
        def __len__(self) -> int:
            return 0x7E000001

    assert Lz4().encode(Long(), memoryview(bytearray(8))) is None  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="never holds"):
        Lz4().decode(memoryview(b"x"), Long())  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_read_only_and_offset_memory_is_taken(codec: BytesCodec) -> None:
    data = kv(9)
    around = b"xyz" + data + b"xyz"
    out = memoryview(bytearray(len(around)))
    nbytes = codec.encode(memoryview(around)[3:-3], out[1:])
    assert nbytes is not None
    room = memoryview(bytearray(len(data) + 2))
    codec.decode(out[1 : 1 + nbytes].toreadonly(), room[1:-1])
    assert room[1:-1] == data
