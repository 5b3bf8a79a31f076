"""Decoding of rotated rows: in torch, and by machine code that is given."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv.views import over
from tierkv_codecs.hadamard import rotate_back, signs
from tierkv_codecs.levels import look_up, root
from tierkv_codecs.packing import unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from numpy.typing import NDArray

__all__ = ["decode_rows", "tiles", "turn_back"]

_TILE: Final = 1 << 15  # numbers worked on at once


def tiles(rows: int, dim: int) -> Iterator[slice]:
    """Slices along the first axis."""
    step = max(1, _TILE // dim)
    return (slice(at, at + step) for at in range(0, rows, step))


def decode_rows(
    call: Callable[..., Any], data: memoryview, row: NDArray[np.float32], into: torch.Tensor
) -> None:
    """Decode by code of :mod:`tierkv_codecs.rotation_code`; see :func:`turn_back`."""
    address = np.frombuffer(data, np.uint8).ctypes.data
    call(address, row.ctypes.data, into.data_ptr(), into.numel() // into.shape[-1])


def turn_back(data: memoryview, bits: int, row: NDArray[np.float32], into: torch.Tensor) -> None:
    """Decode in torch.

    Args:
        data: Index of the step of each row, the packed codes.
        bits: Bits of a code.
        row: The steps that there are.
        into: The target.
    """
    import torch

    shape = tuple(into.shape)
    rows, dim = prod(shape[:-1]), shape[-1]
    index = over(data, "uint8", (rows,))
    step = torch.from_numpy(row).index_select(0, index.int())
    codes = torch.empty((rows, dim), dtype=torch.uint8)
    unpack(data[rows:], bits, codes)
    sign, scale = signs(dim), root(dim)
    flat = into if into.is_contiguous() else torch.empty(shape, dtype=into.dtype)
    for tile in tiles(rows, dim):
        work = look_up(codes[tile].t(), bits).mul_(step[tile] * scale)
        rotate_back(work, sign)
        flat.view(rows, dim)[tile].copy_(work.t())
    if flat is not into:
        into.copy_(flat)
