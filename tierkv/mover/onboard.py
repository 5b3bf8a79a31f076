"""Work on frames that a device does in its own memory: checksums, and frames that arrive there.

A device computes its checksums many times as fast as a host could (tens of GB/s against 2-4 a
core). So a frame is verified where it is before it leaves the device, and one that comes from host
memory, where it was verified, gets its checksums on the device, from the bytes that arrived.
Between the two sums the bus is trusted, as memory is while a frame is encoded.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import anyio

from tierkv.abc import OK, IoResult, IoStatus, Move
from tierkv.device import fold_digests
from tierkv.frame import encode_header
from tierkv.mover.core import stored_part
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import Buffer, Device, DeviceBuffer, Event, ResidentBackend
    from tierkv.frame import Header
    from tierkv.mover.core import Core

__all__ = ["finish", "sound", "upload"]

_FULL = IoResult(IoStatus.FULL)
_MISSING = IoResult(IoStatus.MISSING)


class _Going(NamedTuple):
    """One frame on its way up, and the memory that it gets."""

    number: int
    header: Header
    source: Buffer
    room: DeviceBuffer


async def sound(
    core: Core, device: Device, frames: Sequence[tuple[Header, torch.Tensor]]
) -> list[bool]:
    """Whether each folded frame in device memory has the checksums that its header says.

    Cancellation: re-raised once the device is done with them.
    """
    pieces = [tensor[s.offset : s.end] for header, tensor in frames for s in header.sections]
    if not pieces:
        return [True] * len(frames)
    try:
        # what stands in for a device computes in the calling thread: not on the loop
        numbers = await core.workers.run(device.folds, pieces, device.stores)
    finally:
        await finish(device, device.stores.record())
    digests = iter(fold_digests(numbers))
    return [
        # not all() alone: it stops early, and leaves this frame's digests to the next one
        sum(next(digests) != section.digest for section in header.sections) == 0
        for header, _ in frames
    ]


async def upload(
    core: Core, resident: ResidentBackend, frames: Sequence[tuple[Header, Buffer]]
) -> list[IoResult]:
    """Put verified frames from host memory into a device tier, sealed by the device itself.

    Returns:
        One result a frame, as :meth:`tierkv.abc.Backend.write`; the frames are published then.

    Cancellation: re-raised once the device touches none of the memory any more.
    """
    results = [_FULL] * len(frames)
    going: dict[int, _Going] = {}
    for number, (header, source) in enumerate(frames):
        room = resident.allocate(header.frame_bytes)
        if room is None:
            break  # no memory for the tail after all
        going[number] = _Going(number, header, source, room)
    try:
        if going:
            await _fill(core, resident, list(going.values()), going, results)
    finally:
        for item in going.values():  # what was not published
            item.room.release()
    return results


async def _fill(
    core: Core,
    resident: ResidentBackend,
    items: Sequence[_Going],
    left: dict[int, _Going],
    results: list[IoResult],
) -> None:
    device = resident.device
    try:
        numbers = await core.workers.run(_send, device, items)
        await finish(device, device.loads.record())
        sealed = await core.workers.run(_seal, device, items, numbers)
    finally:
        await finish(device, device.loads.record())
    for item, header in zip(items, sealed, strict=True):
        if resident.adopt(stored_part(header), header, item.room):
            results[item.number] = OK
            del left[item.number]
        else:
            results[item.number] = _MISSING  # a newer one is there


def _send(device: Device, items: Sequence[_Going]) -> torch.Tensor:
    """Submit the copies of the payloads, and the sums of what arrives. In a thread."""
    moves, pieces = [], []
    for _, header, source, room in items:
        low, high = header.payload_offset, header.frame_bytes
        payload = over(source.memory[low:high], "uint8", (high - low,))
        moves.append(Move(room.tensor[low:high], payload))
        pieces += [room.tensor[s.offset : s.end] for s in header.sections]
    device.copy(moves, device.loads)
    return device.folds(pieces, device.loads)


def _seal(device: Device, items: Sequence[_Going], numbers: torch.Tensor) -> list[Header]:
    """Write the headers with those sums, and submit their copies. In a thread."""
    import torch

    digests = iter(fold_digests(numbers))
    sealed, moves = [], []
    for _, header, _, room in items:
        sections = tuple(s._replace(digest=next(digests)) for s in header.sections)
        fresh = replace(header, folded=True, sections=sections)
        head = torch.empty(header.payload_offset, dtype=torch.uint8)
        encode_header(fresh, head.numpy().data)
        moves.append(Move(room.tensor[: len(head)], head))
        sealed.append(fresh)
    device.copy(moves, device.loads)
    return sealed


async def finish(device: Device, event: Event) -> None:
    """Wait for submitted work, come what may: until then its memory belongs to the device.

    Cancellation: re-raised once it is done.
    """
    try:
        await device.wait(event)
    except asyncio.CancelledError as error:
        cancelled = error
        # a cancelled scope cancels at every turn of the loop unless a shield stops it
        with anyio.CancelScope(shield=True):
            while not event.query():
                try:
                    await device.wait(event)
                except asyncio.CancelledError as again:
                    cancelled = again  # a native one: no scope may swallow it
        raise cancelled from None
