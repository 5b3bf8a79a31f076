"""Codecs that are wrong, each in one way that real ones were: the suites must tell.

Every mutant names the check that is there for it. :func:`failing_checks` runs a suite outside
pytest and says which checks fail.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from tierkv.abc import BytesCodec, TensorBytesCodec
from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.testing.codecs import BytesCodecTests, TensorBytesCodecTests
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.layout import Layer, TensorSpec

__all__ = ["MUTANTS", "REFERENCES", "Mutant", "failing_checks"]


class Mutant(NamedTuple):
    """A wrong codec and the check that must catch it."""

    make: Callable[[], Any]
    suite: type[Any]
    check: str


def failing_checks(
    suite: type[Any], make: Callable[[], Any], only: str = "test_"
) -> dict[str, str]:
    """Run the checks of ``suite`` whose names begin with ``only``; those that fail, and why."""
    case = type("Case", (suite,), {"make": lambda _self: make()})()
    failed = {}
    for name in sorted(name for name in dir(case) if name.startswith(only)):
        try:
            getattr(case, name)()
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


# --------------------------------------------------------------------------- correct references


@dataclass(frozen=True)
class Plain(TensorBytesCodec):
    """A correct lossless codec."""

    name: ClassVar[str] = "plain"
    lossless: ClassVar[bool] = True

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """Every tensor."""
        return True

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Elements times their size."""
        return prod(shape) * DTYPE_BYTES[dtype]

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Elements in C order."""
        out[:] = source.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Elements in C order."""
        if len(data) != into.numel() * into.dtype.itemsize:
            raise CodecError(f"{len(data)} bytes")
        self._read(data, into)

    def _read(self, data: memoryview, into: torch.Tensor) -> None:
        into.copy_(over(data, str(into.dtype).removeprefix("torch."), tuple(into.shape)))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Zero."""
        return torch.zeros(())


@dataclass(frozen=True)
class Halved(Plain):
    """A correct lossy codec: float32 kept as float16; too large or not finite is refused."""

    name: ClassVar[str] = "halved"
    lossless: ClassVar[bool] = False

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """float32 only."""
        return tensor.dtype == "float32"

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Two bytes per element."""
        return prod(shape) * 2

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Round to float16."""
        half = source.to(torch.float16)
        if not bool(half.isfinite().all()):
            raise CodecError("not finite in float16")
        out[:] = half.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Widen to float32."""
        if len(data) != into.numel() * 2:
            raise CodecError(f"{len(data)} bytes")
        self._read(data, into)

    def _read(self, data: memoryview, into: torch.Tensor) -> None:
        into.copy_(over(data, "float16", tuple(into.shape)))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Half a unit in the last place of float16."""
        return source.abs() * 2.0**-11 + 2.0**-25


@dataclass(frozen=True)
class Deflate(BytesCodec):
    """A correct compressor: one zlib stream."""

    name: ClassVar[str] = "deflate"

    def _compress(self, data: memoryview) -> bytes:
        return zlib.compress(data, 1)

    def encode(self, data: memoryview, out: memoryview) -> int | None:
        """One stream."""
        packed = self._compress(data)
        if len(packed) > len(out):
            return None
        out[: len(packed)] = packed
        return len(packed)

    def decode(self, data: memoryview, out: memoryview) -> None:
        """Exactly one stream of exactly that many bytes."""
        stream = zlib.decompressobj()
        try:
            plain = stream.decompress(data, len(out) + 1)
        except zlib.error as error:
            raise CodecError(str(error)) from error
        if len(plain) != len(out) or not stream.eof or stream.unused_data:
            raise CodecError(f"not one stream of {len(out)} bytes")
        out[:] = plain


# --------------------------------------------------------------------------- wrong ones


class _EqualOnlyToItself(Plain):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class _MemoryOrder(Plain):
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        if not source.is_contiguous() and source.untyped_storage().nbytes() >= len(out):
            source = torch.as_strided(source, (source.numel(),), (1,), 0)
        super().encode(source, tensor, out)


class _QuietNan(Plain):
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        if source.dtype in (torch.bfloat16, torch.float16):
            source = torch.where(source.isnan(), float("nan"), source)
        super().encode(source, tensor, out)


class _LeavesAByte(Plain):
    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        return super().encoded_bytes(shape, dtype, tensor) + 1

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        super().encode(source, tensor, out[:-1])

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        super().decode(data[:-1], tensor, into)


class _ReadsAPrefix(Plain):
    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        super().decode(data[: into.numel() * into.dtype.itemsize], tensor, into)


class _EatsItsSource(Plain):
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        super().encode(source, tensor, out)
        source.zero_()


class _SharedScratch(Plain):
    _memory: ClassVar[bytearray] = bytearray(1 << 20)

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        shared = memoryview(self._memory)[: len(out)]
        super().encode(source, tensor, shared)
        time.sleep(0.0005)
        out[:] = shared


class _Numbered(Plain):
    _calls: ClassVar[count[int]] = count()

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        return super().encoded_bytes(shape, dtype, tensor) + 4

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        super().encode(source, tensor, out[4:])
        out[:4] = next(self._calls).to_bytes(4, "little")

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        super().decode(data[4:], tensor, into)


class _NothingIsAnError(Plain):
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        assert source.numel(), "a scale of nothing"
        super().encode(source, tensor, out)


class _UnderstatedBound(Halved):
    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        return super().error_bound(source, tensor) / 4


class _EmptyPromise(Halved):
    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        return source.abs() + source.abs().amax()


class _CountsPadding(Halved):
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        if source.numel() and source.shape[-1] % 16:  # the zeros of the padding widen the range
            step = (source.amax().clamp(min=0) - source.amin().clamp(max=0)) / 255
            source = (source / step).round() * step
        super().encode(source, tensor, out)


class _ZeroOverZero(Halved):
    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        super().decode(data, tensor, into)
        if into.numel() and bool(into.amax() == into.amin()):
            into.mul_(float("nan"))


class _NanToNumber(Halved):
    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        super().encode(torch.nan_to_num(source, 0.0, 0.0, 0.0), tensor, out)


class _WholeLanes(Deflate):
    def _compress(self, data: memoryview) -> bytes:
        whole = len(data) // 64 * 64
        return super()._compress(memoryview(bytes(data[:whole]).ljust(len(data), b"\0")))


class _NoNegativeZero(Deflate):
    def _compress(self, data: memoryview) -> bytes:
        return super()._compress(memoryview(bytes(data).replace(b"\0\x80", b"\0\0")))


class _NothingIsFine(Deflate):
    def decode(self, data: memoryview, out: memoryview) -> None:
        if len(data):
            super().decode(data, out)


class _RaisesWhenFull(Deflate):
    def encode(self, data: memoryview, out: memoryview) -> int | None:
        packed = self._compress(data)
        assert len(packed) <= len(out), "buffer too small"
        return super().encode(data, out)


class _Stores(Deflate):
    def _compress(self, data: memoryview) -> bytes:
        return zlib.compress(data, 0)


class _ChangesLevel(Deflate):
    _calls: ClassVar[count[int]] = count()

    def _compress(self, data: memoryview) -> bytes:
        return zlib.compress(data, 1 + next(self._calls) % 2)


class _Lenient(Deflate):
    """Decodes what it can; subclasses say what they let pass."""

    def decode(self, data: memoryview, out: memoryview) -> None:
        stream = zlib.decompressobj()
        try:
            plain = stream.decompress(data, len(out) + 1)
        except zlib.error as error:
            raise CodecError(str(error)) from error
        if self._refused(stream, len(plain), len(out)):
            raise CodecError(f"not one stream of {len(out)} bytes")
        out[: len(plain)] = plain[: len(out)]

    def _refused(self, stream: zlib._Decompress, found: int, due: int) -> bool:
        raise NotImplementedError


class _IgnoresJunk(_Lenient):
    def _refused(self, stream: zlib._Decompress, found: int, due: int) -> bool:
        return found != due or not stream.eof or stream.unused_data[:1] == b"x"


class _FirstStreamOnly(_Lenient):
    def _refused(self, stream: zlib._Decompress, found: int, due: int) -> bool:
        return found != due or not stream.eof or stream.unused_data[:1] not in (b"", b"x")


class _PadsShort(_Lenient):
    def _refused(self, stream: zlib._Decompress, found: int, due: int) -> bool:
        return found > due or not stream.eof or bool(stream.unused_data)


class _TakesCut(_Lenient):
    def _refused(self, stream: zlib._Decompress, found: int, due: int) -> bool:
        return (found != due and (stream.eof or found > due)) or bool(stream.unused_data)


class _ChecksAfterwards(Deflate):
    def decode(self, data: memoryview, out: memoryview) -> None:
        try:
            whole = zlib.decompress(data)
        except zlib.error as error:
            raise CodecError(str(error)) from error
        if len(whole) != len(out):
            raise CodecError(f"{len(whole)} bytes")
        super().decode(data, out)


class _LeaksLibraryErrors(Deflate):
    def decode(self, data: memoryview, out: memoryview) -> None:
        zlib.decompressobj().decompress(data, len(out) + 1)
        super().decode(data, out)


class _SharedOutput(Deflate):
    _memory: ClassVar[bytearray] = bytearray(1 << 20)

    def decode(self, data: memoryview, out: memoryview) -> None:
        shared = memoryview(self._memory)[: len(out)] if len(out) < 1 << 20 else out
        super().decode(data, shared)
        time.sleep(0.0005)
        out[:] = shared


REFERENCES: tuple[tuple[Callable[[], Any], type[Any]], ...] = (
    (Plain, TensorBytesCodecTests),
    (Halved, TensorBytesCodecTests),
    (Deflate, BytesCodecTests),
)
"""Codecs that pass: without them a suite that fails everything would look sharp."""

MUTANTS: tuple[Mutant, ...] = (
    Mutant(_EqualOnlyToItself, TensorBytesCodecTests, "test_is_a_frozen_value"),
    Mutant(_SharedScratch, TensorBytesCodecTests, "test_threads_share_one_codec"),
    Mutant(_UnderstatedBound, TensorBytesCodecTests, "test_round_trip"),
    Mutant(_EmptyPromise, TensorBytesCodecTests, "test_bound_is_not_vacuous"),
    Mutant(_CountsPadding, TensorBytesCodecTests, "test_f023_head_dims"),
    Mutant(_ZeroOverZero, TensorBytesCodecTests, "test_f024_constants"),
    Mutant(_MemoryOrder, TensorBytesCodecTests, "test_f026_any_strides"),
    Mutant(_QuietNan, TensorBytesCodecTests, "test_f027_every_bit_pattern"),
    Mutant(_NothingIsAnError, TensorBytesCodecTests, "test_zero_tokens"),
    Mutant(_NanToNumber, TensorBytesCodecTests, "test_nan_and_infinity"),
    Mutant(_LeavesAByte, TensorBytesCodecTests, "test_fills_exactly"),
    Mutant(_Numbered, TensorBytesCodecTests, "test_deterministic"),
    Mutant(_EatsItsSource, TensorBytesCodecTests, "test_source_untouched"),
    Mutant(_ReadsAPrefix, TensorBytesCodecTests, "test_refuses_wrong_lengths"),
    Mutant(_WholeLanes, BytesCodecTests, "test_round_trip"),
    Mutant(_NoNegativeZero, BytesCodecTests, "test_f027_every_dtype"),
    Mutant(_NothingIsFine, BytesCodecTests, "test_empty"),
    Mutant(_RaisesWhenFull, BytesCodecTests, "test_no_room_is_none"),
    Mutant(_Stores, BytesCodecTests, "test_it_compresses"),
    Mutant(_ChangesLevel, BytesCodecTests, "test_deterministic"),
    Mutant(_IgnoresJunk, BytesCodecTests, "test_f036_trailing_bytes"),
    Mutant(_FirstStreamOnly, BytesCodecTests, "test_f036_second_stream"),
    Mutant(_PadsShort, BytesCodecTests, "test_f036_other_length"),
    Mutant(_TakesCut, BytesCodecTests, "test_cut_data"),
    Mutant(_ChecksAfterwards, BytesCodecTests, "test_f035_bombs"),
    Mutant(_LeaksLibraryErrors, BytesCodecTests, "test_garbage"),
    Mutant(_SharedOutput, BytesCodecTests, "test_threads_share_one_codec"),
)
