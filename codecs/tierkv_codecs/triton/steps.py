"""Rows of steps (:func:`tierkv_codecs.affine.write_row`), one for each section of a batch.

The host finds the first step and the ratio of a row from the least and the largest step of its
section: powers are part of the format, and no two libraries agree on their last bit. The rest is
multiplication, which the device does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierkv_codecs.affine import ROW_BYTES, check_row, row_ends
from tierkv_codecs.triton import settling
from tierkv_codecs.triton.batch import over_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_codecs.triton.batch import Sections

__all__ = ["read_rows", "round_steps"]

_STEPS = 256  # of a row
_SECTIONS = 32  # of a program


def round_steps(
    s: Sections,
    steps: torch.Tensor,
    low: torch.Tensor | None,
    out: torch.Tensor,
    refused: torch.Tensor,
    *,
    up: bool,
) -> list[bool]:
    """Write descriptions of rows, the indices of steps in them, and minima.

    Waits for the device half-way.

    Args:
        s: The batch.
        steps: float32 ``[sections, groups]``; becomes the inverse of the rounded steps.
        low: Minima, likewise; None: there are none.
        out: The encodings.
        refused: Which sections are (not 0).
        up: Round up, so that a group stays covered; otherwise to the nearest.

    Returns:
        ``refused``, as it is when all of the batch is seen.
    """
    groups = steps.shape[1]
    most = steps.amax(1)
    least = torch.where(steps > 0, steps, torch.inf).amin(1).minimum(most)
    seen = torch.stack([least, most, refused.float()], 1).cpu()
    wrong = [bool(flag) for flag in seen[:, 2].tolist()]
    # what is refused gets the row of no steps at all
    ends = [(0.0, 0.0) if bad else (a, b) for a, b, bad in seen.tolist()]
    heads = np.array([row_ends(*pair) for pair in ends], np.float32)
    there = torch.from_numpy(heads.view(np.uint8)).to(out.device)
    out[:, :ROW_BYTES].copy_(there)
    row, limits = _rows(s, there, up=up)
    over_groups(
        settling.steps,
        s,
        groups,
        *(steps, steps if low is None else low, row, limits, out.view(-1)[ROW_BYTES:]),
        *(groups, out.stride(0)),
        MINIMA=low is not None,
        **s.stored,
    )
    return wrong


def read_rows(s: Sections, name: str, heads: Sequence[memoryview]) -> torch.Tensor:
    """The steps that descriptions stand for: float32 ``[sections, 256]``.

    Raises:
        CodecError: if one is none.
    """
    found = np.array([check_row(name, head) for head in heads], np.float32)
    return _rows(s, torch.from_numpy(found.view(np.uint8)).to(s.table.device), up=True)[0]


def _rows(s: Sections, heads: torch.Tensor, *, up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of steps, and the limits below which a step is rounded to the one before."""
    row, limits = s.empty(_STEPS), s.empty(_STEPS - 1)
    settling.rows[(-(-s.number // _SECTIONS),)](
        *(heads.view(torch.float32), row, limits, s.number),
        UP=up,
        BLOCK=_SECTIONS,
        enable_fp_fusion=False,
    )
    return row, limits
