"""Sizes of the steps of :mod:`tierkv_codecs.stepping`: a base times powers of ``sqrt(2)``."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np

__all__ = ["NIBBLE", "STILL", "all_steps", "powers", "steps"]

NIBBLE: Final = 7
"""Largest code of four bits, and what is added to such a code; format."""
STILL: Final = -128
"""Exponent of a channel that is constant."""


@functools.cache
def powers() -> Any:
    """``sqrt(2) ** e`` for the exponents -128 to 127, float32; 0 for the first."""
    root = float(np.float32(math.sqrt(2)))
    found = [math.ldexp(root if e % 2 else 1.0, e // 2) for e in range(STILL + 1, -STILL)]
    return np.array([0.0, *found], np.float32)


def all_steps(base: float) -> Any:
    """Steps of the exponents -128 to 127, float32; infinite where a damaged base makes them so."""
    with np.errstate(over="ignore"):
        return powers() * np.float32(base)


def steps(base: float, exponent: Any) -> Any:
    """Steps of exponents, float32; 0 for :data:`STILL`."""
    return all_steps(base)[exponent.astype(np.intp) - STILL]
