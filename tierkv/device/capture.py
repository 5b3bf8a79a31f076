"""Calls to CUDA beside a graph that another thread is capturing.

While a graph is captured in CUDA's default mode, a call of *any* thread that allocates, registers
memory or asks for an event breaks the capture - the model's, not ours (NCCL's watchdog did that to
torch: its pull requests 104555 and 148594). The driver lets a thread say that its calls have
nothing to do with captures: then they go through, and the capture goes on.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Beside"]

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def _exchange() -> Callable[[Any], int] | None:
    """The driver's call; None without NVIDIA's driver."""
    try:
        # it swaps one number of the thread: letting go of the GIL would cost more than the call
        found: Callable[[Any], int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return found


class Beside:
    """In this block, calls of this thread leave captures alone. About a microsecond."""

    __slots__ = ("_mode",)

    def __init__(self) -> None:
        self._mode: ctypes.c_int | None = None

    def __enter__(self) -> None:
        exchange = _exchange()
        if exchange is not None:
            mode = ctypes.c_int(_RELAXED)
            if exchange(ctypes.byref(mode)) == 0:
                self._mode = mode  # what it was before

    def __exit__(self, *_: object) -> None:
        exchange = _exchange()
        if exchange is not None and self._mode is not None:
            exchange(ctypes.byref(self._mode))
