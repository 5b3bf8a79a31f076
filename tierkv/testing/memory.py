"""How much memory a call takes at its peak, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["peak_growth"]

_TRIES: Final = 3


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the resident memory of this process grows while ``call`` runs.

    The median of three runs: the kernel may take pages away, and other threads may ask for some,
    at any moment. Linux only.
    """
    return int(statistics.median(_grown(call) for _ in range(_TRIES)))


def _grown(call: Callable[[], object]) -> int:
    gc.collect()
    # pages that the allocator keeps for reuse would hide growth, and those that it gives back
    # in the middle of the call even more
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # peak = now
    before = _status("VmRSS:")
    call()
    return _status("VmHWM:") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError("this check reads /proc/self/status and needs Linux")
