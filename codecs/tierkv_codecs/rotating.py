"""Rotated codecs through compiled loops and machine code.

Contiguous bfloat16 goes through them where the extra ``fast`` is installed: in encoding the loops
of :mod:`tierkv_codecs.rotation_loops` and :mod:`tierkv_codecs.fitting_loops`, in decoding
:mod:`tierkv_codecs.rotation_code`. Callers go on in torch where a function here says that it has
none, with the same result to the bit.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tierkv_codecs import rotation_trials
from tierkv_codecs.hadamard import pieces, signs
from tierkv_codecs.kernels import bits16, kernel
from tierkv_codecs.levels import cuts, root, upper
from tierkv_codecs.rotation_code import LONGEST
from tierkv_codecs.rotation_reading import decode_rows

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Tiles", "decode", "rotated"]

_LANES: Final = 16
_TINY: Final = 2.0**-80
"""Smallest step of which no sum is a denormal number, which some instructions take for 0.

All sums are multiples of the last place of the lowest level times the step and ``1 / sqrt(dim)``.
"""


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


class Tiles(NamedTuple):
    """Rotated rows, sixteen to a tile.

    Attributes:
        rows: How many there are.
        dim: Numbers of a row.
        numbers: float32 ``[tiles, dim * 16]``: number by number; 0 beyond the last row.
        largest: Largest magnitude before the rotation; not finite if anything was not.
        bits: Of a code.
        fit: The loop that fits scales.
        nearest: The loop that finds codes.
    """

    rows: int
    dim: int
    numbers: NDArray[np.float32]
    largest: torch.Tensor
    bits: int
    fit: Any
    nearest: Any

    def fitted(self) -> torch.Tensor:
        """The scale of each row that fits its codes best."""
        import torch

        step = torch.empty(len(self.numbers) * _LANES)
        self.fit(self.numbers, np.float32(1 / self.dim), *upper(self.bits), step.numpy())
        return step[: self.rows]

    def codes(self, step: torch.Tensor) -> torch.Tensor:
        """Codes of the nearest levels: uint8 ``[rows, dim]``."""
        import torch

        inverse = step.reciprocal().masked_fill_(step == 0, 0)
        codes = torch.empty((self.rows, self.dim), dtype=torch.uint8)
        self.nearest(self.numbers, inverse.numpy(), cuts(self.bits), codes.numpy())
        return codes


def rotated(source: torch.Tensor, bits: int) -> Tiles | None:
    """Rotate in one compiled pass; None unless every loop for such a tensor and code is there."""
    import torch

    dim = source.shape[-1]
    rows = source.numel() // dim
    words = bits16(source, (rows, dim))
    if words is None:
        return None
    loop, *others = kernel("rotate_rows"), kernel("fit_rows", bits), kernel("nearest_levels", bits)
    if loop is None or None in others:
        return None
    numbers = np.empty((-(-rows // _LANES), dim * _LANES), np.float32)
    found = np.array([loop(words, *_rotation(dim), numbers)], np.uint16)
    largest = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).float()
    return Tiles(rows, dim, numbers, largest, bits, *others)


def decode(data: memoryview, bits: int, row: NDArray[np.float32], into: torch.Tensor) -> bool:
    """Decode in one pass of machine code; False if there is none for this tensor.

    Args:
        data: Index of the step of each row, the packed codes.
        bits: Bits of a code.
        row: The steps that there are.
        into: The target.
    """
    import torch

    dim = into.shape[-1]
    if into.dtype is not torch.bfloat16 or not into.is_contiguous() or dim > LONGEST:
        return False
    call = rotation_trials.code(bits, dim, bool(row[1] >= _TINY))
    if call is None:
        return False
    decode_rows(call, data, row, into)
    return True
