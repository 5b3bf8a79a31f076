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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["available", "kernel"]


@functools.cache
def available() -> bool:
    """Whether kernels are compiled here: numba can be imported and is not switched off."""
    return os.environ.get("TIERKV_FAST") != "0" and importlib.util.find_spec("numba") is not None


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    numba = importlib.import_module("numba")
    loops = importlib.import_module("tierkv_codecs.loops")
    wrap = numba.njit(nogil=True, cache=False, error_model="numpy", boundscheck=False)
    # a compiled loop may call others: they are compiled in their own module's place
    inner = {"transform": wrap(loops.transform)} if name == "levels_by_row" else {}
    function = getattr(loops, name)
    if inner:
        function = types.FunctionType(function.__code__, function.__globals__ | inner, name)
    found: Callable[..., Any] = wrap(function)
    return found


def kernel(name: str) -> Callable[..., Any] | None:
    """The compiled loop called ``name`` in :mod:`tierkv_codecs.loops`; None without numba."""
    return _compiled(name) if available() else None
