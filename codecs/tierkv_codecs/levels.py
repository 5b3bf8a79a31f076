"""Levels of the rotated codecs: the best quantiser of a standard normal number, by bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from tierkv_codecs.hadamard import pieces

if TYPE_CHECKING:
    import torch

__all__ = ["LEVELS", "cuts", "levels", "look_up", "root", "upper"]

LEVELS: Final = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9423, 1.2562, 1.6181, 2.0690, 2.7326),
}
"""Positive levels (Max 1960); part of the format."""


def _all(bits: int) -> torch.Tensor:
    import torch

    half = LEVELS[bits]
    return torch.tensor([*(-x for x in reversed(half)), *half], dtype=torch.float32)


def levels(bits: int) -> tuple[float, ...]:
    """All levels, from the lowest on: float32 numbers."""
    return tuple(_all(bits).tolist())


@functools.cache
def cuts(bits: int) -> tuple[Any, ...]:
    """Limits between the levels: float32 numbers, as a tuple for loops."""
    all_ = _all(bits)
    return tuple((all_[:-1] + all_[1:]).mul_(0.5).numpy())


@functools.cache
def upper(bits: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """From where on each positive level is the nearest, and the levels: float32 numbers."""
    count = len(LEVELS[bits])
    return cuts(bits)[count - 1 :], tuple(_all(bits)[count:].numpy())


def look_up(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels of codes ``[dim, rows]``, float32 and contiguous."""
    index = codes.int().reshape(-1)
    return _all(bits).index_select(0, index).view(codes.shape)


def root(dim: int) -> torch.Tensor:
    """``1 / sqrt(n)`` for each number of a row, ``n`` the length of its piece; ``[dim, 1]``."""
    import torch

    parts = [torch.full((size, 1), size**-0.5) for _, size in pieces(dim)]
    return torch.cat(parts)
