"""One batch of copies from one tier to another: reserve, read, verify, write, publish.

Any tier may be the source and any other the target. Frames of a tier that the engine can address
are read where they are; all others are read into staging memory or, where nothing is to be
changed about them, straight into the memory tier that they go to. A demoted part is unpublished in
the faster tier only after it was published in the slower one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import IoStatus, ReadRequest, WriteItem
from tierkv.blocks import KEY_BYTES, BlockKey, split_part
from tierkv.decisions.types import EvictReason, FoundPart, SkipReason, StoreItem
from tierkv.errors import BackendError, CapacityError, CodecError
from tierkv.frame import decode_header, page_round
from tierkv.mover.direct import Direct
from tierkv.mover.onboard import sound, upload
from tierkv.mover.reforming import Frame, most_bytes, rechained, recodes, reform
from tierkv.mover.staged import stage, stage_nowait
from tierkv.workers import current_lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer, IoResult
    from tierkv.decisions.types import Reservation
    from tierkv.frame import Header
    from tierkv.mover.copies import Copy
    from tierkv.mover.core import Core
    from tierkv.mover.turns import Turn

__all__ = ["copy_batch"]

_HOPELESS = 3  # batches that a tier fails in a row before parts are let go instead of kept for it
_NO_ROOM = (
    SkipReason.FULL,
    SkipReason.TOO_LARGE,
    SkipReason.TENANT_QUOTA,
    SkipReason.REFUSED,
)
_NO_ROOT = BlockKey(bytes(KEY_BYTES))  # a copy of a part that is known asks nobody for its root
_LEARN = 32  # headers decoded between two checkpoints


async def copy_batch(
    core: Core, batch: Sequence[Copy], turns: Sequence[Turn], *, patient: bool = True
) -> int:
    """Copy parts of one tier to one other; engine-owned. ``copy.made`` tells what became of each.

    Args:
        core: Tiers, decisions, memory and threads.
        batch: Copies with the same source and target, all promotions or none.
        turns: Whose turn it is on each tier.
        patient: False for a promotion: it does not wait for staging memory.

    Returns:
        How many had room in the target and were not copied nevertheless.
    """
    return await _Batch(core, batch, turns).run(patient=patient)


class _Placed(NamedTuple):
    """A verified frame and the buffer that it is in."""

    frame: Frame
    header: Header
    buffer: Buffer


class _Batch:
    """One batch on its way."""

    def __init__(self, core: Core, copies: Sequence[Copy], turns: Sequence[Turn]) -> None:
        self._core = core
        self._copies = copies
        self._source = core.levels[copies[0].source]
        self._target = core.levels[copies[0].target]
        self._turns = turns
        self._reservation: Reservation
        self._open: set[int] = set()
        self._rooms: list[Buffer] = []
        self._bad: list[tuple[Copy, IoResult | None]] = []

    async def run(self, *, patient: bool) -> int:
        core = self._core
        self._choose_chains()
        await self._learn()
        self._reservation = self._reserve()
        self._open = {i for i, o in enumerate(self._reservation.outcomes) if o.generation}
        self._measure()
        hopeless = False
        try:
            frames = [Frame(i, self._copies[i]) for i in sorted(self._open)]
            frames = await self._lay_out(await self._directly(frames), patient=patient)
            frames = await self._read(frames)
            placed = await core.workers.run(self._reform, frames) if frames else []
            await self._write(placed)
        except CapacityError:
            hopeless = True  # a frame larger than all staging memory can never be encoded anew
        except BackendError as error:  # a device broke: what a backend raises is a result
            core.faults.raised(error.tier, "copy", error)
        finally:
            if self._open:
                core.rollback(self._reservation.id, sorted(self._open), SkipReason.CLOSED)
            for room in self._rooms:
                room.release()
        self._tell()
        self._leave_source(hopeless=hopeless or self._target.failures >= _HOPELESS)
        return len(self._open)

    def _choose_chains(self) -> None:
        """Ask the rules of compression, if the target has any, what each copy is to become."""
        core, source, target = self._core, self._source.index, self._target.index
        if core.decisions.compresses(target):
            parts = [copy.part for copy in self._copies]
            ages = [core.ages.get(part) for part in parts]
            chains = core.decisions.copy_chains(parts, ages, source, target, core.clock())
            for copy, chain in zip(self._copies, chains, strict=True):
                copy.chain = chain

    def _measure(self) -> None:
        """Look how long frames are now that they stay: some were compressed while they waited."""
        core, source = self._core, self._source
        if not core.decisions.compresses(source.index):
            return
        for number in self._open:
            copy = self._copies[number]
            state = core.decisions.state(copy.part, core.clock())
            if source.index in state.tiers:
                nbytes = state.nbytes[state.tiers.index(source.index)]
                copy.nbytes = min(copy.nbytes, source.backend.longest(nbytes))

    async def _learn(self) -> None:
        """Find the space of what is to be encoded anew, as far as its header is at hand.

        Of parts on a medium nothing is known before they were read: what they may take is then
        the most that a frame of any known space may.
        """
        if not any(recodes(self._core, copy) for copy in self._copies):
            return
        for number, copy in enumerate(self._copies):
            header = self._header_of(copy) if copy.space is None else None
            if header is not None:
                copy.space = self._core.spaces.get(header.space)
            if number % _LEARN == _LEARN - 1:
                await asyncio.sleep(0)

    def _header_of(self, copy: Copy) -> Header | None:
        memory, resident = self._source.memory, self._source.resident
        if resident is not None:
            found = resident.borrow(copy.part, copy.generation)
            return None if found is None else found.header
        buffer = memory.borrow(copy.part, copy.generation) if memory is not None else None
        if buffer is None:
            return None
        try:
            return decode_header(buffer.memory)
        except CodecError:
            return None  # found out again, and told, when it is verified

    def _reserve(self) -> Reservation:
        core, source, target = self._core, self._source, self._target
        # what is known of a part already is not asked for again: only the bytes count
        items = [
            StoreItem(
                part=copy.part,
                parent=copy.parent,
                root=copy.root or _NO_ROOT,
                nbytes=target.backend.charge(most_bytes(core, copy, target)),
            )
            for copy in self._copies
        ]
        promotion = self._copies[0].promotion
        ahead = self._copies[0].ahead
        reservation = core.reserve(target, items, source=source, demand=not promotion, ahead=ahead)
        skipped = [o.skip for o in reservation.outcomes if o.skip is not None]
        for reason in set(skipped) if not promotion else ():
            core.observer.skipped(
                tier=target.name, reason=reason.value, parts=skipped.count(reason)
            )
        return reservation

    async def _directly(self, frames: Sequence[Frame]) -> list[Frame]:
        """Copy what a medium and a device can copy between themselves; the rest is returned."""
        way = Direct.between(self._core, self._source, self._target, self._turns)
        if way is None or not frames:
            return list(frames)
        plain = [frame for frame in frames if frame.copy.chain is None]
        coded = [frame for frame in frames if frame.copy.chain is not None]
        try:
            return await way.copy(plain) + coded
        finally:
            self._bad += way.bad
            self._publish(way.arrived)

    async def _lay_out(self, wanted: Sequence[Frame], *, patient: bool) -> list[Frame]:
        """Find memory for what is read and for what is changed: staging in one acquisition."""
        source, target = self._source, self._target
        frames: list[Frame] = []
        for frame in wanted:
            copy = frame.copy
            if source.memory is not None:
                frame.where = source.memory.borrow(copy.part, copy.generation)
                if frame.where is None:
                    continue  # a newer one took its place, and is queued itself
            elif target.memory is not None and not recodes(self._core, copy):
                frame.where = target.memory.allocate(copy.nbytes)
                if frame.where is None:
                    break  # the memory is in pieces: the tail has no room after all
                self._rooms.append(frame.where)
                frame.landed = True
            frames.append(frame)
        reads = [f for f in frames if f.where is None]
        outs = [f for f in frames if rechained(self._core, f.copy)]  # these become something else
        sizes = [page_round(f.copy.nbytes) for f in reads]
        sizes += [most_bytes(self._core, f.copy, target) for f in outs]
        if patient:
            slices = await stage(self._core.staging, sizes, background=True)
        else:
            slices = stage_nowait(self._core.staging, sizes) or []
            if sizes and not slices:
                return []
        self._rooms += slices
        for frame, room in zip(reads, slices[: len(reads)], strict=True):
            frame.where = room
        for frame, room in zip(outs, slices[len(reads) :], strict=True):
            frame.out = room
        return frames

    async def _read(self, frames: Sequence[Frame]) -> list[Frame]:
        """Read from a tier that cannot be addressed; what could not be read is left out."""
        core, source = self._core, self._source
        if source.memory is not None or not frames:
            return list(frames)
        frames = await self._check(frames)
        requests, into = [], []
        for frame in frames:
            assert frame.where is not None
            size = page_round(frame.copy.nbytes)
            requests.append(ReadRequest(frame.copy.part, frame.copy.generation, 0, size))
            into.append(frame.where.padded[:size])
        async with self._turns[source.index].take(current_lane()):
            results = await core.read(source, requests, into)
        good = []
        for frame, result in zip(frames, results, strict=True):
            if result.status is IoStatus.OK:
                good.append(frame)
            else:
                self._bad.append((frame.copy, result))
        return good

    async def _check(self, frames: Sequence[Frame]) -> list[Frame]:
        """Have a device verify what it holds, before it is copied out; what is bad is left out."""
        resident = self._source.resident
        if resident is None:
            return list(frames)
        good, held = [], []
        for frame in frames:
            found = resident.borrow(frame.copy.part, frame.copy.generation)
            if found is not None and found.header.folded:
                held.append((frame, found.header, found.buffer.tensor))
            else:
                good.append(frame)  # verified in host memory; or gone, as reading it will tell
        sums = await sound(self._core, resident.device, [(h, tensor) for _, h, tensor in held])
        for (frame, _, _), right in zip(held, sums, strict=True):
            frame.checked = right
            if right:
                good.append(frame)
            else:
                self._bad.append((frame.copy, None))
        return good

    def _reform(self, frames: Sequence[Frame]) -> list[_Placed]:
        """Verify each frame and give it the form that the target wants. In a thread."""
        placed = []
        for frame in frames:
            try:
                header, buffer = reform(self._core, frame, self._target)
            except CodecError:
                self._bad.append((frame.copy, None))
            else:
                placed.append(_Placed(frame, header, buffer))
        return placed

    async def _write(self, placed: Sequence[_Placed]) -> None:
        """Write into the target, and publish what arrived."""
        target = self._target
        landed = [p for p in placed if p.frame.landed]
        going = [p for p in placed if not p.frame.landed]
        arrived = []
        for ready in landed:
            assert target.memory is not None
            if target.memory.adopt(ready.frame.stored, ready.buffer):
                self._rooms.remove(ready.buffer)
                arrived.append(ready.frame)
        if going:
            results = await self._hand_over(going)
            arrived += [
                p.frame for p, r in zip(going, results, strict=True) if r.status is IoStatus.OK
            ]
        self._publish(arrived)

    async def _hand_over(self, placed: Sequence[_Placed]) -> list[IoResult]:
        """Write into a tier that is not built in place."""
        core, target = self._core, self._target
        items = [WriteItem(p.frame.stored, p.buffer) for p in placed]
        resident = target.resident

        async def seal(_: Sequence[WriteItem]) -> list[IoResult]:
            assert resident is not None
            return await upload(core, resident, [(p.header, p.buffer) for p in placed])

        try:
            if target.memory is not None:
                return await core.write(target, items)
            async with self._turns[target.index].take(current_lane()):
                return await core.write(target, items, via=seal if resident is not None else None)
        except BaseException:
            # cut short: what arrived nevertheless is in no book, and must go
            for stored, _ in items:
                name = (stored.part, stored.generation)
                if target.memory is not None:
                    target.memory.discard(*name)
                elif target.resident is not None:
                    target.resident.discard(*name)
                else:
                    target.doomed.append(name)
            raise

    def _publish(self, frames: Sequence[Frame]) -> None:
        """Make copies visible in the target. Atomic: no await."""
        if not frames:
            return
        numbers = [f.number for f in frames]
        self._core.commit(self._target, self._reservation.id, numbers, [f.stored for f in frames])
        self._open.difference_update(numbers)
        for frame in frames:
            frame.copy.made = True

    def _tell(self) -> None:
        """Draw the consequences of what was damaged or could not be read."""
        core, tier = self._core, self._source.index
        for copy, result in self._bad:
            if result is None:
                core.damaged(copy.part, tier, copy.generation, "checksum")
                continue
            group = split_part(copy.part)[1]
            found = FoundPart(copy.part, 0, group, tier, copy.generation, copy.nbytes)
            core.unreadable(found, result)

    def _leave_source(self, *, hopeless: bool) -> None:
        """Unpublish demoted parts in the faster tier, now that the slower one has them.

        Where the slower tier has no room, or fails again and again, the part is let go: it is a
        cache, and the faster tier must not fill up with what nobody will ever take.
        """
        core, now = self._core, self._core.clock()
        for copy, outcome in zip(self._copies, self._reservation.outcomes, strict=True):
            demote, copy.demote = copy.demote, None
            if demote is None:
                continue
            core.decisions.cancel_demote([demote], now)
            arrived = self._target.index in core.decisions.state(demote.part, now).tiers
            if arrived or outcome.skip in _NO_ROOM or hopeless:
                reason = EvictReason.DEMOTED if arrived else EvictReason.CAPACITY
                gone = [(demote.part, demote.generation)]
                core.free(core.decisions.dropped(gone, demote.source, reason, now))
