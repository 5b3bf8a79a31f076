"""Copies between a device tier and a medium that reaches the device's memory by itself.

No byte of a frame crosses host memory but its header: the checksums are computed on the device,
before a frame is written and after it was read. Frames keep the checksums of device tiers, also in
files. Whatever does not fit this way is left to the one through staging memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from tierkv.abc import DirectBackend, IoStatus, Move, ReadRequest
from tierkv.blocks import split_part
from tierkv.errors import CodecError
from tierkv.frame import decode_header, header_bytes, page_round
from tierkv.mover.core import stored_part
from tierkv.mover.onboard import sound
from tierkv.mover.reforming import check_frame
from tierkv.mover.submitted import absorbed, outlast
from tierkv.workers import current_lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import (
        Device,
        DeviceBuffer,
        DirectIo,
        IoResult,
        ResidentBackend,
        StoredPart,
        WriteItem,
    )
    from tierkv.frame import Header
    from tierkv.mover.copies import Copy
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.reforming import Frame
    from tierkv.mover.turns import Turn

__all__ = ["Direct"]


class _Item(NamedTuple):
    """As :class:`tierkv.abc.WriteItem`, in a device's memory."""

    stored: StoredPart
    tensor: torch.Tensor


class _Landed(NamedTuple):
    frame: Frame
    buffer: DeviceBuffer


class Direct:
    """One batch that goes the direct way.

    Attributes:
        arrived: Frames that are complete in the target.
        bad: Copies whose source is damaged (None) or could not be read (the result).
    """

    def __init__(
        self, core: Core, source: Level, target: Level, io: DirectIo, turns: Sequence[Turn]
    ) -> None:
        self.arrived: list[Frame] = []
        self.bad: list[tuple[Copy, IoResult | None]] = []
        self._core = core
        self._source = source
        self._target = target
        self._io = io
        self._turns = turns

    @classmethod
    def between(
        cls, core: Core, source: Level, target: Level, turns: Sequence[Turn]
    ) -> Direct | None:
        """The direct way between two tiers; None if there is none."""
        for resident, medium in ((source.resident, target), (target.resident, source)):
            if resident is not None and isinstance(medium.backend, DirectBackend):
                io = medium.backend.direct(resident.device)
                if io is not None:
                    return cls(core, source, target, io, turns)
        return None

    async def copy(self, frames: Sequence[Frame]) -> list[Frame]:
        """Copy what can be copied this way; returns the frames that need the other one.

        Cancellation: re-raised once nothing touches the memory any more.
        """
        if self._source.resident is not None:
            return await self._out_of(self._source.resident, frames)
        assert self._target.resident is not None
        return await self._into(self._target.resident, frames)

    # ------------------------------------------------------------------ device to medium

    async def _out_of(self, resident: ResidentBackend, frames: Sequence[Frame]) -> list[Frame]:
        left, held = [], []
        for frame in frames:
            found = resident.borrow(frame.copy.part, frame.copy.generation)
            if found is None:
                continue  # a newer one took its place
            chains = {section.chain for section in found.header.sections}
            same = self._source.chain == self._target.chain or chains == {self._target.chain}
            if same and found.header.folded:
                held.append((frame, found.header, found.buffer.tensor))
            else:
                left.append(frame)
        if not held:
            return left
        sums = await sound(self._core, resident.device, [(h, t) for _, h, t in held])
        items, going = [], []
        for (frame, header, tensor), good in zip(held, sums, strict=True):
            if good:
                frame.stored = stored_part(header)
                items.append(_Item(frame.stored, tensor[: page_round(header.frame_bytes)]))
                going.append(frame)
            else:
                self.bad.append((frame.copy, None))
        if items:
            try:
                async with self._turns[self._target.index].take(current_lane()):
                    results = await self._core.write(
                        self._target, cast("Sequence[WriteItem]", items), via=self._io.write_device
                    )
            except BaseException:
                # cut short: what arrived nevertheless is in no book, and must go
                self._target.doomed += [
                    (item.stored.part, item.stored.generation) for item in items
                ]
                raise
            self.arrived += [
                f for f, r in zip(going, results, strict=True) if r.status is IoStatus.OK
            ]
        return left

    # ------------------------------------------------------------------ medium to device

    async def _into(self, resident: ResidentBackend, frames: Sequence[Frame]) -> list[Frame]:
        left, landing = [], []
        for frame in frames:
            if frame.copy.space is None:
                left.append(frame)  # nobody knows as yet how long its header is
                continue
            buffer = resident.allocate(frame.copy.nbytes)
            if buffer is None:
                break  # no room for the tail after all
            landing.append(_Landed(frame, buffer))
        try:
            return left + await self._land(resident, landing)
        finally:
            for item in landing:
                if item.frame not in self.arrived:
                    item.buffer.release()

    async def _land(self, resident: ResidentBackend, landing: Sequence[_Landed]) -> list[Frame]:
        if not landing:
            return []
        read = await self._read(resident.device, landing)
        headers = await self._headers(resident.device, read)
        left, folded = [], []
        for item, header in zip(read, headers, strict=True):
            if header is None:
                self.bad.append((item.frame.copy, None))
            elif header.folded:
                folded.append((item, header))
            else:
                left.append(item.frame)  # it came through host memory, and is checked there
        sums = await sound(self._core, resident.device, [(h, i.buffer.tensor) for i, h in folded])
        for (item, header), good in zip(folded, sums, strict=True):
            if not good:
                self.bad.append((item.frame.copy, None))
                continue
            item.frame.stored = stored_part(header)
            if resident.adopt(item.frame.stored, header, item.buffer):
                self.arrived.append(item.frame)
        return left

    async def _read(self, device: Device, landing: Sequence[_Landed]) -> list[_Landed]:
        # fresh memory may still be used by what the model has queued, and what a medium writes
        # follows no stream: this event is behind all that
        await outlast(self._core, [(device, device.stores.record())])
        requests, into = [], []
        for frame, buffer in landing:
            size = page_round(frame.copy.nbytes)
            requests.append(ReadRequest(frame.copy.part, frame.copy.generation, 0, size))
            into.append(buffer.tensor[:size])
        async with self._turns[self._source.index].take(current_lane()):
            results = await self._core.read(
                self._source,
                requests,
                cast("Sequence[memoryview]", into),
                via=self._io.read_device,
            )
        read = []
        for item, result in zip(landing, results, strict=True):
            if result.status is IoStatus.OK:
                read.append(item)
            else:
                self.bad.append((item.frame.copy, result))
        return read

    async def _headers(self, device: Device, landed: Sequence[_Landed]) -> list[Header | None]:
        """Fetch the headers out of device memory; None for one that is not what it should be."""
        import torch

        heads, moves = [], []
        for frame, buffer in landed:
            assert frame.copy.space is not None
            group = frame.copy.space.layout.groups[split_part(frame.copy.part)[1]]
            head = torch.empty(header_bytes(group), dtype=torch.uint8)
            heads.append(head)
            moves.append(Move(head, buffer.tensor[: len(head)]))
        async with absorbed(self._core, device, device.stores):
            await self._core.workers.run(device.copy, moves, device.stores)
        return await self._core.workers.run(_decode, [f.copy for f, _ in landed], heads)


def _decode(copies: Sequence[Copy], heads: Sequence[torch.Tensor]) -> list[Header | None]:
    out: list[Header | None] = []
    for copy, head in zip(copies, heads, strict=True):
        try:
            header = decode_header(head.numpy().data)
            check_frame(copy, header, copy.space)
        except CodecError:
            out.append(None)
        else:
            out.append(header)
    return out
