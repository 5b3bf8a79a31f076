"""Groups of numbers through compiled loops; every function says if there is no loop for a tensor.

Contiguous bfloat16 has loops (:mod:`tierkv_codecs.affine_loops`), where the extra ``fast`` is
installed. Callers go on in torch where it has none, with the same result to the bit.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tierkv.views import over
from tierkv_codecs.kernels import bits16, kernel
from tierkv_codecs.packing import fields

if TYPE_CHECKING:
    import torch

    from tierkv_codecs.affine import Groups

__all__ = ["decode", "extremes", "find_codes"]


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
    import numpy as np

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


def decode(
    data: memoryview,
    bits: int,
    groups: Groups,
    step: torch.Tensor,
    low: torch.Tensor,
    into: torch.Tensor,
) -> bool:
    """Write ``code * step + low`` for packed codes: reads every byte and writes ``into`` once."""
    rows, dim = _rows(into)
    out = bits16(into, (rows, dim))
    parts = list(fields(rows, bits))
    by_channel = _by_channel(groups, into)
    name = "field" if len(parts) == 1 else "two_fields"
    loop = kernel(f"{name}_by_channel" if by_channel else f"{name}_by_row")
    if out is None or loop is None:
        return False
    shape = (-1, dim if by_channel else groups.places)
    s, m = (t.reshape(shape).numpy() for t in (step, low))
    areas, at = [], 0
    for _, _, count in parts:
        areas.append(over(data[at:], "uint8", (count, dim)).numpy())
        at += count * dim
    widths = tuple(width for width, _, _ in parts)
    how = (*areas, widths if len(parts) > 1 else widths[0], s, m)
    if by_channel:
        loop(*how, into.shape[1], groups.size, out)
    else:
        loop(*how, groups.size, out)
    return True
