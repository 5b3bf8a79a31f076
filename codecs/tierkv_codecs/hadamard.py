"""A fixed random rotation of rows: signs, then a Walsh-Hadamard transform.

After it the numbers of a row look alike, whatever they were: near a normal distribution, without
outliers (TurboQuant, Zandieh et al., arXiv 2504.19874; QuaRot, arXiv 2404.00456). Rows whose length
is no power of two are cut into pieces that are (96 = 64 + 32) and each piece is rotated on its own.

The signs are the bits of SHA-256 and part of the format. Sums are taken in a fixed order, so that
every implementation gets the same bits. The transform is its own inverse but for a factor ``n``,
which the callers fold into their scales.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["pieces", "rotate", "rotate_back", "sign_bits", "signs"]

_SEED = b"tierkv.rotation.1"


@functools.cache
def pieces(dim: int) -> tuple[tuple[int, int], ...]:
    """First number and length of each piece, the longest first.

    >>> pieces(96)
    ((0, 64), (64, 32))
    """
    found, at = [], 0
    for bit in reversed(range(dim.bit_length())):
        if dim >> bit & 1:
            found.append((at, 1 << bit))
            at += 1 << bit
    return tuple(found)


@functools.cache
def sign_bits(dim: int) -> tuple[int, ...]:
    """``dim`` times 0 or 1, where 1 turns the sign of a number."""
    bits: list[int] = []
    block = 0
    while len(bits) < dim:
        digest = hashlib.sha256(_SEED + block.to_bytes(4, "little")).digest()
        bits.extend(byte >> i & 1 for byte in digest for i in range(8))
        block += 1
    return tuple(bits[:dim])


def signs(dim: int) -> torch.Tensor:
    """``dim`` numbers +1 or -1, float32, the same for ever."""
    import torch

    return torch.tensor(sign_bits(dim), dtype=torch.float32).mul_(-2).add_(1)


def _transform(columns: torch.Tensor) -> None:
    """Walsh-Hadamard transform of every column of ``[n, rows]``, in place, neighbours first."""
    import torch

    size, rows = columns.shape
    half = 1
    while half < size:
        pair = columns.view(size // (2 * half), 2, half, rows)
        left, right = pair[:, 0], pair[:, 1]
        total = left + right
        torch.sub(left, right, out=right)
        left.copy_(total)
        half *= 2


def rotate(columns: torch.Tensor, sign: torch.Tensor) -> None:
    """Rotate in place; numbers of a piece of length ``n`` grow by ``sqrt(n)``.

    Args:
        columns: float32 ``[dim, rows]``, contiguous: a row to be rotated is a column here.
        sign: Of :func:`signs`.
    """
    columns.mul_(sign[:, None])
    for at, size in pieces(len(sign)):
        _transform(columns[at : at + size])


def rotate_back(columns: torch.Tensor, sign: torch.Tensor) -> None:
    """Undo :func:`rotate`; again the numbers grow by ``sqrt(n)``."""
    for at, size in pieces(len(sign)):
        _transform(columns[at : at + size])
    columns.mul_(sign[:, None])
