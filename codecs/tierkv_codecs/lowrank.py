"""``lowrank``: each head of a block as the product of two thin matrices. Experimental.

Method: truncated singular value decomposition (Eckart and Young), as KV compressors with learned
bases use it over whole caches (KVTC, arXiv 2511.01815), here for one block and without training.
Each channel is shifted by the middle of its range and divided by half of it, so that neither a few
large channels nor far ones decide alone, and a constant channel comes back exactly. Of ``[tokens,
dim]`` an eighth of the possible rank is kept. Both factors are stored by
:class:`tierkv_codecs.int8.Int8`: the left one a scale a column, the right one a scale a row.

For tensors that are of low rank up to little noise (:mod:`tests.codecs.test_lowrank` names a set),
it is smaller and truer than ``int2``. The KV of models, 64 tokens at a time, is not so, which is
why this codec is experimental: there ``int3`` and ``rot3`` are better at every size.

Encoding: the middles, the half ranges (both in the tensor's dtype), the left factor, the right one.

Passes over memory: encode decomposes every head, which costs far more than memory; decode adds one
outer product for each rank, in a fixed order, so that every machine gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tierkv.abc import TensorBytesCodec
from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over
from tierkv_codecs.affine import FLOATS, check_finite, dtype_name, due_bytes
from tierkv_codecs.int8 import Int8

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["LowRank"]

_SHARE = 8  # of the possible rank, one in so many is kept
_LEFT, _RIGHT = "k", "v"  # how int8 groups the factors: by column, by row
_FACTOR = Int8()


class _Sizes(NamedTuple):
    heads: int
    tokens: int
    dim: int
    rank: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> _Sizes:
        dim = shape[-1]
        heads = shape[0] if len(shape) == 3 else 1
        tokens = prod(shape[:-1]) // heads
        return cls(heads, tokens, dim, -(-min(tokens, dim) // _SHARE))

    @property
    def left(self) -> tuple[int, int, int]:
        return self.heads, self.tokens, self.rank

    @property
    def right(self) -> tuple[int, int, int]:
        return self.heads, self.rank, self.dim


class _Parts(NamedTuple):
    """A tensor taken apart: ``middle + half * (left @ right)``; float32."""

    middle: torch.Tensor
    half: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


def _scales(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Middle and half range of each channel, in the dtype of ``source``: ``[heads, 1, dim]``."""
    low, high = source.amin(1, keepdim=True), source.amax(1, keepdim=True)
    check_finite("lowrank", low.float(), high.float(), dtype_name(source))
    wide = (low.double(), high.double())
    middle = ((wide[0] + wide[1]) / 2).to(source.dtype)
    middle = middle.where(low != high, low)
    center = middle.double()
    return middle, (wide[1] - center).maximum(center - wide[0]).to(source.dtype)


def _take_apart(source: torch.Tensor, sizes: _Sizes) -> _Parts:
    import torch

    middle, half = _scales(source)
    inverse = half.float().reciprocal()
    tiny = half.float() < torch.finfo(torch.float32).smallest_normal
    inverse.masked_fill_(tiny, 0)  # too near for a quotient: its middle stands for the channel
    scaled = (source.float() - middle.float()).mul_(inverse)
    try:
        u, s, vh = torch.linalg.svd(scaled.contiguous(), full_matrices=False)
    except RuntimeError as error:
        raise CodecError(f"lowrank: no decomposition was found: {error}") from error
    left = u[..., : sizes.rank] * s[:, None, : sizes.rank]
    right = vh[:, : sizes.rank]
    return _Parts(middle.float(), half.float(), left.contiguous(), right.contiguous())


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right``, summed in the order of the ranks, product by product."""
    total = left[..., :1] * right[:, :1]
    for rank in range(1, left.shape[-1]):
        total.add_(left[..., rank : rank + 1] * right[:, rank : rank + 1])
    return total


@dataclass(frozen=True, slots=True)
class LowRank(TensorBytesCodec):
    """Truncated decomposition of each head, factors in eight bits."""

    name: ClassVar[str] = "lowrank"
    lossless: ClassVar[bool] = False

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """bfloat16, float16 and float32."""
        return tensor.dtype in FLOATS and len(tensor.shape) > 0

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Two numbers a channel, and both factors as ``int8`` stores them."""
        if prod(shape) == 0:
            return 0
        sizes = _Sizes.of(shape)
        factors = _FACTOR.encoded_bytes(sizes.left, "float32", _LEFT)
        factors += _FACTOR.encoded_bytes(sizes.right, "float32", _RIGHT)
        return 2 * sizes.heads * sizes.dim * DTYPE_BYTES[dtype] + factors

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Decompose each head and keep the largest singular values.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        if source.numel() == 0:
            return
        sizes = _Sizes.of(tuple(source.shape))
        parts = _take_apart(source.reshape(sizes[:3]), sizes)
        at = 0
        for scale in parts[:2]:
            over(out[at:], dtype_name(source), tuple(scale.shape)).copy_(scale)
            at += scale.numel() * source.dtype.itemsize
        end = at + _FACTOR.encoded_bytes(sizes.left, "float32", _LEFT)
        _FACTOR.encode(parts.left, _LEFT, out[at:end])
        _FACTOR.encode(parts.right, _RIGHT, out[end:])

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Write ``middle + half * (left @ right)``, rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        import torch

        shape, dtype = tuple(into.shape), dtype_name(into)
        due = due_bytes(self, data, shape, dtype, tensor)
        if due == 0:
            return
        sizes = _Sizes.of(shape)
        channels = (sizes.heads, 1, sizes.dim)
        size = prod(channels) * into.dtype.itemsize
        middle, half = (over(data[at:], dtype, channels).float() for at in (0, size))
        end = 2 * size + _FACTOR.encoded_bytes(sizes.left, "float32", _LEFT)
        left, right = torch.empty(sizes.left), torch.empty(sizes.right)
        _FACTOR.decode(data[2 * size : end], _LEFT, left)
        _FACTOR.decode(data[end:], _RIGHT, right)
        into.copy_(_product(left, right).mul_(half).add_(middle).view(shape))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """What the kept ranks leave of this tensor, the errors of the factors, and rounding.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        if source.numel() == 0:
            return torch.zeros((1,) * source.dim(), dtype=torch.float64)
        sizes = _Sizes.of(tuple(source.shape))
        flat = source.reshape(sizes[:3])
        parts = _take_apart(flat, sizes)
        middle, half, left, right = (t.double() for t in parts)
        loose = [
            _FACTOR.error_bound(factor, name).double().expand(factor.shape)
            for factor, name in ((parts.left, _LEFT), (parts.right, _RIGHT))
        ]
        work, kept = torch.finfo(torch.float32), torch.finfo(source.dtype)
        reach = (left.abs() + loose[0]) @ (right.abs() + loose[1])
        rest = (flat.double() - middle - half * (left @ right)).abs()
        inexact = reach - left.abs() @ right.abs() + 2 * sizes.rank * work.eps * reach
        error = rest + half * inexact
        value = flat.double().abs() + error
        spare = 4 * work.eps * (value + middle.abs()) + work.smallest_normal
        rounding = kept.eps / 2 * (value + spare) + kept.smallest_normal * kept.eps
        bound = torch.where(half == 0, 0.0, error + spare + rounding)
        return bound.view(source.shape)
