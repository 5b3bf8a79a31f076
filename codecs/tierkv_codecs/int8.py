"""``int8``: one byte per number, asymmetric: K per channel within a block, V per token.

Method: KIVI (Liu et al., arXiv 2402.02750) found that keys have outlier channels and values
outlier tokens, and quantises each along the axis that isolates them; at eight bits it is nearly
lossless. Here ``k`` takes one scale for each (head, channel) over the tokens of the block, every
other tensor one for each row along its last axis.

Encoding: the minimum of each group, the maximum of each group, then one byte per element in C
order. Minimum and maximum are values of the tensor and stand in its own dtype, exactly; nothing
can overflow or lose bits in them, and a constant group comes back exactly. Arithmetic runs in
float32 (float64 for float64) and is rounded once: half precision would lose as much again as the
quantisation itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import TensorBytesCodec
from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["Int8"]

_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
_STEPS = 255
_TILE = 1 << 18  # elements worked on at once: the temporary stays in the cache


def _axis(rank: int, tensor: str) -> int:
    return 1 if tensor == "k" and rank == 3 else rank - 1


def _work_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _group_shape(shape: tuple[int, ...], tensor: str) -> tuple[int, ...]:
    axis = _axis(len(shape), tensor)
    return tuple(1 if i == axis else n for i, n in enumerate(shape))


def _tiles(shape: tuple[int, ...]) -> Iterator[slice]:
    # along the first axis: no group crosses it, unless the tensor has no other axis
    step = max(1, _TILE // max(1, prod(shape[1:]))) if len(shape) > 1 else shape[0]
    return (slice(at, at + step) for at in range(0, shape[0], step))


def _scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Width of a step in the working dtype; 0 for a constant group. Same bits on both ways."""
    import torch

    scale = (high - low).div_(_STEPS)
    # below the normal numbers a reciprocal overflows: such a range is one step wide
    tiny = torch.finfo(scale.dtype).tiny
    return scale.masked_fill_((scale < tiny) & (high > low), tiny)


def _extremes(source: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each group, in the working dtype.

    Raises:
        CodecError: if a group is not finite, or so large that the arithmetic could overflow.
    """
    import torch

    low, high = source.amin(axis, keepdim=True), source.amax(axis, keepdim=True)
    limit = torch.finfo(source.dtype).max / (4 if source.dtype.itemsize > 2 else 1)
    if source.dtype is torch.bfloat16:
        limit /= 4  # as large as float32, in which it is computed
    # written so that NaN, which fails every comparison, is refused as well
    if not bool(((low >= -limit) & (high <= limit)).all()):
        raise CodecError("int8: NaN, infinite or huge values cannot be quantised")
    kind: torch.dtype = getattr(torch, _work_dtype(_dtype(source)))
    return low.to(kind), high.to(kind)


@dataclass(frozen=True, slots=True)
class Int8(TensorBytesCodec):
    """Asymmetric 8-bit quantisation with a bound of half a step per element."""

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """Floating point of two bytes or more: one byte has nothing to give."""
        return tensor.dtype in _FLOATS and len(tensor.shape) > 0

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """One byte per element, and two numbers of the tensor's dtype per group."""
        count = prod(shape)
        if count == 0:
            return 0
        return count + 2 * prod(_group_shape(shape, tensor)) * DTYPE_BYTES[dtype]

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Quantise to the nearest of 256 steps between the group's minimum and maximum.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        shape, dtype = tuple(source.shape), _dtype(source)
        if source.numel() == 0:
            return
        low, high = _extremes(source, _axis(len(shape), tensor))
        groups = tuple(low.shape)
        size = low.numel() * DTYPE_BYTES[dtype]
        over(out, dtype, groups).copy_(low)
        over(out[size:], dtype, groups).copy_(high)
        data = over(out[2 * size :], "uint8", shape)
        scale = _scale(low, high)
        inverse = scale.reciprocal().masked_fill_(scale == 0, 0)
        for tile in _tiles(shape):
            part = source[tile].to(low.dtype, copy=True)
            part.sub_(low[tile]).mul_(inverse[tile]).round_().clamp_(0, _STEPS)
            data[tile].copy_(part)

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Write ``byte * scale + minimum``, rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` has not exactly the length of such a tensor.
        """
        import torch

        shape, dtype = tuple(into.shape), _dtype(into)
        due = self.encoded_bytes(shape, dtype, tensor)
        if len(data) != due:
            raise CodecError(f"int8: {len(data)} bytes are not {dtype} {shape}, which takes {due}")
        if due == 0:
            return
        work: torch.dtype = getattr(torch, _work_dtype(dtype))
        groups = _group_shape(shape, tensor)
        size = prod(groups) * DTYPE_BYTES[dtype]
        low, high = (over(data[at:], dtype, groups).to(work) for at in (0, size))
        scale = _scale(low, high)
        steps = over(data[2 * size :], "uint8", shape)
        for tile in _tiles(shape):
            part = steps[tile].to(work)
            into[tile].copy_(part.mul_(scale[tile]).add_(low[tile]))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Half a step (range / 255 / 2), and the rounding of the arithmetic and of the dtype.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        if source.numel() == 0:
            return torch.zeros((1,) * source.dim(), dtype=torch.float64)
        low, high = _extremes(source, _axis(source.dim(), tensor))
        scale = _scale(low, high)
        half = scale.double() / 2
        kept, work = torch.finfo(source.dtype), torch.finfo(scale.dtype)
        largest = source.double().abs() + scale.double()
        arithmetic = work.eps * (_STEPS * scale.double() + low.double().abs() + largest)
        rounding = kept.eps / 2 * largest + kept.smallest_normal * kept.eps
        constant = scale == 0  # such a group is its minimum: exact in every dtype
        return torch.where(constant, 0.0, half + arithmetic + rounding)
