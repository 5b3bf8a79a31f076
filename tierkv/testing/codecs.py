"""Conformance suites for codecs.

A plug-in's test file subclasses the suite of its kind and says how to make the codec::

    class TestMine(TensorBytesCodecTests):
        def make(self) -> Mine:
            return Mine()

pytest then runs every check. The checks use plain asserts and need no fixtures; what they must
catch is shown by :mod:`tierkv.testing.codec_mutants`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES, Layer, TensorSpec
from tierkv.testing.memory import peak_growth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierkv.abc import BytesCodec, TensorBytesCodec

__all__ = ["BytesCodecTests", "CodecTests", "TensorBytesCodecTests", "same_bits", "sample"]

_NAMES = ("k", "v", "latent")
_HEAD_DIMS = (1, 63, 80, 96, 112, 256)
_THREADS = 8
_CANARY = 0xA5
_BOMB_BYTES = 64 << 20  # far more than any check needs, and small enough to survive

_Shape = tuple[int, ...]


def sample(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random finite values of a dtype, the same for the same seed."""
    source = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(shape, generator=source).to(kind)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=source).to(kind)
    return torch.randint(-100, 100, shape, generator=source).to(kind)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape, and the same bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    pair = (t.contiguous().flatten().view(torch.uint8) for t in (left, right))
    return torch.equal(*pair)


def _every_pattern(dtype: str) -> torch.Tensor:
    size = DTYPE_BYTES[dtype]
    kind: torch.dtype = getattr(torch, dtype)
    if kind is torch.bool:
        return torch.tensor([False, True]).view(1, 2, 1)
    count = 1 << min(16, 8 * size)
    integer = torch.arange(count).to({1: torch.uint8, 2: torch.int16}.get(size, torch.int64))
    if size > 2:  # too many to try: spread the patterns over the high bits instead
        bits = (integer << (8 * size - 16)) | (integer * 40503 & 0xFFFF)
        integer = bits.to(torch.int32 if size == 4 else torch.int64)
    return integer.view(kind).view(1, -1, 8)


def _strided(dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    whole = sample(dtype, (4, 10, 12), seed=7)
    yield "transposed", whole.transpose(0, 1)
    yield "permuted", whole.permute(2, 1, 0)
    yield "every second channel", whole[..., ::2]
    yield "every second token", whole[:, ::2]
    yield "offset", whole[1:3, 3:8, 2:9]
    yield "expanded", whole[:1].expand(4, 10, 12)


def _refuses(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except CodecError:
        return
    raise AssertionError(f"{what} was accepted; it must raise CodecError")


class CodecTests(ABC):
    """What codecs of every kind have in common."""

    @abstractmethod
    def make(self) -> Any:
        """Return the codec under test."""

    @abstractmethod
    def _round_trip(self, seed: int) -> bool:
        """Encode and decode something that depends on ``seed``; True if it came back."""

    def test_is_a_frozen_value(self) -> None:
        """No mutable state; equal settings are equal codecs; the name fits into a chain."""
        codec = self.make()
        assert dataclasses.is_dataclass(codec), "a codec is a dataclass"
        assert type(codec).__dataclass_params__.frozen, "a codec is frozen"  # type: ignore[union-attr]
        assert len({codec, self.make()}) == 1, "codecs with the same settings must be equal"
        name: str = self.make().name
        assert name
        assert name == name.strip().lower(), f"bad name {name!r}"
        assert not set(name) & set("+: /"), f"bad name {name!r}"

    def test_threads_share_one_codec(self) -> None:
        """F053: one instance in eight threads; contexts of native libraries are per thread."""
        assert all(self._round_trip(seed) for seed in range(_THREADS)), "it fails in one thread"
        with ThreadPoolExecutor(_THREADS) as pool:
            done = list(pool.map(self._round_trip, [s % _THREADS for s in range(_THREADS * 16)]))
        assert all(done), f"{done.count(False)} of {len(done)} round trips gave other values"


class TensorBytesCodecTests(CodecTests):
    """Conformance of a :class:`tierkv.abc.TensorBytesCodec`."""

    @abstractmethod
    def make(self) -> TensorBytesCodec:
        """Return the codec under test."""

    # ------------------------------------------------------------------ how the checks drive it

    def _dtypes(self) -> list[str]:
        found = []
        for dtype in DTYPE_BYTES:
            spec = TensorSpec("k", dtype, (4, 16))
            if self.make().supports(Layer(0, (spec,)), spec):
                found.append(dtype)
        assert found, "a codec supports at least one dtype"
        return found

    def _encode(self, source: torch.Tensor, tensor: str, fill: int = 0) -> bytes:
        codec = self.make()
        dtype = str(source.dtype).removeprefix("torch.")
        size = codec.encoded_bytes(tuple(source.shape), dtype, tensor)
        memory = bytearray([fill]) * (size + 64)
        codec.encode(source, tensor, memoryview(memory)[:size])
        assert memory[size:] == bytes([fill]) * 64
        return bytes(memory[:size])

    def _decode(self, data: bytes, tensor: str, like: torch.Tensor) -> torch.Tensor:
        into, memory = torch.empty(like.shape, dtype=like.dtype), bytearray(data)
        self.make().decode(memoryview(memory).toreadonly(), tensor, into)
        assert memory == data, "decode changed the encoding"
        return into

    def _fits(self, source: torch.Tensor, tensor: str, found: torch.Tensor) -> bool:
        codec = self.make()
        if codec.lossless:
            return same_bits(source, found)
        bound = codec.error_bound(source, tensor).double()
        return bool(((found.double() - source.double()).abs() <= bound).all())

    def _check(self, source: torch.Tensor, tensor: str, what: str) -> None:
        found = self._decode(self._encode(source, tensor), tensor, source)
        assert self._fits(source, tensor, found), f"{what}, {tensor!r}: other values came back"

    def _round_trip(self, seed: int) -> bool:
        source = sample(self._dtypes()[0], (2, 64, 64), seed)
        return self._fits(source, "k", self._decode(self._encode(source, "k"), "k", source))

    # ------------------------------------------------------------------ checks

    def test_round_trip(self) -> None:
        """Bit for bit if lossless, else within the stated bound; every dtype it supports."""
        for dtype in self._dtypes():
            for tensor in _NAMES:
                self._check(sample(dtype, (3, 16, 32)), tensor, dtype)

    def test_bound_is_not_vacuous(self) -> None:
        """A bound is finite, at least zero, and smaller than the values themselves."""
        source = sample(self._dtypes()[0], (3, 64, 32))
        bound = self.make().error_bound(source, "k").double()
        assert bool((bound >= 0).all())
        assert float(bound.max()) < float(source.double().abs().max()), "the bound says nothing"
        assert not self.make().lossless or float(bound.max()) == 0

    def test_f023_head_dims(self) -> None:
        """No size is padded with numbers that then count as values."""
        for dim in _HEAD_DIMS:
            for tensor in ("k", "v"):
                source = sample(self._dtypes()[0], (2, 16, dim), seed=dim) + 1000
                self._check(source, tensor, f"head_dim {dim}")

    def test_f024_constants(self) -> None:
        """Constant tensors and constant channels come back exactly and finite."""
        for dtype in self._dtypes():
            whole = torch.full((2, 16, 8), 3).to(getattr(torch, dtype))
            channel = sample(dtype, (2, 16, 8))
            channel[:, :, 2] = 1
            for source, index in ((whole, slice(None)), (channel, 2)):
                found = self._decode(self._encode(source, "k"), "k", source)
                assert same_bits(source[..., index], found[..., index]), f"{dtype}: not constant"
                assert bool(found.double().isfinite().all())

    def test_f026_any_strides(self) -> None:
        """The logical values travel, whatever the memory order, both ways."""
        dtype = self._dtypes()[0]
        for what, source in _strided(dtype):
            self._check(source, "k", what)
            room = torch.zeros(*(2 * n for n in source.shape), dtype=source.dtype)
            into = room[tuple(slice(1, 2 * n, 2) for n in source.shape)]
            data = self._encode(source, "k")
            self.make().decode(memoryview(data), "k", into)
            assert self._fits(source, "k", into), f"{what}: other values in a strided target"
            into.zero_()
            assert not bool(room.any()), f"{what}: wrote outside the target"

    def test_f027_every_bit_pattern(self) -> None:
        """Lossless means every pattern: NaN payloads, signed zeros, subnormals."""
        if not self.make().lossless:
            return
        for dtype in self._dtypes():
            self._check(_every_pattern(dtype), "v", dtype)

    def test_zero_tokens(self) -> None:
        """Empty tensors are encoded and decoded like others."""
        for shape in ((2, 0, 8), (0, 4, 8), (2, 4, 0)):
            source = torch.empty(shape, dtype=getattr(torch, self._dtypes()[0]))
            for tensor in ("k", "v"):
                data = self._encode(source, tensor)
                assert self._decode(data, tensor, source).shape == source.shape

    def test_nan_and_infinity(self) -> None:
        """Kept bit for bit by a lossless codec, refused by a lossy one; never made into numbers."""
        kinds = [d for d in self._dtypes() if d in ("bfloat16", "float16", "float32", "float64")]
        for dtype in kinds:
            for value in (float("nan"), float("inf"), float("-inf")):
                for tensor in ("k", "v"):
                    source = sample(dtype, (2, 8, 8))
                    source[1, 3, 5] = value
                    if self.make().lossless:
                        self._check(source, tensor, f"{dtype} {value}")
                    else:
                        _refuses(lambda s=source, t=tensor: self._encode(s, t), f"{value}")  # type: ignore[misc]

    def test_fills_exactly(self) -> None:
        """Every byte of ``out`` is written: none keeps what was in a recycled buffer."""
        for dtype in self._dtypes():
            source = sample(dtype, (3, 16, 32))
            assert self._encode(source, "k", 0x00) == self._encode(source, "k", 0xFF), dtype

    def test_deterministic(self) -> None:
        """Equal values give equal bytes, in any memory order."""
        source = sample(self._dtypes()[0], (3, 16, 32))
        twin = source.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        first = self._encode(source, "k")
        assert all(self._encode(s, "k") == first for s in (source, source, twin))

    def test_source_untouched(self) -> None:
        """The caller's tensor is read only, and may change afterwards."""
        source = sample(self._dtypes()[0], (3, 16, 32))
        kept = source.clone()
        data = self._encode(source, "k")
        assert same_bits(source, kept), "encode changed its source"
        source.zero_()
        assert self._fits(kept, "k", self._decode(data, "k", kept)), "encode kept a reference"

    def test_refuses_wrong_lengths(self) -> None:
        """Only exactly one encoding of that shape is decoded."""
        source = sample(self._dtypes()[0], (3, 16, 32))
        data = self._encode(source, "k")
        for what, wrong in {
            "a cut encoding": data[:-1],
            "nothing": b"",
            "trailing bytes": data + b"\0",
            "two encodings": data + data,
        }.items():
            _refuses(lambda w=wrong: self._decode(w, "k", source), what)  # type: ignore[misc]


class BytesCodecTests(CodecTests):
    """Conformance of a :class:`tierkv.abc.BytesCodec`."""

    @abstractmethod
    def make(self) -> BytesCodec:
        """Return the codec under test."""

    def _encode(self, data: bytes) -> bytes:
        out = memoryview(bytearray([_CANARY]) * (2 * len(data) + 1024))
        kept = bytearray(data)
        nbytes = self.make().encode(memoryview(kept).toreadonly(), out)
        assert kept == data, "encode changed its source"
        assert nbytes is not None, "there was room for twice the data"
        return bytes(out[:nbytes])

    def _decode(self, data: bytes, size: int) -> bytes:
        memory, kept = bytearray([_CANARY]) * (size + 64), bytearray(data)
        self.make().decode(memoryview(kept).toreadonly(), memoryview(memory)[:size])
        assert kept == data, "decode changed the encoding"
        assert memory[size:] == bytes([_CANARY]) * 64
        return bytes(memory[:size])

    def _round_trip(self, seed: int) -> bool:
        data = _payload(40_000, seed)
        return self._decode(self._encode(data), len(data)) == data

    def test_round_trip(self) -> None:
        """Every length and kind of data comes back."""
        for size in (1, 2, 3, 63, 64, 65, 4095, 65_537):
            for data in (bytes(size), _payload(size, 1), _noise(size)):
                assert self._decode(self._encode(data), size) == data, f"{size} bytes"

    def test_f027_every_dtype(self) -> None:
        """All bit patterns of every dtype."""
        for dtype in DTYPE_BYTES:
            data = _every_pattern(dtype).contiguous().flatten().view(torch.uint8).numpy().tobytes()
            assert self._decode(self._encode(data), len(data)) == data, dtype

    def test_empty(self) -> None:
        """No bytes: encoded, decoded, and told apart from something."""
        assert self._decode(self._encode(b""), 0) == b""
        _refuses(lambda: self._decode(b"", 16), "nothing, where 16 bytes are due")

    def test_no_room_is_none(self) -> None:
        """Data that does not fit is reported, not raised, and nothing is written past ``out``."""
        data = _noise(5000)
        for room in (0, 1, 100, 4000):
            memory = bytearray([_CANARY]) * (room + 64)
            assert self.make().encode(memoryview(data), memoryview(memory)[:room]) is None
            assert memory[room:] == bytes([_CANARY]) * 64

    def test_it_compresses(self) -> None:
        """Data with structure becomes shorter."""
        assert len(self._encode(bytes(10_000))) < 1000

    def test_deterministic(self) -> None:
        """Equal data gives equal bytes."""
        data = _payload(40_000, 3)
        assert self._encode(data) == self._encode(data)

    def test_f036_trailing_bytes(self) -> None:
        """Bytes after the encoding are not ignored."""
        data = _payload(5000, 4)
        for junk in (b"\0", b"junk", bytes(64)):
            _refuses(lambda j=junk: self._decode(self._encode(data) + j, len(data)), "junk")  # type: ignore[misc]

    def test_f036_second_stream(self) -> None:
        """Two encodings are not one, whichever length is due."""
        data = _payload(5000, 5)
        twice = self._encode(data) * 2
        _refuses(lambda: self._decode(twice, len(data)), "a second stream")
        _refuses(lambda: self._decode(twice, 2 * len(data)), "two streams for one")

    def test_f036_other_length(self) -> None:
        """More or fewer bytes than are due are refused, not cut or padded."""
        data = _payload(5000, 6)
        packed = self._encode(data)
        for due in (1, len(data) - 1, len(data) + 1, 2 * len(data)):
            _refuses(lambda d=due: self._decode(packed, d), f"{len(data)} bytes for {due}")  # type: ignore[misc]

    def test_cut_data(self) -> None:
        """A cut encoding is refused wherever it is cut."""
        data = _payload(5000, 7)
        packed = self._encode(data)
        for end in (0, 1, 5, len(packed) // 2, len(packed) - 1):
            _refuses(lambda e=end: self._decode(packed[:e], len(data)), f"cut at {end}")  # type: ignore[misc]

    def test_f035_bombs(self) -> None:
        """A small input that would become large allocates no more than is due."""
        large = self._encode(bytes(_BOMB_BYTES))
        claims = bytes.fromhex("28b52ffde06c06060663636363")  # zstd: a terabyte in 13 bytes
        self._round_trip(0)

        def explode() -> None:
            _refuses(lambda: self._decode(large, 1000), "a bomb")
            _refuses(lambda: self._decode(claims, 1000), "a bomb")

        grown = peak_growth(explode)
        assert grown < _BOMB_BYTES // 4, f"memory grew by {grown} bytes for 1000 bytes of output"

    def test_garbage(self) -> None:
        """Random bytes raise CodecError or decode to something; never another exception."""
        for seed in range(200):
            data = _noise(1 + seed * 7 % 120, seed)
            try:
                self._decode(data, 300)
            except CodecError:
                continue


def _noise(size: int, seed: int = 0) -> bytes:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=source, dtype=torch.uint8).numpy().tobytes()


def _payload(size: int, seed: int) -> bytes:
    return sample("bfloat16", (size // 2 + 1,), seed).view(torch.uint8).numpy().tobytes()[:size]
