"""Compiled kernels for the codecs, where the extra ``fast`` (numba) is installed.

Every kernel has a twin in torch or numpy inside its codec, and gives the same bits: a frame written
with one is read with the other. :func:`kernel` compiles on first use and remembers; kernels
release the GIL. The environment variable ``TIERKV_FAST=0`` leaves them off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import types
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["CALLS", "available", "bits16", "kernel"]


_MODULES = (
    "affine_loops",
    "byte_loops",
    "fitting_loops",
    "loops",
    "rans_loops",
    "rotation_loops",
)
CALLS: Final = {
    "encoding_tables": ("spread_places",),
    "field_by_channel": ("group_of",),
    "fit_rows": ("repeated", "squares", "summed", "weighed"),
    "nearest_levels": ("counted", "lane_by_lane", "repeated"),
    "rotate_rows": ("magnitude", "side_by_side", "signed", "transform"),
    "slots_of_shares": ("spread_places",),
    "transform": ("eight", "eight_scaled", "four", "two"),
    "two_fields_by_channel": ("group_of",),
}
"""What a loop calls."""


@functools.cache
def available() -> bool:
    """Whether kernels are compiled here: numba can be imported and is not switched off."""
    return os.environ.get("TIERKV_FAST") != "0" and importlib.util.find_spec("numba") is not None


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    numba = importlib.import_module("numba")
    wrap = functools.partial(numba.njit, nogil=True, error_model="numpy", boundscheck=False)
    try:
        found: Callable[..., Any] = wrap(cache=True)(function)
    except RuntimeError:  # no writable directory to keep machine code in: compile every time
        found = wrap()(function)
    return found


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    found = (importlib.import_module(f"tierkv_codecs.{module}") for module in _MODULES)
    function = next(getattr(module, name) for module in found if name in module.__all__)
    called = CALLS.get(name)
    if called is not None:
        # what it calls has to be compiled too, without changing the module for others
        names = function.__globals__ | {inner: _compiled(inner) for inner in called}
        function = types.FunctionType(function.__code__, names, name)
    return _jit(function)


def kernel(name: str) -> Callable[..., Any] | None:
    """The compiled loop called ``name`` in one of the modules of loops; None without numba."""
    return _compiled(name) if available() else None


def bits16(tensor: torch.Tensor, shape: tuple[int, int]) -> NDArray[np.uint16] | None:
    """A contiguous bfloat16 tensor's memory as kernels take it; None if it is anything else."""
    import torch

    if tensor.dtype is not torch.bfloat16 or not tensor.is_contiguous():
        return None
    found: NDArray[np.uint16] = tensor.view(torch.int16).numpy().view("uint16").reshape(shape)
    return found
