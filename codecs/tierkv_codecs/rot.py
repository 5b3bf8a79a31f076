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
transform and the codes. With the extra ``fast`` and contiguous bfloat16, a few rows at a time go
through all steps in memory that the thread keeps.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from tierkv.errors import CodecError
from tierkv.views import over
from tierkv_codecs.affine import (
    ROW_BYTES,
    check_finite,
    dtype_name,
    grouped_as,
    read_row,
    write_row,
)
from tierkv_codecs.grouped import Grouped
from tierkv_codecs.hadamard import pieces, rotate, rotate_back, signs
from tierkv_codecs.kernels import bits16, kernel
from tierkv_codecs.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["Rot2", "Rot3", "Rot4", "Rotated"]

_LEVELS: Final = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9423, 1.2562, 1.6181, 2.0690, 2.7326),
}
"""Positive levels of the best quantiser of a standard normal number (Max 1960); format."""
_TILE: Final = 1 << 15  # numbers worked on at once


def _levels(bits: int) -> torch.Tensor:
    import torch

    half = _LEVELS[bits]
    return torch.tensor([*(-x for x in reversed(half)), *half], dtype=torch.float32)


@functools.cache
def _cuts(bits: int) -> tuple[Any, ...]:
    """Limits between the levels: float32 numbers, as a tuple for the kernel."""
    levels = _levels(bits)
    return tuple((levels[:-1] + levels[1:]).mul_(0.5).numpy())


def _look_up(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels of codes ``[dim, rows]``, float32 and contiguous."""
    index = codes.int().reshape(-1)
    return _levels(bits).index_select(0, index).view(codes.shape)


def _codes(numbers: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Code of the nearest level for numbers ``[dim, rows]`` with a scale a row; uint8."""
    import torch

    inverse = step.reciprocal().masked_fill_(step == 0, 0)
    codes = torch.zeros(numbers.shape, dtype=torch.uint8)
    loop, cuts = kernel("count_above"), _cuts(bits)
    if loop is not None:
        loop(numbers.numpy(), inverse.numpy(), cuts, codes.numpy())
        return codes
    for tile in _tiles(*numbers.shape):
        scaled = numbers[tile] * inverse
        above = torch.empty(scaled.shape, dtype=torch.bool)
        ones, found = above.view(torch.uint8), codes[tile]
        for cut in map(float, cuts):  # many times faster than a search for each number
            torch.gt(scaled, cut, out=above)
            found.add_(ones)
    return codes


def _tiles(rows: int, dim: int) -> Iterator[slice]:
    """Slices along the first axis."""
    step = max(1, _TILE // dim)
    return (slice(at, at + step) for at in range(0, rows, step))


def _root(dim: int) -> torch.Tensor:
    """``1 / sqrt(n)`` for each number of a row, ``n`` the length of its piece; ``[dim, 1]``."""
    import torch

    parts = [torch.full((size, 1), size**-0.5) for _, size in pieces(dim)]
    return torch.cat(parts)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.rotations: dict[int, tuple[Any, ...]] = {}


_own = _PerThread()


def _rotation(dim: int) -> tuple[Any, ...]:
    """What kernels need to know: root, signs, starts and sizes of the pieces, room for a tile."""
    import numpy as np

    found = _own.rotations.get(dim)
    if found is None:
        starts, sizes = (np.array(t) for t in zip(*pieces(dim), strict=True))
        memory = np.zeros(3 * 16 * dim + 16, np.float32)
        first = -memory.ctypes.data // 4 % 16  # registers are as wide as a line of the cache
        room = memory[first : first + 3 * 16 * dim].reshape(3, 16 * dim)
        found = _root(dim).reshape(-1).numpy(), signs(dim).numpy(), starts, sizes, room
        _own.rotations[dim] = found
    return found


def _rotate_fast(source: torch.Tensor, found: torch.Tensor) -> bool:
    """Rotate in one compiled pass; False if there is no kernel for this tensor."""
    dim, rows = found.shape
    bits, loop = bits16(source, (rows, dim)), kernel("rotate_rows")
    if bits is None or loop is None:
        return False
    loop(bits, *_rotation(dim), found.numpy())
    return True


def _decode_fast(data: memoryview, bits: int, step: torch.Tensor, into: torch.Tensor) -> bool:
    """Decode in one compiled pass; False if there is no kernel for this tensor."""
    import numpy as np
    import torch

    dim, rows = into.shape[-1], len(step)
    out, loop = bits16(into, (rows, dim)), kernel("levels_by_row")
    if out is None or loop is None:
        return False
    if bits == 4:
        codes = over(data, "uint8", (-(-rows // 2), dim))
    else:
        codes = torch.empty((rows, dim), dtype=torch.uint8)
        unpack(data, bits, codes)
        codes.add_(8 - (1 << bits - 1))  # levels of fewer bits stand in the middle of sixteen
    half = _LEVELS[bits]
    levels = tuple(map(np.float32, (*half, *half[-1:] * (8 - len(half)))))
    loop(codes.numpy(), levels, step.numpy(), *_rotation(dim), out)
    return True


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
        if source.numel() == 0 or self._per_channel(shape, tensor):
            super().encode(source, tensor, out)
            return
        rotated = self._rotated(source)
        step = self._fit(rotated, out)
        codes = _codes(rotated, step, self.bits).t().contiguous()
        pack(codes, self.bits, out[ROW_BYTES + len(codes) :])

    def _rotated(self, source: torch.Tensor) -> torch.Tensor:
        """Rotated rows as the columns of a float32 ``[dim, rows]``, norm kept."""
        import torch

        dtype = dtype_name(source)
        low, high = source.amin().float(), source.amax().float()
        check_finite(self.name, low, high, dtype)
        dim = source.shape[-1]
        rows = source.numel() // dim
        found = torch.empty((dim, rows), dtype=torch.float32)
        sign, root = signs(dim), _root(dim)
        if _rotate_fast(source, found):
            return found
        flat = source.reshape(rows, dim)
        for tile in _tiles(rows, dim):
            work = torch.empty((dim, len(flat[tile])), dtype=torch.float32)
            work.copy_(flat[tile].t())
            rotate(work, sign)
            found[:, tile] = work.mul_(root)
        return found

    def _fit(self, rotated: torch.Tensor, out: memoryview) -> torch.Tensor:
        """Best scale of each row for its codes; writes it to ``out``, rounded as returned."""
        spread = rotated.square().sum(0).div_(len(rotated)).sqrt_()
        taken = _look_up(_codes(rotated, spread, self.bits), self.bits)
        step = (rotated * taken).sum(0).div_(taken.square_().sum(0))
        return write_row(step.masked_fill_(spread == 0, 0), out, up=False)

    def decode(self, data: memoryview, tensor: str, into: torch.Tensor) -> None:
        """Look the levels up, scale and rotate back; rounded once to the dtype of ``into``.

        Raises:
            CodecError: if ``data`` is not the encoding of such a tensor.
        """
        import torch

        shape, dtype = tuple(into.shape), dtype_name(into)
        due = self.encoded_bytes(shape, dtype, tensor)
        if len(data) != due:
            raise CodecError(
                f"{self.name}: {len(data)} bytes are not {dtype} {shape}, which takes {due}"
            )
        if due == 0 or self._per_channel(shape, tensor):
            super().decode(data, tensor, into)
            return
        dim = shape[-1]
        rows = prod(shape[:-1])
        step = read_row(self.name, data, (rows,))
        packed = data[ROW_BYTES + rows :]
        if _decode_fast(packed, self.bits, step, into):
            return
        codes = torch.empty((rows, dim), dtype=torch.uint8)
        unpack(packed, self.bits, codes)
        sign, root = signs(dim), _root(dim)
        flat = into if into.is_contiguous() else torch.empty(shape, dtype=into.dtype)
        for tile in _tiles(rows, dim):
            work = _look_up(codes[tile].t(), self.bits).mul_(step[tile] * root)
            rotate_back(work, sign)
            flat.view(rows, dim)[tile].copy_(work.t())
        if flat is not into:
            into.copy_(flat)

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
        step = self._fit(rotated, memoryview(bytearray(ROW_BYTES + rows)))
        taken = _look_up(_codes(rotated, step, self.bits), self.bits).mul_(step)
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
