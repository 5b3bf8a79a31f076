"""Staging memory of one batch: acquired in one piece, handed out in page-aligned slices.

One acquisition per batch cannot deadlock with other batches, whatever the order in which the
slices are given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import CapacityError
from tierkv.frame import page_round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer
    from tierkv.buffers import Staging

__all__ = ["Slice", "decoding_room", "stage", "stage_nowait"]


class _Slab:
    __slots__ = ("buffer", "users")

    def __init__(self, buffer: Buffer, users: int) -> None:
        self.buffer = buffer
        self.users = users


class Slice:
    """A :class:`~tierkv.abc.Buffer` inside the staging memory of a batch."""

    __slots__ = ("_slab", "nbytes", "padded")

    def __init__(self, slab: _Slab, offset: int, nbytes: int) -> None:
        self._slab: _Slab | None = slab
        self.nbytes = nbytes
        self.padded = slab.buffer.memory[offset : offset + page_round(nbytes)]

    @property
    def memory(self) -> memoryview:
        """The requested bytes."""
        return self.padded[: self.nbytes]

    def release(self) -> None:
        """Give the slice back; the memory goes back with the last one. Idempotent."""
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.users -= 1
            if slab.users == 0:
                slab.buffer.release()


async def stage(staging: Staging, sizes: Sequence[int], *, background: bool = False) -> list[Slice]:
    """Acquire one slice per size, waiting in line for the memory.

    Args:
        staging: Where from.
        sizes: Bytes of each slice.
        background: Whether everything that somebody waits for goes first.

    Raises:
        CapacityError: if the batch is larger than all the staging memory.
    """
    if not sizes:
        return []
    return _cut(await staging.acquire(_total(sizes), background=background), sizes)


def stage_nowait(
    staging: Staging, sizes: Sequence[int], *, background: bool = True
) -> list[Slice] | None:
    """As :func:`stage`, but None where there is no memory right now.

    Raises:
        CapacityError: if the batch is larger than all the staging memory.
    """
    if not sizes:
        return []
    buffer = staging.acquire_nowait(_total(sizes), background=background)
    return None if buffer is None else _cut(buffer, sizes)


def decoding_room(staging: Staging, nbytes: int) -> tuple[memoryview | None, Buffer | None]:
    """Host memory to decode into for a device, and the staging buffer that it is part of.

    Whoever decodes holds staging memory that others wait for, so that waiting for more of it
    could last for ever: where there is none, plain memory of the size of one window does.
    """
    if not nbytes:
        return None, None
    try:
        buffer = staging.acquire_nowait(nbytes)
    except CapacityError:
        buffer = None
    return (memoryview(bytearray(nbytes)), None) if buffer is None else (buffer.memory, buffer)


def _total(sizes: Sequence[int]) -> int:
    return sum(page_round(n) for n in sizes)


def _cut(buffer: Buffer, sizes: Sequence[int]) -> list[Slice]:
    slab = _Slab(buffer, len(sizes))
    slices = []
    offset = 0
    for nbytes in sizes:
        slices.append(Slice(slab, offset, nbytes))
        offset += page_round(nbytes)
    return slices
