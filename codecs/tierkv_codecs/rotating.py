"""Rotated codecs through compiled loops (:mod:`tierkv_codecs.rotation_loops`).

Contiguous bfloat16 goes through them where the extra ``fast`` is installed. Callers go on in torch
where a function here says that it has no loop, with the same result to the bit.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tierkv_codecs.hadamard import pieces, signs
from tierkv_codecs.kernels import bits16, kernel
from tierkv_codecs.levels import LEVELS, cuts, root, upper
from tierkv_codecs.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Tiles", "decode", "rotated"]

_LANES: Final = 16
_BITS: Final = 4  # what the loop that decodes takes


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.rotations: dict[int, tuple[Any, ...]] = {}


_own = _PerThread()


def _rotation(dim: int) -> tuple[Any, ...]:
    """What loops need to know: root, signs, starts and sizes of the pieces, room for a tile."""
    found = _own.rotations.get(dim)
    if found is None:
        starts, sizes = (np.array(t) for t in zip(*pieces(dim), strict=True))
        memory = np.zeros(2 * _LANES * dim + _LANES, np.float32)
        first = -memory.ctypes.data // 4 % _LANES  # registers are as wide as a line of the cache
        room = memory[first : first + 2 * _LANES * dim].reshape(2, _LANES * dim)
        found = (
            root(dim).reshape(-1).numpy(),
            signs(dim).repeat_interleave(_LANES).numpy(),
            starts,
            sizes,
            room,
        )
        _own.rotations[dim] = found
    return found


@functools.cache
def _table(bits: int) -> NDArray[np.uint64]:
    """The levels of both halves of a byte, for each byte."""
    half = np.array(LEVELS[bits], np.float32)
    levels = np.zeros(1 << _BITS, np.float32)
    levels[: 2 * len(half)] = np.concatenate([-half[::-1], half])
    both = np.empty((256, 2), np.float32)
    both[:, 0], both[:, 1] = np.tile(levels, 16), np.repeat(levels, 16)
    return both.reshape(-1).view(np.uint64)


class Tiles(NamedTuple):
    """Rotated rows, sixteen to a tile.

    Attributes:
        rows: How many there are.
        dim: Numbers of a row.
        numbers: float32 ``[tiles, dim * 16]``: number by number; 0 beyond the last row.
        largest: Largest magnitude before the rotation; not finite if anything was not.
    """

    rows: int
    dim: int
    numbers: NDArray[np.float32]
    largest: torch.Tensor

    def fitted(self, bits: int) -> torch.Tensor:
        """The scale of each row that fits its codes best."""
        import torch

        step = torch.empty(len(self.numbers) * _LANES)
        loop: Any = kernel("fit_rows")
        loop(self.numbers, np.float32(1 / self.dim), *upper(bits), step.numpy())
        return step[: self.rows]

    def codes(self, step: torch.Tensor, bits: int) -> torch.Tensor:
        """Codes of the nearest levels: uint8 ``[rows, dim]``."""
        import torch

        inverse = step.reciprocal().masked_fill_(step == 0, 0)
        codes = torch.empty((self.rows, self.dim), dtype=torch.uint8)
        loop: Any = kernel("nearest_levels")
        loop(self.numbers, inverse.numpy(), cuts(bits), codes.numpy())
        return codes


def rotated(source: torch.Tensor) -> Tiles | None:
    """Rotate in one compiled pass; None if there is no loop for this tensor."""
    import torch

    dim = source.shape[-1]
    rows = source.numel() // dim
    bits, loop = bits16(source, (rows, dim)), kernel("rotate_rows")
    if bits is None or loop is None:
        return None
    numbers = np.empty((-(-rows // _LANES), dim * _LANES), np.float32)
    found = np.array([loop(bits, *_rotation(dim), numbers)], np.uint16)
    largest = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).float()
    return Tiles(rows, dim, numbers, largest)


def decode(data: memoryview, bits: int, row: NDArray[np.float32], into: torch.Tensor) -> bool:
    """Decode in one compiled pass; False if there is no loop for this tensor.

    Args:
        data: Index of the step of each row, the packed codes.
        bits: Bits of a code.
        row: The steps that there are.
        into: The target.
    """
    dim = into.shape[-1]
    rows = into.numel() // dim
    out, loop = bits16(into, (rows, dim)), kernel("levels_by_row")
    if out is None or loop is None:
        return False
    step = row.take(np.frombuffer(data, np.uint8, rows))
    packed = data[rows:]
    if bits != _BITS:
        import torch

        # the loop takes codes of four bits
        codes = torch.empty((rows, dim), dtype=torch.uint8)
        unpack(packed, bits, codes)
        packed = memoryview(bytearray(packed_bytes(rows, dim, _BITS)))
        pack(codes, _BITS, packed)
    pairs = np.frombuffer(packed, np.uint8).reshape(-1, dim)
    loop(pairs, _table(bits), step, *_rotation(dim), out)
    return True
