"""``rans`` as a step of a chain: what is coded how, the front that is coded apart, damage."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tierkv.errors import CodecError
from tierkv.testing.codecs import BytesCodecTests, sample
from tierkv_codecs import rans, rans_codec, rans_reading
from tierkv_codecs.ecq import Ecq4
from tierkv_codecs.rans_codec import Rans
from tierkv_codecs.zstd import Zstd

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierkv.abc import BytesCodec

FRAME, STORED, LANES, PARTED = "frame", "stored", "lanes", "lanes with a front"
EVERY = (FRAME, STORED, LANES, PARTED)
HEAD = struct.Struct("<BIII")


class TestRans(BytesCodecTests):
    def make(self) -> Rans:
        return Rans()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes everywhere, and for payloads that tests are quick with."""
    monkeypatch.setattr(rans_codec, "_SHORT", 1 << 12)
    monkeypatch.setattr(rans_reading, "quick", lambda: True)


def codes(size: int, seed: int = 0) -> NDArray[np.uint8]:
    """Signed codes, as of steps."""
    rng = np.random.default_rng(seed)
    return np.rint(3 * rng.standard_normal(size)).astype(np.int8).view(np.uint8)


def payload(kind: str) -> bytes:
    """Something that is encoded in this way."""
    if kind == STORED:
        return np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8).tobytes()
    if kind == FRAME:
        return codes(3000).tobytes()
    found = codes(9000)
    if kind == PARTED:
        found[:400] = np.arange(400) % 50 + 100
    return found.tobytes()


def pack(data: bytes, codec: BytesCodec | None = None) -> bytes:
    room = memoryview(bytearray(len(data) + 64))
    size = (codec or Rans()).encode(memoryview(data), room)
    assert size is not None
    return bytes(room[:size])


def unpack(data: bytes, size: int) -> bytes:
    out = bytearray(size)
    Rans().decode(memoryview(data), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("kind", EVERY)
def test_every_way_comes_back_and_nothing_is_left_of_it(kind: str) -> None:
    data = payload(kind)
    packed = pack(data)
    assert packed[0] == {FRAME: 0x28, STORED: 0}.get(kind, 1)
    if kind in (LANES, PARTED):
        assert (HEAD.unpack_from(packed)[1] > 0) == (kind == PARTED)
    assert unpack(packed, len(data)) == data
    for size in (len(data) - 1, len(data) + 1, 1, 2 * len(data)):
        with pytest.raises(CodecError):
            unpack(packed, size)
    for wrong in (packed + b"\0", packed + packed, *(packed[:n] for n in (1, 5, 9, 300, -1))):
        if wrong != packed:
            with pytest.raises(CodecError):
                unpack(wrong, len(data))


@pytest.mark.parametrize("kind", EVERY)
def test_f034_damage_is_an_error_or_other_bytes_never_more(kind: str) -> None:
    data = payload(kind)
    packed = pack(data)
    rng = np.random.default_rng(len(kind))
    for at in [*range(min(len(packed), 24)), *rng.integers(0, len(packed), 60).tolist()]:
        wrong = bytearray(packed)
        wrong[at] ^= int(rng.integers(1, 256))
        room = bytearray(len(data) + 64)
        with contextlib.suppress(CodecError):
            Rans().decode(memoryview(bytes(wrong)), memoryview(room)[: len(data)])
        assert room[len(data) :] == bytes(64)


def test_fronts_that_are_not_there_are_refused() -> None:
    data = payload(PARTED)
    packed = pack(data)
    _, cut, length, rest = HEAD.unpack_from(packed)
    huge = 2**32 - 1
    for wrong in (
        *((0, length, rest), (cut, 0, rest), (len(data), length, 0), (cut, length, rest - 1)),
        *((huge, length, rest), (cut, huge, rest), (cut, length, huge), (cut, len(data), rest)),
        *((cut - 1, length, rest + 1), (cut + 1, length, rest - 1), (cut, length + 1, rest)),
    ):
        with pytest.raises(CodecError, match="rans"):
            unpack(HEAD.pack(1, *wrong) + packed[HEAD.size :], len(data))
    with pytest.raises(CodecError, match="kind 77"):
        unpack(b"\x4d" + packed[1:], len(data))


def test_without_vectors_it_is_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    data = payload(LANES)
    there = pack(data)
    monkeypatch.setattr(rans_reading, "quick", lambda: False)
    assert pack(data) == pack(data, Zstd())
    assert unpack(there, len(data)) == data  # and reads what others wrote


def test_noise_takes_one_byte_more() -> None:
    data = payload(STORED)
    assert len(pack(data)) == len(data) + 1
    assert Rans().encode(memoryview(data), memoryview(bytearray(len(data)))) is None


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_coded_steps_are_as_short_as_by_zstd(tensor: str) -> None:
    source = sample("bfloat16", (4, 512, 64), 3)
    packed = memoryview(bytearray(Ecq4().encoded_bytes((4, 512, 64), "bfloat16", tensor)))
    Ecq4().encode(source, tensor, packed)
    mine, other = pack(bytes(packed)), pack(bytes(packed), Zstd())
    assert len(mine) < 1.01 * len(other)


def test_scales_in_front_of_codes_get_a_code_of_their_own() -> None:
    data = payload(PARTED)
    together = sum(part.size for part in rans.encode(np.frombuffer(data, np.uint8)))
    assert len(pack(data)) < together - 64


def test_signed_codes_need_a_short_list_of_shares() -> None:
    # around 0, which is next to 255; lists of all symbols between would take 256 bytes
    signed = codes(9000)
    shifted = signed + np.uint8(128)
    sizes = [sum(part.size for part in rans.encode(plane)) for plane in (signed, shifted)]
    assert abs(sizes[0] - sizes[1]) < 16
