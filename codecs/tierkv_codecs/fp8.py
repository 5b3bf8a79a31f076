"""``fp8``: e4m3 with a scale, K per channel within a block, every other tensor per row.

Each group is divided by its largest magnitude and multiplied by 256, so that the largest value is
a power of two (exact, as is a constant group) and nothing overflows e4m3's 448. The magnitude
stands in the tensor's own dtype, exactly. Three bits of mantissa: a relative error of 1/16 at
most, an order of magnitude above int8 at nearly its size; for stores and kernels that want e4m3.

Encoding: the magnitude of each group, then one e4m3 byte per element, in C order.

Passes over memory: encode reads the source twice (magnitudes, codes); decode reads the bytes and
writes the target once, in tiles that stay in the cache. With the extra ``fast``, decoding to
contiguous bfloat16 is one pass. Tensors in a GPU's memory: see :mod:`tierkv_codecs.accelerated`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, Final

from tierkv.abc import TensorBytesCodec
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over
from tierkv_codecs import accelerated
from tierkv_codecs.affine import (
    FLOATS,
    Groups,
    check_finite,
    check_grouping,
    dtype_name,
    due_bytes,
    grouped_as,
)
from tierkv_codecs.kernels import bits16, kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["Fp8"]

_TOP: Final = 256.0
_WHOLE: Final = 1 << 62  # a group is a whole channel of the block, or a whole row
_TILE: Final = 1 << 16
_MANTISSA: Final = 2.0**-4  # half a unit in the last place, relative
_FIELDS: Final = 0x87F00000 - (1 << 32)  # sign, exponent and mantissa, shifted up; as int32
_UP: Final = 2.0**120
_SUBNORMAL: Final = 2.0**-10  # half the distance of e4m3's subnormals


def _tiles(shape: tuple[int, ...]) -> Iterator[slice]:
    if len(shape) == 1:
        return iter((slice(None),))
    step = max(1, _TILE // max(1, prod(shape[1:])))
    return (slice(at, at + step) for at in range(0, shape[0], step))


def _magnitudes(source: torch.Tensor, tensor: str) -> torch.Tensor:
    groups = Groups.of(tuple(source.shape), tensor, _WHOLE)
    low, high = groups.extremes(source)
    check_finite("fp8", low, high, dtype_name(source))
    return high.maximum(-low).add_(0.0)  # of zeros of both signs, torch takes whichever it likes


def _inverse(largest: torch.Tensor) -> torch.Tensor:
    import torch

    # below the normal numbers a quotient overflows: such a group is scaled as if it were larger
    tiny = torch.finfo(torch.float32).smallest_normal * _TOP
    return (_TOP / largest.clamp(min=tiny)).masked_fill_(largest == 0, 0)


def _decode_fast(data: memoryview, groups: Groups, scale: torch.Tensor, into: torch.Tensor) -> bool:
    """Decode in one compiled pass; False if there is no kernel for this tensor."""
    rows, dim = prod(into.shape[:-1]), into.shape[-1]
    out = bits16(into, (rows, dim))
    by_channel = groups.axis != into.dim() - 1
    loop = kernel("floats8_by_channel" if by_channel else "floats8_by_row")
    if out is None or loop is None:
        return False
    codes = over(data, "uint8", (rows, dim)).numpy()
    if by_channel:
        loop(codes, scale.reshape(-1, dim).numpy(), into.shape[1], out)
    else:
        loop(codes, scale.reshape(-1).numpy(), out)
    return True


@dataclass(frozen=True, slots=True)
class Fp8(TensorBytesCodec):
    """Scaled e4m3; NaN and infinities are refused, not encoded."""

    name: ClassVar[str] = "fp8"
    lossless: ClassVar[bool] = False

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""

    def __post_init__(self) -> None:
        """Check the grouping.

        Raises:
            ConfigError: if there is no such grouping.
        """
        check_grouping(self.name, self.grouping)

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """bfloat16, float16 and float32."""
        return tensor.dtype in FLOATS and len(tensor.shape) > 0

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """One byte per element, and one number of the tensor's dtype per group."""
        if prod(shape) == 0:
            return 0
        return (
            prod(shape)
            + Groups.of(shape, grouped_as(self.grouping, tensor), _WHOLE).number
            * DTYPE_BYTES[dtype]
        )

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Divide by the group's largest magnitude and round to e4m3.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        import torch

        if source.numel() == 0 or accelerated.encode(self, source, tensor, out):
            return
        shape, dtype = tuple(source.shape), dtype_name(source)
        largest = _magnitudes(source, grouped_as(self.grouping, tensor))
        over(out, dtype, tuple(largest.shape)).copy_(largest)
        codes = over(out[largest.numel() * DTYPE_BYTES[dtype] :], "float8_e4m3fn", shape)
        inverse = _inverse(largest)
        for tile in _tiles(shape):
            codes[tile].copy_(source[tile].to(torch.float32, copy=True).mul_(inverse[tile]))

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Write ``code * magnitude / 256``, rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        import torch

        shape, dtype = tuple(into.shape), dtype_name(into)
        due = due_bytes(self, data, shape, dtype, tensor)
        if due == 0 or accelerated.decode(self, data, tensor, into):
            return
        groups = Groups.of(shape, grouped_as(self.grouping, tensor), _WHOLE)
        # of float32, a float() is the encoding itself
        scale = over(data, dtype, groups.shape).float().mul(1 / _TOP)
        payload = data[groups.number * DTYPE_BYTES[dtype] :]
        if _decode_fast(payload, groups, scale, into):
            return
        codes = over(payload, "int8", shape)
        for tile in _tiles(shape):
            # e4m3 as the upper bits of a float32, too small by exactly 2 ** 120 (its NaN codes are
            # never written): several times as
            # fast as torch's own conversion
            bits = codes[tile].int().bitwise_left_shift_(20).bitwise_and_(_FIELDS)
            into[tile].copy_(bits.view(torch.float32).mul_(_UP).mul_(scale[tile]))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """A sixteenth of the value, or of the smallest normal number of its group's scale.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        if source.numel() == 0:
            return torch.zeros((1,) * source.dim(), dtype=torch.float64)
        largest = _magnitudes(source, grouped_as(self.grouping, tensor))
        kept, work = torch.finfo(source.dtype), torch.finfo(torch.float32)
        value = source.double().abs()
        unit = _inverse(largest).double().clamp(min=work.smallest_normal).reciprocal()
        exact = value == largest.double()
        error = (value * _MANTISSA).maximum(unit * _SUBNORMAL)
        spare = 4 * work.eps * (value + error) + work.smallest_normal
        rounding = kept.eps / 2 * (value + error) + kept.smallest_normal * kept.eps
        exact &= largest >= work.smallest_normal * _TOP
        return torch.where(exact, 0.0, error + spare + rounding)
