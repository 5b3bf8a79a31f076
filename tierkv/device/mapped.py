"""Page-aligned host memory as tensors: what stands in for a device's where there is none."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["available_memory", "map_tensor"]


def available_memory() -> int:
    """Bytes that this machine could still give to a process, as the kernel estimates them."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def map_tensor(nbytes: int) -> tuple[torch.Tensor, mmap.mmap] | None:
    """Fresh memory, uint8 ``[nbytes]`` at a page boundary, and the mapping behind it.

    The tensor keeps the mapping, and the mapping ends with the last tensor over it.

    Returns:
        None if the kernel refuses.
    """
    import torch

    try:
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes), memory
