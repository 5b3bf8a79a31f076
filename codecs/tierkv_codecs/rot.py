"""``rot4``, ``rot3``, ``rot2``: rotated rows in Lloyd-Max codes; K per channel as the integers do.

Method: the MSE half of TurboQuant (Zandieh et al., arXiv 2504.19874): rotate each row by signs and
a Hadamard transform, after which its numbers are close to normal, scale it, and take the nearest of
the levels that are best for a normal distribution (Lloyd, Max). Its second half, a one-bit sketch
of the error (QJL), made quality worse wherever it was tried, and is left out. The scale of a row is
the one that fits its codes best (least squares), kept in one byte (see
:func:`tierkv_codecs.affine.write_row`).

``k`` is not rotated. Keys have a few large channels; rotating spreads those over all, which ruins
models where they are large (measured on Gemma 3 270M at four bits: KL 4.4e-2 rotated, 2.1e-3 per
channel). So ``k`` goes through the groups of :mod:`tierkv_codecs.grouped`: of 32 tokens for four
and two bits, of 64 for three. In blocks of 64 tokens of 16-bit tensors with heads of 64 that makes
4.44, 3.25 and 2.44 bits a number, both tensors together.

Encoding of rotated tensors: the row of steps (8 bytes), one byte of step a row, the packed codes.

A constant row is not exact: it is rotated like any other. ``k``, and rows of zeros, are.

Passes over memory: in tiles that stay in the cache, a transposition, ``log2(dim)`` steps of the
transform and the codes. With the extra ``fast`` and contiguous bfloat16, encoding takes sixteen
rows at a time through all steps in memory that the thread keeps, and keeps the rotated numbers
once; decoding reads the codes and writes the target, all between is in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from tierkv_codecs import accelerated, rotating
from tierkv_codecs.affine import (
    ROW_BYTES,
    check_finite,
    dtype_name,
    due_bytes,
    grouped_as,
    row_of,
    write_row,
)
from tierkv_codecs.grouped import Grouped
from tierkv_codecs.hadamard import pieces, rotate, signs
from tierkv_codecs.levels import cuts, look_up, root, upper
from tierkv_codecs.packing import pack, packed_bytes
from tierkv_codecs.rotation_reading import tiles, turn_back

if TYPE_CHECKING:
    import torch

__all__ = ["Rot2", "Rot3", "Rot4", "Rotated"]


def _codes(numbers: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Code of the nearest level for numbers ``[dim, rows]`` with a scale a row; uint8."""
    import torch

    inverse = step.reciprocal().masked_fill_(step == 0, 0)
    codes = torch.zeros(numbers.shape, dtype=torch.uint8)
    for tile in tiles(*numbers.shape):
        scaled = numbers[tile] * inverse
        above = torch.empty(scaled.shape, dtype=torch.bool)
        ones, found = above.view(torch.uint8), codes[tile]
        for cut in map(float, cuts(bits)):  # many times faster than a search for each number
            torch.gt(scaled, cut, out=above)
            found.add_(ones)
    return codes


def _summed(numbers: torch.Tensor) -> torch.Tensor:
    """Sums of the columns of ``[dim, rows]``, which is lost: the upper half to the lower."""
    count = len(numbers)
    while count > 1:
        left = (count + 1) // 2
        numbers[: count - left].add_(numbers[left:count])
        count = left
    return numbers[0]


def _fitted(rotated: torch.Tensor, bits: int) -> torch.Tensor:
    """Best scale of each row for its codes, by least squares; sums in a fixed order."""
    import torch

    spread = _summed(rotated.square()).mul(1 / len(rotated)).sqrt_()
    inverse = spread.reciprocal().masked_fill_(spread == 0, 0)
    level = torch.zeros_like(rotated)
    for tile in tiles(*rotated.shape):
        place = (rotated[tile] * inverse).abs_()
        for cut, height in zip(*upper(bits), strict=True):
            level[tile].masked_fill_(place >= float(cut), float(height))
    above = _summed(rotated.abs().mul_(level))
    return (above / _summed(level.square_())).masked_fill_(spread == 0, 0)


class Rotated(Grouped):
    """What the codecs of this family share."""

    __slots__ = ()

    def _per_channel(self, shape: tuple[int, ...], tensor: str) -> bool:
        return grouped_as(self.grouping, tensor) == "k" and len(shape) == 3

    def encoded_bytes(self, shape: tuple[int, ...], dtype: str, tensor: str) -> int:
        """Row of steps; a byte for each row; the packed codes. ``k``: as the integer codecs."""
        if prod(shape) == 0 or self._per_channel(shape, tensor):
            return super().encoded_bytes(shape, dtype, tensor)
        rows = prod(shape[:-1])
        return ROW_BYTES + rows + packed_bytes(rows, shape[-1], self.bits)

    def encode(self, source: torch.Tensor, tensor: str, out: memoryview) -> None:
        """Rotate, fit a scale to each row, round to the nearest level.

        Raises:
            CodecError: if a value is NaN, infinite, or too large for the arithmetic.
        """
        shape = tuple(source.shape)
        if accelerated.encode(self, source, tensor, out):
            return
        if source.numel() == 0 or self._per_channel(shape, tensor):
            super().encode(source, tensor, out)
            return
        rows = source.numel() // shape[-1]
        fast = rotating.rotated(source, self.bits)
        if fast is not None:
            check_finite(self.name, -fast.largest, fast.largest, dtype_name(source))
            step = write_row(fast.fitted(), out, up=False)
            codes = fast.codes(step)
        else:
            rotated = self._rotated(source)
            step = write_row(_fitted(rotated, self.bits), out, up=False)
            codes = _codes(rotated, step, self.bits).t().contiguous()
        pack(codes, self.bits, out[ROW_BYTES + rows :])

    def _rotated(self, source: torch.Tensor) -> torch.Tensor:
        """Rotated rows as the columns of a float32 ``[dim, rows]``, norm kept."""
        import torch

        dtype = dtype_name(source)
        low, high = source.amin().float(), source.amax().float()
        check_finite(self.name, low, high, dtype)
        dim = source.shape[-1]
        rows = source.numel() // dim
        found = torch.empty((dim, rows), dtype=torch.float32)
        sign, scale = signs(dim), root(dim)
        flat = source.reshape(rows, dim)
        for tile in tiles(rows, dim):
            work = torch.empty((dim, len(flat[tile])), dtype=torch.float32)
            work.copy_(flat[tile].t())
            rotate(work, sign)
            found[:, tile] = work.mul_(scale)
        return found

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Look the levels up, scale and rotate back; rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        shape, dtype = tuple(into.shape), dtype_name(into)
        due = due_bytes(self, data, shape, dtype, tensor)
        if accelerated.decode(self, data, tensor, into):
            return
        if due == 0 or self._per_channel(shape, tensor):
            super().decode(data, tensor, into)
            return
        row = row_of(self.name, data)
        if not rotating.decode(data[ROW_BYTES:], self.bits, row, into):
            turn_back(data[ROW_BYTES:], self.bits, row, into)

    def error_bound(self, source: torch.Tensor, tensor: str) -> torch.Tensor:
        """The rotated errors of a piece, all added up against one number; ``k``: half a step.

        Raises:
            CodecError: if :meth:`encode` refuses ``source``.
        """
        import torch

        shape = tuple(source.shape)
        if source.numel() == 0 or self._per_channel(shape, tensor):
            return super().error_bound(source, tensor)
        rotated = self._rotated(source)
        dim, rows = rotated.shape
        room = memoryview(bytearray(ROW_BYTES + rows))
        step = write_row(_fitted(rotated, self.bits), room, up=False)
        taken = look_up(_codes(rotated, step, self.bits), self.bits).mul_(step)
        error = (rotated.double() - taken.double()).abs()
        kept, work = torch.finfo(source.dtype), torch.finfo(torch.float32)
        bound = torch.empty_like(error)
        for at, size in pieces(dim):
            mine = error[at : at + size].sum(0) * size**-0.5
            # rounding of both transforms, against the norm of the piece
            norm = rotated[at : at + size].double().norm(dim=0) + mine
            bound[at : at + size] = mine + 8 * work.eps * size.bit_length() * norm
        bound = bound.t().reshape(shape)
        largest = source.double().abs() + bound
        return bound + kept.eps / 2 * largest + kept.smallest_normal * kept.eps


@dataclass(frozen=True, slots=True)
class Rot4(Rotated):
    """Four bits."""

    name: ClassVar[str] = "rot4"
    bits: ClassVar[int] = 4
    group: ClassVar[int] = 32

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""


@dataclass(frozen=True, slots=True)
class Rot3(Rotated):
    """Three bits."""

    name: ClassVar[str] = "rot3"
    bits: ClassVar[int] = 3

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""


@dataclass(frozen=True, slots=True)
class Rot2(Rotated):
    """Two bits."""

    name: ClassVar[str] = "rot2"
    bits: ClassVar[int] = 2
    group: ClassVar[int] = 32

    grouping: str = ""
    """``"channel"`` or ``"token"``; nothing: as suits the tensor."""
