"""Compiled kernels for the codecs, where the extra ``fast`` (numba) is installed.

Every kernel has a twin in torch or numpy inside its codec, and gives the same bits: a frame written
with one is read with the other. :func:`kernel` compiles on first use, tries what comes out against
the same loop as plain Python (:mod:`tierkv_codecs.samples`), and remembers; kernels release the
GIL. The environment variable ``TIERKV_FAST=0`` leaves them off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import types
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv import jit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

__all__ = ["CALLS", "available", "bits16", "kernel"]

_log = logging.getLogger(__name__)
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


def _jit(function: Callable[..., Any], kept: bool = True) -> Any:
    numba = importlib.import_module("numba")
    wrap = functools.partial(numba.njit, nogil=True, error_model="numpy", boundscheck=False)
    try:
        found = wrap(cache=kept)(function)
    except RuntimeError:  # no writable directory to keep machine code in: compile every time
        found = wrap()(function)
    return found


def _plain(name: str) -> Callable[..., Any]:
    found = (importlib.import_module(f"tierkv_codecs.{module}") for module in _MODULES)
    function: Callable[..., Any] = next(
        getattr(module, name) for module in found if name in module.__all__
    )
    return function


def _linked(name: str, kept: bool = True) -> Callable[..., Any]:
    function = _plain(name)
    called = CALLS.get(name)
    if called is not None:
        # what it calls has to be compiled too, without changing the module for others
        names = function.__globals__ | {inner: _called(inner, kept) for inner in called}
        function = types.FunctionType(function.__code__, names, name)
    return function


@functools.cache
def _called(name: str, kept: bool) -> Any:
    return _jit(_linked(name, kept), kept)


class _Loop:
    """A compiled loop; arguments of another kind than its sample's go to plain Python, slowly."""

    __slots__ = ("compiled", "name", "plain", "told")

    def __init__(self, name: str) -> None:
        self.compiled, self.plain, self.name = _jit(_linked(name)), _plain(name), name
        self.told = False

    def __call__(self, *args: Any) -> Any:
        try:
            return self.compiled(*args)
        except TypeError as error:  # before anything ran: nothing is compiled in the midst of work
            if not self.told:
                self.told = True
                _log.warning("loop %s: it is slow, its sample is of another kind: %s", self, error)
            return self.slowly(*args)

    def __repr__(self) -> str:
        return self.name

    def afresh(self, *args: Any) -> Any:
        """Compile without numba's files, then call."""
        self.compiled = _jit(_linked(self.name, kept=False), kept=False)
        return self.compiled(*args)

    def slowly(self, *args: Any) -> Any:
        with np.errstate(all="ignore"):  # numbers wrap
            return self.plain(*args)


def _made(name: str, *_: int) -> _Loop | None:
    if not available():
        return None
    jit.host()  # what it does to llvmlite is to be done before numba loads it
    return _Loop(name)


@functools.cache
def _tell_of_files(kept: str, why: str) -> None:
    _log.warning(
        "numba's files of machine code in %s cannot be used: %s; loops are compiled in every "
        "process: delete them, or set NUMBA_CACHE_DIR to where there is room",
        *(kept, why),
    )


def _right(loop: _Loop, name: str, *variant: int) -> bool:
    """Compile for the sample's kinds of arguments, and for no others; compare with plain Python."""
    from tierkv_codecs.samples import arguments

    given, expected = arguments(name, *variant), arguments(name, *variant)
    try:
        found = loop.compiled(*given)
    except Exception as error:  # noqa: BLE001 - of whatever numba reads in its files
        kept, given = str(loop.compiled.stats.cache_path), arguments(name, *variant)
        found = loop.afresh(*given)
        _tell_of_files(kept, f"{type(error).__name__}: {error}")
    loop.compiled.disable_compile()
    due = loop.slowly(*expected)
    written = zip(given, expected, strict=True)
    alike = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in written)
    return alike and np.array_equal(found, due)  # a number of whichever kind


kernel: Final = jit.Tried("loops of codecs", _made, _right)
"""The compiled loop of a name in one of the modules of loops; None without numba, or for now.

Those that are compiled for a number of levels take the bits, too. Arguments have to be of the kinds
that the sample's are: contiguous arrays of the same dtype and rank.
"""


def bits16(tensor: torch.Tensor, shape: tuple[int, int]) -> NDArray[np.uint16] | None:
    """A contiguous bfloat16 tensor's memory as kernels take it; None if it is anything else."""
    import torch

    if tensor.dtype is not torch.bfloat16 or not tensor.is_contiguous():
        return None
    found: NDArray[np.uint16] = tensor.view(torch.int16).numpy().view("uint16").reshape(shape)
    return found
