"""Groups of numbers through compiled loops; every function says if there is no loop for a tensor.

Contiguous bfloat16 has loops (:mod:`tierkv_codecs.affine_loops`), where the extra ``fast`` is
installed. Callers go on in torch where it has none, with the same result to the bit.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tierkv_codecs.kernels import bits16, kernel
from tierkv_codecs.packing import fields

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from tierkv_codecs.affine import Groups

__all__ = ["bounds", "decode", "extremes", "find_codes", "places"]


def _rows(tensor: torch.Tensor) -> tuple[int, int]:
    return prod(tensor.shape[:-1]), tensor.shape[-1]


def _by_channel(groups: Groups, tensor: torch.Tensor) -> bool:
    return groups.axis != tensor.dim() - 1


def extremes(source: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Minimum and maximum of each group, float32; NaN lies beyond the infinities on both sides.

    One pass over the source.
    """
    import torch

    by_channel = _by_channel(groups, source)
    loop = kernel("extremes_by_channel" if by_channel else "extremes_by_row")
    bits = bits16(source, _rows(source))
    if bits is None or loop is None:
        return None
    shape = (-1, source.shape[-1] if by_channel else groups.places)
    low = torch.full(groups.shape, 0x7FFF, dtype=torch.int16)
    high = torch.full(groups.shape, -0x8000, dtype=torch.int16)
    keys = [key.view(shape).numpy() for key in (low, high)]
    if by_channel:
        loop(bits.view("int16"), source.shape[1], groups.size, *keys)
    else:
        loop(bits.view("int16"), groups.size, *keys)
    for key in (low, high):
        key.bitwise_xor_(key.bitwise_right_shift(15).bitwise_and_(0x7FFF))
    # of zeros of both signs, torch takes whichever it likes: one is as good as the other
    low_, high_ = (key.view(torch.bfloat16).float().add_(0.0) for key in (low, high))
    return low_, high_


def find_codes(
    source: torch.Tensor,
    groups: Groups,
    low: torch.Tensor,
    inverse: torch.Tensor,
    top: int,
    codes: torch.Tensor,
) -> bool:
    """Round ``(number - low) * inverse`` to the codes 0 to ``top``: uint8, as ``source``."""
    by_channel = _by_channel(groups, source)
    loop = kernel("codes_by_channel" if by_channel else "codes_by_row")
    bits = bits16(source, _rows(source))
    if bits is None or loop is None:
        return False
    shape = (-1, source.shape[-1] if by_channel else groups.places)
    m, s = (t.reshape(shape).numpy() for t in (low, inverse))
    out = codes.view(_rows(source)).numpy()
    if by_channel:
        loop(bits, m, s, np.float32(top), source.shape[1], groups.size, out)
    else:
        loop(bits, m, s, np.float32(top), groups.size, out)
    return True


def bounds(steps: torch.Tensor) -> tuple[float, float] | None:
    """Smallest positive and largest of float32 numbers; None if there is no loop."""
    loop = kernel("bounds")
    if loop is None:
        return None
    least, most = loop(steps.numpy())
    return float(least), float(most)


def places(steps: torch.Tensor, limits: NDArray[np.float32], index: torch.Tensor) -> bool:
    """Write one more than how many of ``limits`` (at most 255) are below each number; 0 for 0."""
    loop = kernel("places")
    if loop is None:
        return False
    padded = np.full(255, np.inf, np.float32)
    padded[: len(limits)] = limits
    loop(steps.numpy(), padded, index.numpy())
    return True


def decode(
    data: memoryview, bits: int, groups: Groups, row: NDArray[np.float32], into: torch.Tensor
) -> bool:
    """Write ``code * step + low`` for packed codes: reads every byte and writes ``into`` once.

    Args:
        data: Index of the step of each group, the minimum of each group, the packed codes.
        bits: Bits of a code.
        groups: How the tensor is cut.
        row: The steps that there are.
        into: The target.
    """
    rows, dim = _rows(into)
    out = bits16(into, (rows, dim))
    parts = list(fields(rows, bits))
    by_channel = _by_channel(groups, into)
    name = "field" if len(parts) == 1 else "two_fields"
    loop = kernel(f"{name}_by_channel" if by_channel else f"{name}_by_row")
    if out is None or loop is None:
        return False
    shape = (groups.number // dim, dim) if by_channel else (rows, groups.places)
    count = groups.number
    index = np.frombuffer(data, np.uint8, count).reshape(shape)
    lows = np.frombuffer(data, np.uint16, count, count).reshape(shape)
    areas, at = [], 3 * count
    for _, _, length in parts:
        areas.append(np.frombuffer(data, np.uint8, length * dim, at).reshape(length, dim))
        at += length * dim
    widths = tuple(width for width, _, _ in parts)
    how = (*areas, widths if len(parts) > 1 else widths[0], row, index, lows)
    if by_channel:
        loop(*how, into.shape[1], groups.size, out)
    else:
        loop(*how, groups.size, out)
    return True
