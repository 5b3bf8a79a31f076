"""The code of :mod:`tierkv_codecs.rotation_code`, tried on a sample against torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv import jit
from tierkv_codecs.packing import packed_bytes
from tierkv_codecs.rotation_code import ROUNDS, decoder, features
from tierkv_codecs.rotation_reading import decode_rows, turn_back
from tierkv_codecs.samples import mixed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["code"]

_ROWS: Final = 19  # the last byte rows of a field are not full


def _made(bits: int, dim: int, rounds: bool) -> Callable[..., Any] | None:
    able = features()
    return None if able is None else decoder(bits, dim, able if rounds else able - {ROUNDS})


def _right(call: Callable[..., Any], bits: int, dim: int, _: bool) -> bool:
    """Whether it decodes rows of ``dim`` numbers as torch does."""
    import torch

    numbers = mixed(_ROWS + packed_bytes(_ROWS, dim, bits)) >> np.uint32(24)
    data = memoryview(numbers.astype(np.uint8).tobytes())
    row = np.float32(0.01) * np.float32(1.02) ** np.arange(256, dtype=np.float32)
    row[0] = 0
    fast, plain = (torch.zeros(1, _ROWS, dim, dtype=torch.bfloat16) for _ in range(2))
    decode_rows(call, data, row, fast)
    turn_back(data, bits, row, plain)
    return torch.equal(fast.view(torch.int16), plain.view(torch.int16))


code: Final = jit.Tried("rotations", _made, _right)
"""Machine code that decodes rows: by bits, length, and whether it may round to bfloat16 in one
instruction, if the processor can. None: not here, or not yet."""
