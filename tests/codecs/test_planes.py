"""``planes``: how it finds the width of a word, what it gains, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.testing.codecs import sample
from tierkv_codecs import kernels
from tierkv_codecs.planes import Planes

CODEC = Planes()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def pack(data: bytes) -> bytes:
    out = memoryview(bytearray(len(data) + 64))
    nbytes = CODEC.encode(memoryview(data), out)
    assert nbytes is not None
    return bytes(out[:nbytes])


def unpack(data: bytes, size: int) -> bytes:
    out = bytearray(size)
    CODEC.decode(memoryview(data), memoryview(out))
    return bytes(out)


def kv(dtype: str, seed: int = 0) -> torch.Tensor:
    """Channels of different size, as real keys have."""
    scale = sample("float32", (4, 1, 64), seed + 1).mul(0.7).exp()
    return (sample("float32", (4, 64, 64), seed) * scale).to(getattr(torch, dtype))


@pytest.fixture(params=["numpy", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to split and merge, where both are installed."""
    if request.param == "numpy":
        monkeypatch.setattr("tierkv_codecs.planes.kernel", lambda *_: None)
    elif not kernels.available():
        pytest.skip("numba is not installed")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("size", [1, 7, 8, 63, 4096, 30_001])
def test_f027_every_dtype_and_length_comes_back(dtype: str, size: int) -> None:
    data = raw(sample(dtype, (size,), size))
    assert unpack(pack(data), len(data)) == data


@pytest.mark.usefixtures("path")
def test_f027_every_pattern_of_sixteen_bits() -> None:
    data = raw(torch.arange(1 << 16).to(torch.int16))
    for shifted in (data, data[1:], data[:-3]):
        assert unpack(pack(shifted), len(shifted)) == shifted


@pytest.mark.parametrize(
    ("dtype", "least"), [("bfloat16", 1.4), ("float16", 1.1), ("float32", 1.15), ("float64", 1.05)]
)
def test_floats_become_shorter(dtype: str, least: float) -> None:
    data = raw(kv(dtype))
    packed = pack(data)
    assert packed[0] % DTYPE_BYTES[dtype] == 0, "a word is at least one number"
    assert len(data) / len(packed) >= least


def test_bytes_without_words_are_one_plane() -> None:
    packed = pack(raw(sample("float32", (1 << 15,), 3).mul(9).to(torch.int8)))
    assert packed[0] == 1
    assert len(packed) < 0.8 * (1 << 15)


def test_what_does_not_pay_is_not_longer_than_its_header() -> None:
    noise = torch.randint(0, 256, (20_000,), generator=torch.Generator().manual_seed(1))
    data = raw(noise.to(torch.uint8))
    assert len(pack(data)) <= len(data) + 1 + 4 * 8
    assert CODEC.encode(memoryview(data), memoryview(bytearray(len(data)))) is None


def test_f035_lengths_are_checked_before_anything_is_decoded() -> None:
    data = raw(kv("bfloat16"))
    packed = bytearray(pack(data))
    assert packed[0] == 2 | 0x40, "channels of different size are centred"
    for at in range(1, 3 + 4 * 3):
        broken = bytearray(packed)
        broken[at] ^= 0x40
        with pytest.raises(CodecError, match="planes"):
            unpack(bytes(broken), len(data))


@pytest.mark.parametrize("width", [0, 3, 5, 16, 255])
def test_widths_that_do_not_exist_are_refused(width: int) -> None:
    packed = pack(raw(kv("bfloat16")))
    with pytest.raises(CodecError, match="words of"):
        unpack(bytes([width]) + packed[1:], 4 * 64 * 64 * 2)


def test_f036_a_plane_of_another_length_is_refused() -> None:
    data = raw(kv("bfloat16"))
    packed = pack(data)
    for due in (len(data) - 2, len(data) + 2, 2 * len(data)):
        with pytest.raises(CodecError):
            unpack(packed, due)


def test_kernels_and_numpy_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.available():
        pytest.skip("numba is not installed")
    data = raw(kv("bfloat16", 7))
    fast = pack(data)
    monkeypatch.setattr("tierkv_codecs.planes.kernel", lambda *_: None)
    assert pack(data) == fast
