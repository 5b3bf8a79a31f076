"""Decoding of what is coded in steps, in torch: the twin of :mod:`tierkv_codecs.step_loops`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv.views import over
from tierkv_codecs import rope
from tierkv_codecs.packing import unpack
from tierkv_codecs.step_sizes import NIBBLE, steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tierkv_codecs.affine import Groups

__all__ = ["scale_rows", "turn_keys"]

_TILE: Final = 1 << 15  # numbers worked on at once


def scale_rows(data: memoryview, base: float, nibbles: bool, into: torch.Tensor) -> None:
    """Codes times the steps of their rows; see :func:`tierkv_codecs.step_loops.decode_rows`."""
    import torch

    shape = tuple(into.shape)
    rows, dim = prod(shape[:-1]), shape[-1]
    step = torch.from_numpy(steps(base, np.frombuffer(data, np.int8, rows))).unsqueeze(1)
    codes = _codes(data[rows:], (rows, dim), nibbles)
    flat = into if into.is_contiguous() else into.new_empty(shape)
    target = flat.view(rows, dim)
    for tile in _tiles(rows, dim):
        target[tile].copy_(_within(codes[tile].float().mul_(step[tile]), into.dtype))
    if flat is not into:
        into.copy_(flat)


def turn_keys(
    parts: tuple[memoryview, ...],
    base: float,
    frequency: Any,
    groups: Groups,
    nibbles: bool,
    into: torch.Tensor,
) -> None:
    """All but constant channels of keys; see :func:`tierkv_codecs.step_loops.decode_keys`."""
    import torch

    low, high, exponent = (over(part, "int8", groups.shape) for part in parts[:3])
    mean = high.float().mul_(256).add_(low)
    step = torch.from_numpy(steps(base, exponent.numpy()))
    cosine, sine = rope.angles(frequency, groups.size)
    codes = _codes(parts[3], tuple(into.shape), nibbles)
    for i, (target, piece) in enumerate(zip(groups.cut(into), groups.cut(codes), strict=True)):
        tokens, place = piece.shape[1], slice(i, i + 1)
        work = piece.float().add_(mean[:, place]).mul_(step[:, place])
        work = rope.turn(work, (cosine[:tokens], sine[:tokens]))
        target.copy_(_within(work, into.dtype))


def _tiles(rows: int, dim: int) -> Iterator[slice]:
    step = max(1, _TILE // dim)
    return (slice(at, at + step) for at in range(0, rows, step))


def _within(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In place: half a step above the largest float16 would be infinite."""
    return numbers.clamp_(-65504, 65504) if str(dtype) == "torch.float16" else numbers


def _codes(data: memoryview, shape: tuple[int, ...], nibbles: bool) -> torch.Tensor:
    """Codes, int8."""
    import torch

    if not nibbles:
        return over(data, "int8", shape)
    codes = torch.empty(shape, dtype=torch.uint8)
    unpack(data, 4, codes.view(-1, shape[-1]))
    return codes.view(torch.int8).sub_(NIBBLE)
