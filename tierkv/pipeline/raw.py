"""Frames whose sections are all raw: where those are, and the one pass that fills them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import xxhash

from tierkv.errors import CapacityError
from tierkv.frame import checksum, padded_bytes
from tierkv.sections import bits_over, gather

if TYPE_CHECKING:
    from tierkv.pipeline.planning import Plan, Step
    from tierkv.sections import Pieces

__all__ = ["TILE", "check_room", "fill_section", "section_memory"]

TILE = 256 * 1024
"""Bytes copied and then summed at once: the checksum reads what is in the L2 cache still. On a core
with 1 MiB of L2, 256 and 512 KiB were alike (a 32 MiB frame took 0.68 of memcpy's speed in one
piece, 0.92 in tiles), smaller tiles paid more for their calls."""


def check_room(plan: Plan, out: memoryview) -> None:
    """Refuse a buffer that a frame may outgrow.

    Raises:
        CapacityError: naming both sizes.
    """
    if len(out) < plan.max_bytes:
        raise CapacityError(f"a frame may take {plan.max_bytes} bytes, the buffer has {len(out)}")


def section_memory(plan: Plan, out: memoryview) -> list[memoryview]:
    """Memory of each section of a frame, padding included."""
    sizes = (padded_bytes(step.raw_bytes) for step in plan.steps)
    return [out[at : at + size] for at, size in zip(plan.offsets, sizes, strict=True)]


def fill_section(
    step: Step, pieces: Pieces, room: memoryview, address: int, *, folded: bool
) -> bytes:
    """Gather a raw section into ``room`` (padding included) at ``address``; return its checksum.

    A contiguous one is copied and summed tile by tile.
    """
    size, whole = step.raw_bytes, pieces[0][1]
    if size < len(room):
        room[size:] = bytes(len(room) - size)
    if len(pieces) > 1 or whole.device.type != "cpu" or not whole.is_contiguous():
        gather(pieces, bits_over(room[:size], step.dtype, step.shape))
        return b"" if folded else checksum(room)
    source = whole.data_ptr()
    if folded or size <= TILE:
        ctypes.memmove(address, source, size)  # without the GIL, and a call costs less than numpy's
        return b"" if folded else checksum(room)
    state = xxhash.xxh3_128()
    for low in range(0, len(room), TILE):
        ctypes.memmove(address + low, source + low, min(TILE, size - low))
        state.update(room[low : low + TILE])
    return state.digest()
