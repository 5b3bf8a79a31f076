"""Triton, where it is installed; without it kernels stay plain functions, which nobody calls.

:mod:`tierkv_codecs.accelerated` looks first; the modules of kernels can be read without Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:  # comes with CUDA builds of torch
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    triton = tl = None

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["jit", "tl"]


def jit(function: Callable[..., Any], varying: Collection[str] = ()) -> Any:
    """Compile on first use.

    Args:
        function: The kernel, or what kernels call.
        varying: Numbers that vary from call to call; nothing about them is compiled in, which
            would take a second each time. Those that it does not have are no matter.
    """
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in varying if name in names])
