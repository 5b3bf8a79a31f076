"""One batch of conversions in place: leased, verified, encoded, verified again, and exchanged.

The frames are exchanged in one turn of the loop and only if nobody else uses the copy. At no moment
is a part in neither form, and a conversion that is cut short or fails leaves the old one.

A frame that does not become smaller stays, and so does one that is damaged: a load finds that out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tierkv.abc import IoStatus, ReadRequest
from tierkv.blocks import split_part
from tierkv.errors import BackendError, CapacityError, CodecError
from tierkv.frame import decode_header, page_round
from tierkv.mover.core import INLINE_BYTES, stored_part
from tierkv.mover.onboard import upload
from tierkv.mover.shrinking import Shrinking, encode, fill
from tierkv.mover.staged import stage
from tierkv.sections import copy_bytes
from tierkv.workers import current_lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import MemoryBackend, ResidentBackend
    from tierkv.decisions.coding_rules import Recode
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.turns import Turn

__all__ = ["Conversion"]

_LOOK = 8  # frames looked at between two checkpoints
_NO_ROOM_S = 0.25  # the watermarks have made room by then
_FAILED_S = 5.0
_STAGING_S = 2.0


class Conversion:
    """Converts copies of one memory tier.

    Args:
        core: Tiers, decisions, memory and threads.
        level: The tier.
        turn: Whose turn it is on it.
        limit: Bytes of frames a batch; it takes twice as much staging memory at most, or what the
            largest frame needs.
        tell: Told what became of each copy (as :meth:`tierkv.abc.Observer.recoded`), and of the
            bytes that this saved.
    """

    def __init__(
        self,
        core: Core,
        level: Level,
        turn: Turn,
        limit: int,
        tell: Callable[[Level, Shrinking, str, int], None],
    ) -> None:
        self._core = core
        self._level = level
        self._turn = turn
        self._limit = limit
        self._tell = tell

    async def run(self, batch: Sequence[Recode]) -> None:
        """Convert these copies.

        Cancellation: no thread and no device touches the memory any more when it is re-raised;
        each frame is as it was, or exchanged.
        """
        core = self._core
        frames = self._lease(batch)
        try:
            chunk: list[Shrinking] = []
            need = 0
            for number, frame in enumerate(frames, start=1):
                if number % _LOOK == 0:
                    await asyncio.sleep(0)  # a header of many layers takes a while to read
                if not self._find(frame):
                    continue
                if chunk and need + self._need(frame) > 2 * self._limit:
                    await self._chunk(chunk)
                    chunk, need = [], 0
                chunk.append(frame)
                need += self._need(frame)
            await self._chunk(chunk)
        except BackendError as error:
            core.faults.raised(error.tier, "compress", error)
            for frame in frames:
                core.decisions.recode_later(frame.recode, _FAILED_S, core.clock())
        finally:
            for frame in frames:
                core.free(core.decisions.release(frame.lease, core.clock()))

    def _lease(self, batch: Sequence[Recode]) -> list[Shrinking]:
        core, frames = self._core, []
        for recode in batch:
            held = core.decisions.hold_part(recode.part, core.clock(), True, 1 << self._level.index)
            if held is None:
                continue  # it is gone, or expired
            lease, _, generation = held
            if generation == recode.generation:
                frames.append(Shrinking(recode, lease))
            else:  # another one took its place, and will be looked at by itself
                core.free(core.decisions.release(lease, core.clock()))
        return frames

    def _find(self, frame: Shrinking) -> bool:
        """Find out what a copy is, and where; False if it stays as it is."""
        core, recode = self._core, frame.recode
        memory, resident = self._level.memory, self._level.resident
        try:
            if memory is not None:
                frame.where = memory.borrow(recode.part, recode.generation)
                if frame.where is None:
                    return False
                header = decode_header(frame.where.memory)
            else:
                assert resident is not None
                found = resident.borrow(recode.part, recode.generation)
                if found is None:
                    return False
                header = found.header
                frame.length = page_round(header.frame_bytes)
        except CodecError:
            return False  # damaged: a load finds that out
        frame.space = core.spaces.get(header.space)
        if frame.space is None or {s.chain for s in header.sections} == {recode.chain}:
            self._keep(frame)
            return False
        return True

    def _need(self, frame: Shrinking) -> int:
        """Staging memory for a frame: what is read of it, and all that it can become."""
        assert frame.space is not None
        bound = self._core.pipeline_of(frame.space, frame.recode.chain).max_bytes
        return page_round(bound(split_part(frame.recode.part)[1])) + frame.length

    async def _chunk(self, frames: Sequence[Shrinking]) -> None:
        core = self._core
        reads = [frame for frame in frames if frame.length]
        sizes = [self._need(frame) - frame.length for frame in frames]
        sizes += [frame.length for frame in reads]
        try:
            async with asyncio.timeout(_STAGING_S):
                slices = await stage(core.staging, sizes, background=True)
        except CapacityError:
            for frame in frames:  # larger than all staging memory: it never can be
                self._keep(frame)
            return
        except TimeoutError:  # held by a tier that hangs, perhaps: a flush must not wait for that
            for frame in frames:
                self._put_off(frame)
                core.decisions.recode_later(frame.recode, _FAILED_S, core.clock())
            return
        try:
            for frame, piece in zip(frames, slices[: len(frames)], strict=True):
                frame.out = piece
            for frame, piece in zip(reads, slices[len(frames) :], strict=True):
                frame.where = piece
            ready = await self._read(frames)
            if ready:
                await core.workers.run(encode, core, ready)
                await self._place([f for f in ready if self._worth(f)])
        finally:
            for frame in frames:
                if frame.room is not None:
                    frame.room.release()
                    frame.room = None
            for piece in slices:
                piece.release()

    async def _read(self, frames: Sequence[Shrinking]) -> list[Shrinking]:
        """Fetch frames out of a device's memory; what could not be read is left as it is."""
        core, level = self._core, self._level
        if level.memory is not None or not frames:
            return list(frames)
        requests, into = [], []
        for frame in frames:
            assert frame.where is not None
            recode, target = frame.recode, frame.where.padded
            requests.append(ReadRequest(recode.part, recode.generation, 0, len(target)))
            into.append(target)
        async with self._turn.take(current_lane()):
            results = await core.read(level, requests, into)
        good = []
        for frame, result in zip(frames, results, strict=True):
            if result.status is IoStatus.OK:
                good.append(frame)
            else:
                core.decisions.recode_later(frame.recode, _FAILED_S, core.clock())
        return good

    def _worth(self, frame: Shrinking) -> bool:
        """Whether a frame has become smaller; note it if it has not."""
        core, level, header = self._core, self._level, frame.header
        if frame.damaged:
            recode = frame.recode
            core.damaged(recode.part, level.index, recode.generation, "checksum")
            self._tell(level, frame, "failed", 0)
            return False
        if header is not None and level.backend.charge(header.frame_bytes) < frame.recode.nbytes:
            return True
        self._keep(frame)
        return False

    def _keep(self, frame: Shrinking) -> None:
        self._core.decisions.recode_kept(frame.recode, self._core.clock())
        self._tell(self._level, frame, "kept", 0)

    # ------------------------------------------------------------------ exchanging

    async def _place(self, frames: Sequence[Shrinking]) -> None:
        """Put smaller frames in the place of the ones that they were made of."""
        if not frames:
            return
        level = self._level
        if level.resident is not None:
            await self._upload(level.resident, frames)
            return
        memory = level.memory
        assert memory is not None
        for frame in frames:
            assert frame.header is not None
            frame.room = memory.allocate(frame.header.frame_bytes)
        roomy = [frame for frame in frames if frame.room is not None]
        nbytes = sum(len(frame.small) for frame in roomy)
        if nbytes < INLINE_BYTES:
            fill(roomy)
        else:
            await self._core.workers.run(fill, roomy)
        for frame in frames:
            if frame.room is None:
                self._squeeze_in(memory, frame)
                await asyncio.sleep(0)  # it copies on the loop
            elif self._exchange(frame):
                assert frame.header is not None
                if memory.adopt(stored_part(frame.header), frame.room):
                    frame.room = None

    def _squeeze_in(self, memory: MemoryBackend, frame: Shrinking) -> None:
        """Exchange frames where the memory is full: the new one goes where the old one was.

        Between giving the old one back and taking its memory nothing else runs on the loop.
        """
        assert frame.header is not None
        if not self._exchange(frame):
            return
        part, generation = frame.recode.part, frame.recode.generation
        memory.discard(part, generation)
        frame.room = memory.allocate(frame.header.frame_bytes)
        if frame.room is not None:
            copy_bytes(frame.room.memory, frame.small)
            if memory.adopt(stored_part(frame.header), frame.room):
                frame.room = None
                return
        self._core.damaged(part, self._level.index, generation, "short")

    async def _upload(self, resident: ResidentBackend, frames: Sequence[Shrinking]) -> None:
        """Bring frames into a device's memory; each is exchanged as it is published there."""
        going = [(f.header, f.out) for f in frames if f.header is not None and f.out is not None]

        def may(number: int) -> bool:
            return self._exchange(frames[number])

        async with self._turn.take(current_lane()):
            results = await upload(self._core, resident, going, may=may)
        for frame, result in zip(frames, results, strict=True):
            if result.status is IoStatus.FULL:
                self._put_off(frame)
                self._core.decisions.recode_later(frame.recode, _NO_ROOM_S, self._core.clock())

    def _exchange(self, frame: Shrinking) -> bool:
        """Exchange the copies in the books; the frames follow in the same turn of the loop."""
        core, header = self._core, frame.header
        assert header is not None
        nbytes, stored = self._level.backend.charge(header.frame_bytes), stored_part(header)
        if not core.decisions.recoded(frame.recode, nbytes, stored.lossless, core.clock()):
            self._put_off(frame)
            return False
        self._tell(self._level, frame, "converted", frame.recode.nbytes - nbytes)
        return True

    def _put_off(self, frame: Shrinking) -> None:
        self._tell(self._level, frame, "put_off", 0)
