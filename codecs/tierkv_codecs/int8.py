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

Passes over memory: encode reads the source twice (extremes, codes) and writes the codes; decode
reads the codes and writes the target once. In torch, decode converts, multiplies, adds and rounds
in tiles that stay in the cache, in memory that the thread keeps. With the extra
``fast`` and contiguous bfloat16, encoding and decoding are one compiled loop each.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import TensorBytesCodec
from tierkv.errors import CodecError
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over
from tierkv_codecs import accelerated
from tierkv_codecs.affine import Groups, check_grouping, dtype_name, due_bytes, grouped_as
from tierkv_codecs.kernels import bits16, kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["Int8"]

_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
_STEPS = 255
_REFUSED = "int8: NaN, infinite or huge values cannot be quantised"
_WHOLE = 1 << 62  # a group is a whole channel of the block, or a whole row
_TILE = 1 << 20  # numbers worked on at once: memory is slow to begin with, at every call


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, torch.Tensor] = {}

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one tile, kept from call to call."""
        import torch

        count = prod(shape)
        if count > _TILE:
            return torch.empty(shape, dtype=dtype)
        kept = self.rooms.get(dtype)
        if kept is None:
            with torch.inference_mode(False):  # what is made in that mode is of no use outside it
                kept = self.rooms[dtype] = torch.empty(_TILE, dtype=dtype)
        return kept[:count].view(shape)


_own = _PerThread()


def _work_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _tiles(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Equal parts of the first tensor along its first two axes, and of those broadcast to it."""
    shape = tensors[0].shape
    if len(shape) == 1 or prod(shape) <= _TILE:
        yield tensors
        return
    inner = prod(shape[1:])
    if inner <= _TILE or len(shape) == 2:
        yield from _split(0, max(1, _TILE // inner), tensors)
        return
    columns = max(1, _TILE // prod(shape[2:]))
    for part in _split(0, 1, tensors):
        yield from _split(1, columns, part)


def _split(
    axis: int, size: int, tensors: tuple[torch.Tensor, ...]
) -> Iterator[tuple[torch.Tensor, ...]]:
    import torch

    # all views of a tensor in one call: one by one, they take as long as the arithmetic
    parts = [repeat(t) if t.shape[axis] == 1 else torch.split(t, size, axis) for t in tensors]
    first, *others = parts
    return zip(first, *others, strict=False)


def _scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Width of a step in the working dtype; 0 for a constant group. Same bits on both ways."""
    import torch

    scale = (high - low).div_(_STEPS)
    # below the normal numbers a reciprocal overflows: such a range is one step wide
    tiny = torch.finfo(scale.dtype).tiny
    if float(scale.amin()) >= tiny:
        return scale
    return scale.masked_fill_((scale < tiny) & (high > low), tiny)


def _extremes(source: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each group, in the working dtype.

    Raises:
        CodecError: if a group is not finite, or so large that the arithmetic could overflow.
    """
    import torch

    kind: torch.dtype = getattr(torch, _work_dtype(dtype_name(source)))
    low, high = source.amin(groups.axis, keepdim=True), source.amax(groups.axis, keepdim=True)
    limit = _limit(source.dtype)
    # written so that NaN, which fails every comparison, is refused as well
    if not bool(((low >= -limit) & (high <= limit)).all()):
        raise CodecError(_REFUSED)
    return low.to(kind).add_(0.0), high.to(kind).add_(0.0)  # a zero of either sign is one zero


def _limit(dtype: torch.dtype) -> float:
    """Largest magnitude that is taken; bfloat16 is as large as float32, in which it is computed."""
    import torch

    return float(torch.finfo(dtype).max) / (1 if dtype is torch.float16 else 4)


def _encode_fast(source: torch.Tensor, groups: Groups, out: memoryview) -> bool:
    """Encode in one compiled loop; False if there is none for this tensor.

    Raises:
        CodecError: as :meth:`Int8.encode`.
    """
    import numpy as np

    by_channel = groups.axis != source.dim() - 1
    bits = bits16(source, (prod(source.shape[:-1]), source.shape[-1]))
    loop = kernel("to_bytes_by_channel" if by_channel else "to_bytes_by_row")
    if bits is None or loop is None:
        return False
    tokens = (source.shape[1],) if by_channel else ()
    limit = np.float32(_limit(source.dtype))
    if not loop(bits.view(np.int16), *tokens, limit, np.frombuffer(out, np.uint8)):
        raise CodecError(_REFUSED)
    return True


def _decode_fast(data: memoryview, groups: Groups, into: torch.Tensor) -> bool:
    """Decode in one compiled loop; False if there is none for this tensor."""
    import numpy as np

    by_channel = groups.axis != into.dim() - 1
    out = bits16(into, (prod(into.shape[:-1]), into.shape[-1]))
    loop = kernel("bytes_by_channel" if by_channel else "bytes_by_row")
    if out is None or loop is None:
        return False
    tokens = (into.shape[1],) if by_channel else ()
    loop(np.frombuffer(data, np.uint8), *tokens, out)
    return True


@dataclass(frozen=True, slots=True)
class Int8(TensorBytesCodec):
    """Asymmetric 8-bit quantisation with a bound of half a step per element."""

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""

    def __post_init__(self) -> None:
        """Check the grouping.

        Raises:
            ConfigError: if there is no such grouping.
        """
        check_grouping(self.name, self.grouping)

    def _groups(self, shape: tuple[int, ...], tensor: str) -> Groups:
        return Groups.of(shape, grouped_as(self.grouping, tensor), _WHOLE)

    def supports(self, layer: Layer, tensor: TensorSpec) -> bool:
        """Floating point of two bytes or more: one byte has nothing to give."""
        return tensor.dtype in _FLOATS and len(tensor.shape) > 0

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """One byte per element, and two numbers of the tensor's dtype per group."""
        count = prod(shape)
        if count == 0:
            return 0
        return count + 2 * self._groups(shape, tensor).number * DTYPE_BYTES[dtype]

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Quantise to the nearest of 256 steps between the group's minimum and maximum.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        shape, dtype = tuple(source.shape), dtype_name(source)
        if source.numel() == 0 or accelerated.encode(self, source, tensor, out):
            return
        groups = self._groups(shape, tensor)
        if _encode_fast(source, groups, out):
            return
        low, high = _extremes(source, groups)
        size = groups.number * DTYPE_BYTES[dtype]
        over(out, dtype, groups.shape).copy_(low)
        over(out[size:], dtype, groups.shape).copy_(high)
        data = over(out[2 * size :], "uint8", shape)
        scale = _scale(low, high)
        inverse = scale.reciprocal().masked_fill_(scale == 0, 0)
        for part, q, m, s in _tiles(source, data, low, inverse):
            work = _own.room(part.shape, low.dtype).copy_(part)
            q.copy_(work.sub_(m).mul_(s).round_().clamp_(0, _STEPS))

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Write ``byte * scale + minimum``, rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` has not exactly the length of such a tensor.
        """
        import torch

        shape, dtype = tuple(into.shape), dtype_name(into)
        due = due_bytes(self, data, shape, dtype, tensor)
        if due == 0 or accelerated.decode(self, data, tensor, into):
            return
        groups = self._groups(shape, tensor)
        if _decode_fast(data, groups, into):
            return
        kind: torch.dtype = getattr(torch, _work_dtype(dtype))
        size = groups.number * DTYPE_BYTES[dtype]
        low, high = (over(data[at:], dtype, groups.shape).to(kind) for at in (0, size))
        scale = _scale(low, high)
        codes = over(data[2 * size :], "uint8", shape)
        for part, q, m, s in _tiles(into, codes, low, scale):
            part.copy_(_own.room(part.shape, kind).copy_(q).mul_(s).add_(m))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Half a step (range / 255 / 2), and the rounding of the arithmetic and of the dtype.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        if source.numel() == 0:
            return torch.zeros((1,) * source.dim(), dtype=torch.float64)
        low, high = _extremes(source, self._groups(tuple(source.shape), tensor))
        scale = _scale(low, high)
        half = scale.double() / 2
        kept, work = torch.finfo(source.dtype), torch.finfo(scale.dtype)
        largest = source.double().abs() + scale.double()
        arithmetic = work.eps * (_STEPS * scale.double() + low.double().abs() + largest)
        rounding = kept.eps / 2 * largest + kept.smallest_normal * kept.eps
        constant = scale == 0  # such a group is its minimum: exact in every dtype
        return torch.where(constant, 0.0, half + arithmetic + rounding)
