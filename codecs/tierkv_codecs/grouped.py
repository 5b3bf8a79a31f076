"""``int6``, ``int4``, ``int3``, ``int2``: few bits a number, a minimum and a step a group.

The groups, and why they are cut so, are told in :mod:`tierkv_codecs.affine`; the order of the
codes in :mod:`tierkv_codecs.packing`. In blocks of 64 tokens with a head size that is a multiple
of 64, 16-bit tensors take 24 bits for 64 numbers beside the codes: 6.38, 4.38, 3.38 and 2.38 bits
a number.

Encoding: the row of steps (8 bytes), one byte of step a group, the minimum of each group, the
packed codes; all in C order.

Passes over memory: encode reads the source twice (extremes, codes) and writes codes and packed
bytes; decode unpacks one byte a number, then works in tiles that stay in the cache and writes the
target once. With the extra ``fast``, each of those passes over contiguous bfloat16 is one compiled
loop, and decoding is one loop in all: it reads the packed bytes and writes the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import TensorBytesCodec
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over
from tierkv_codecs import accelerated, compiled
from tierkv_codecs.affine import (
    FLOATS,
    GROUP,
    ROW_BYTES,
    Groups,
    check_finite,
    check_grouping,
    dtype_name,
    due_bytes,
    grouped_as,
    nearest,
    read_row,
    row_of,
    write_row,
)
from tierkv_codecs.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    import torch

    from tierkv.layout import Layer, TensorSpec

__all__ = ["Grouped", "Int2", "Int3", "Int4", "Int6"]

_TILE = 1 << 16  # numbers worked on at once: the float32 temporary stays in the cache


class Grouped(TensorBytesCodec):
    """What the codecs of this family share; ``bits`` is all that tells them apart."""

    __slots__ = ()

    lossless: ClassVar[bool] = False
    bits: ClassVar[int]
    group: ClassVar[int] = GROUP
    grouping: str

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
        """Row of steps; a byte and a minimum for each group; the packed codes."""
        if prod(shape) == 0:
            return 0
        groups = Groups.of(shape, grouped_as(self.grouping, tensor), self.group)
        codes = packed_bytes(prod(shape[:-1]), shape[-1], self.bits)
        return ROW_BYTES + groups.number * (1 + DTYPE_BYTES[dtype]) + codes

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Quantise to the nearest of ``2 ** bits`` steps above the group's minimum.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        import torch

        if source.numel() == 0 or accelerated.encode(self, source, tensor, out):
            return
        shape, dtype = tuple(source.shape), dtype_name(source)
        groups = Groups.of(shape, grouped_as(self.grouping, tensor), self.group)
        low, high = groups.extremes(source)
        check_finite(self.name, low, high, dtype)
        top = (1 << self.bits) - 1
        step = write_row((high - low).div_(top), out, up=True)
        at = ROW_BYTES + groups.number
        over(out[at:], dtype, groups.shape).copy_(low)
        at += groups.number * DTYPE_BYTES[dtype]
        inverse = step.reciprocal().masked_fill_(step == 0, 0)
        codes = torch.empty(shape, dtype=torch.uint8)
        if not compiled.find_codes(source, groups, low, inverse, top, codes):
            for piece, q, m, s in zip(
                groups.cut(source), groups.cut(codes), *_each(groups, low, inverse), strict=True
            ):
                for tile in _tiles(piece):
                    work = piece[tile].to(torch.float32, copy=True)
                    q[tile].copy_(nearest(work.sub_(m[tile]).mul_(s[tile]), top))
        pack(codes.view(-1, shape[-1]), self.bits, out[at:])

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Write ``code * step + minimum``, rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        import torch

        shape, dtype = tuple(into.shape), dtype_name(into)
        due = due_bytes(self, data, shape, dtype, tensor)
        if due == 0 or accelerated.decode(self, data, tensor, into):
            return
        groups = Groups.of(shape, grouped_as(self.grouping, tensor), self.group)
        row = row_of(self.name, data)
        if compiled.decode(data[ROW_BYTES:], self.bits, groups, row, into):
            return
        step = read_row(self.name, data, groups.shape)
        at = ROW_BYTES + groups.number
        low = over(data[at:], dtype, groups.shape).float()
        at += groups.number * DTYPE_BYTES[dtype]
        codes = torch.empty(shape, dtype=torch.uint8)
        unpack(data[at:], self.bits, codes.view(-1, shape[-1]))
        for piece, q, m, s in zip(
            groups.cut(into), groups.cut(codes), *_each(groups, low, step), strict=True
        ):
            for tile in _tiles(piece):
                piece[tile].copy_(q[tile].float().mul_(s[tile]).add_(m[tile]))

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """Half a step, and the rounding of the arithmetic and of the dtype.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        if source.numel() == 0:
            return torch.zeros((1,) * source.dim(), dtype=torch.float64)
        groups = Groups.of(tuple(source.shape), grouped_as(self.grouping, tensor), self.group)
        low, high = groups.extremes(source)
        check_finite(self.name, low, high, dtype_name(source))
        top = (1 << self.bits) - 1
        room = memoryview(bytearray(ROW_BYTES + groups.number))
        step = write_row((high - low).div_(top), room, up=True).double()
        kept, work = torch.finfo(source.dtype), torch.finfo(torch.float32)
        span = groups.size
        wide = [t.repeat_interleave(span, groups.axis) for t in (step, low.double())]
        s, m = (t.narrow(groups.axis, 0, source.shape[groups.axis]) for t in wide)
        largest = source.double().abs() + s
        arithmetic = work.eps * (2 * top * s + 2 * m.abs() + largest)
        rounding = kept.eps / 2 * largest + kept.smallest_normal * kept.eps
        return torch.where(s == 0, 0.0, s / 2 + arithmetic + rounding)


def _each(groups: Groups, *numbers: torch.Tensor) -> list[list[torch.Tensor]]:
    """One view a place along the axis, broadcastable to the pieces of :meth:`Groups.cut`."""
    return [[t.narrow(groups.axis, i, 1) for i in range(groups.places)] for t in numbers]


def _tiles(piece: torch.Tensor) -> list[slice]:
    # along the first axis: the numbers of a group are told apart by the other axes, or broadcast
    if piece.dim() == 1:
        return [slice(None)]
    step = max(1, _TILE // max(1, prod(piece.shape[1:])))
    return [slice(at, at + step) for at in range(0, piece.shape[0], step)]


@dataclass(frozen=True, slots=True)
class Int6(Grouped):
    """Six bits: nearly as true as int8 at three quarters of its size."""

    name: ClassVar[str] = "int6"
    bits: ClassVar[int] = 6

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""


@dataclass(frozen=True, slots=True)
class Int4(Grouped):
    """Four bits."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""


@dataclass(frozen=True, slots=True)
class Int3(Grouped):
    """Three bits."""

    name: ClassVar[str] = "int3"
    bits: ClassVar[int] = 3

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""


@dataclass(frozen=True, slots=True)
class Int2(Grouped):
    """Two bits: for what would otherwise be dropped."""

    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""
