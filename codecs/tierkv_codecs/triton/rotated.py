"""Launches of the kernels for rotated rows (:mod:`tierkv_codecs.triton.rotation`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from tierkv_codecs.affine import ROW_BYTES
from tierkv_codecs.hadamard import signs
from tierkv_codecs.levels import LEVELS, cuts, levels, root, upper
from tierkv_codecs.packing import fields
from tierkv_codecs.triton import rotation, settling
from tierkv_codecs.triton.batch import launch, over_groups, power
from tierkv_codecs.triton.steps import read_rows, round_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_codecs.triton.batch import Sections

__all__ = ["LONGEST", "decode", "encode", "order"]

LONGEST: Final = 512
"""Most numbers in a row: longer ones take long to compile."""

_TILE: Final = 512  # numbers of a program: they stay in registers


class _Rotation(NamedTuple):
    """What kernels need to know about rows of a length and codes of so many bits, on one device."""

    signs: torch.Tensor
    root: torch.Tensor
    order: torch.Tensor
    upper: torch.Tensor
    cuts: torch.Tensor
    levels: torch.Tensor

    @property
    def log(self) -> int:
        """Logarithm of the lanes of a row."""
        return len(self.order).bit_length() - 1

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return max(1, _TILE >> self.log)


def order(dim: int) -> list[int]:
    """Which number each lane takes, so that sums of halves are those of the torch path.

    There the upper half is added to the lower one, which is longer by one where the length is odd.
    Here both are always of equal length: what is missing comes from the last lane of all, which
    holds 0 wherever anything is missing.
    """
    lanes = power(dim)
    found = [lanes - 1] * lanes
    for number in range(dim):
        count, at, lane = dim, number, 0
        while count > 1:
            count = (count + 1) // 2
            upper_half = at >= count
            at -= count * upper_half
            lane = 2 * lane + upper_half
        found[lane] = number
    return found


@functools.cache
def _rotation(dim: int, bits: int, device: torch.device) -> _Rotation:
    parts = (
        signs(dim),
        root(dim).reshape(-1),
        torch.tensor(order(dim), dtype=torch.int32),
        torch.from_numpy(np.array(upper(bits), np.float32)),
        torch.from_numpy(np.array(cuts(bits), np.float32)),
        torch.tensor(levels(bits)),
    )
    return _Rotation(*(part.to(device) for part in parts))


def encode(
    s: Sections, bits: int, limit: float, refused: torch.Tensor, out: torch.Tensor
) -> list[bool]:
    """Encode a batch; arguments and result as those of :func:`tierkv_codecs.triton.coding.encode`.

    Args:
        s: The batch.
        bits: Bits of a code.
        limit: Largest magnitude that is taken.
        refused: int32 ``[sections]``, zeros.
        out: The encodings.
    """
    known, step = _rotation(s.dim, bits, out.device), s.empty(s.rows)
    where = (s.rows, s.tokens, s.dim, *s.steps)
    how = {**s.reading, "ROWS": known.rows, "LOG": known.log}
    launch(
        rotation.fit,
        -(-s.rows // known.rows),
        s,
        *(s.base, s.table, step, refused, known.signs, known.root, known.order, known.upper),
        *(limit, 1 / s.dim, *where),
        HEIGHTS=len(LEVELS[bits]),
        **how,
    )
    wrong = round_steps(s, step, None, out, refused, up=False)
    at = ROW_BYTES + s.rows
    for width, shift, apart in fields(s.rows, bits):
        launch(
            rotation.levels_out,
            -(-apart // known.rows),
            s,
            *(s.base, s.table, step, out.view(-1)[at:], known.signs, known.root, known.cuts),
            *(*where, apart, out.stride(0)),
            CUTS=len(known.cuts),
            WIDTH=width,
            SHIFT=shift,
            **how,
        )
        at += apart * s.dim
    return wrong


def decode(
    s: Sections, name: str, bits: int, data: torch.Tensor, heads: Sequence[memoryview]
) -> None:
    """Decode a batch; arguments as those of :func:`tierkv_codecs.triton.coding.decode`.

    Raises:
        CodecError: if a description of steps is none.
    """
    known, step = _rotation(s.dim, bits, data.device), s.empty(s.rows)
    row = read_rows(s, name, heads)
    ends = (s.rows, data.stride(0))
    inside = data.view(-1)[ROW_BYTES:]
    over_groups(
        settling.steps_in, s, s.rows, inside, step, step, row, *ends, MINIMA=False, **s.stored
    )
    (width, _, apart), *more = fields(s.rows, bits)
    width_2, _, apart_2 = more[0] if more else (0, 0, 1)
    launch(
        rotation.levels_in,
        -(-s.rows // known.rows),
        s,
        *(s.base, s.table, data.view(-1)[ROW_BYTES + s.rows :], step),
        *(known.signs, known.root, known.levels, s.rows, s.tokens, s.dim, *s.steps),
        *(apart, apart_2, data.stride(0)),
        WIDTH=width,
        WIDTH_2=width_2,
        ROWS=known.rows,
        LOG=known.log,
        **s.writing,
    )
