"""Work on frames that a device does in its own memory: checksums, and frames that arrive there.

A device computes its checksums many times as fast as a host could (tens of GB/s against 2-4 a
core). So a frame is verified where it is before it leaves the device, and one that comes from host
memory, where it was verified, gets its checksums on the device, from the bytes that arrived.
Between the two sums the bus is trusted, as memory is while a frame is encoded.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import OK, IoResult, IoStatus, Move
from tierkv.device import fold_digests
from tierkv.frame import encode_header
from tierkv.mover.core import stored_part
from tierkv.mover.submitted import absorbed, outlast
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.abc import Buffer, Device, DeviceBuffer, ResidentBackend
    from tierkv.frame import Header
    from tierkv.mover.core import Core

__all__ = ["sound", "upload"]

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

    Raises:
        BackendError: if the device fails.
        ClosedError: if the engine is closed, and the device hangs.

    Cancellation: re-raised once the device is done with them.
    """
    pieces = [tensor[s.offset : s.end] for header, tensor in frames for s in header.sections]
    if not pieces:
        return [True] * len(frames)
    async with absorbed(core, device, device.stores):
        # what stands in for a device computes in the calling thread: not on the loop
        numbers = await core.workers.run(device.folds, pieces, device.stores)
    digests = iter(fold_digests(numbers))
    return [tuple(islice(digests, len(h.sections))) == h.digests for h, _ in frames]


async def upload(
    core: Core,
    resident: ResidentBackend,
    frames: Sequence[tuple[Header, Buffer]],
    may: Callable[[int], bool] | None = None,
) -> list[IoResult]:
    """Put verified frames from host memory into a device tier, sealed by the device itself.

    Args:
        core: What movements need.
        resident: The tier.
        frames: The frames.
        may: Asked, right before a frame is published, with its number: False leaves it out.

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
            await _fill(core, resident, list(going.values()), going, results, may)
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
    may: Callable[[int], bool] | None,
) -> None:
    device = resident.device
    async with absorbed(core, device, device.loads):
        numbers = await core.workers.run(_send, device, items)
        await outlast(core, [(device, device.loads.record())])
        sealed = await core.workers.run(_seal, device, items, numbers)
    for item, header in zip(items, sealed, strict=True):
        wanted = may is None or may(item.number)
        if wanted and resident.adopt(stored_part(header), header, item.room):
            results[item.number] = OK
            del left[item.number]
        else:
            results[item.number] = _MISSING  # a newer one is there, or it is not wanted any more


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
        sums = tuple(islice(digests, len(header.sections)))
        fresh = replace(header, folded=True, digests=sums)
        head = torch.empty(header.payload_offset, dtype=torch.uint8)
        encode_header(fresh, head.numpy().data)
        moves.append(Move(room.tensor[: len(head)], head))
        sealed.append(fresh)
    device.copy(moves, device.loads)
    return sealed
