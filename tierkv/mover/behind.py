"""Write-behind: copies from memory tiers to slower ones, after the caller has gone on.

Two kinds of copies share one queue, bounded in bytes: *write-through* of new parts, and
*demotion* of parts that must leave a full tier. A copy is verified on its way, published in the
slower tier, and only then (demotion) unpublished in the faster one: at no moment is it in neither.
When the queue is full, new write-through copies are not taken: the tail of a chain is lost first,
never a block in its middle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import IoStatus, WriteItem
from tierkv.blocks import part_id, split_part
from tierkv.decisions.types import Demote, EvictReason, SkipReason, StoreItem
from tierkv.errors import CapacityError, IntegrityError
from tierkv.frame import decode_header
from tierkv.mover.core import stored_part
from tierkv.mover.staged import stage
from tierkv.pipeline import open_frame, verify
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer, StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Reservation
    from tierkv.layout import Space
    from tierkv.mover.core import Core, Level

__all__ = ["FlushResult", "WriteBehind"]

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_PARTS = 128
_ROOM_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush made sure of.

    Attributes:
        durable: Parts that would survive a crash of the machine.
        missing: Parts that are nowhere durable (no such tier, no room, a failure).
    """

    durable: int
    missing: int


@dataclass(slots=True, eq=False)
class _Copy:
    """One copy to make; ``demote`` is set if the source copy goes away afterwards."""

    stored: StoredPart
    source: int
    target: int
    demote: Demote | None = None


class _Prepared(NamedTuple):
    number: int  # position in the batch
    stored: StoredPart
    buffer: Buffer


class WriteBehind:
    """The queue, and the loop that empties it."""

    def __init__(self, core: Core, limit: int) -> None:
        self._core = core
        self._limit = limit
        self._queue: deque[_Copy] = deque()
        self._taken: list[_Copy] = []
        self._kick = Signal()
        self._done = Signal()
        self.queued_bytes = 0
        self.dropped = 0
        self.failed = 0

    def __repr__(self) -> str:
        return f"<WriteBehind: {len(self._queue)} queued, {self.queued_bytes} bytes>"

    @property
    def pending(self) -> int:
        """Copies not yet made."""
        return len(self._queue) + len(self._taken)

    # ------------------------------------------------------------------ producers

    def copy_onwards(self, level: Level, published: Sequence[StoredPart]) -> None:
        """Queue write-through copies of parts just published in ``level``."""
        if level.memory is None:
            return
        for target in self._core.levels[level.index + 1 :]:
            if not target.write_through:
                continue
            refused = 0
            for stored in published:
                if refused or self.queued_bytes + stored.nbytes > self._limit:
                    refused += 1  # and everything after it: the tail goes first
                else:
                    self._put(_Copy(stored, level.index, target.index))
            if refused:
                self.dropped += refused
                self._core.observer.skipped(
                    tier=target.name, reason=SkipReason.BACKPRESSURE.value, parts=refused
                )

    def demote(self, demotes: Sequence[Demote]) -> None:
        """Queue demotions, ahead of write-through copies."""
        for item in reversed(demotes):
            memory = self._core.levels[item.source].memory
            buffer = memory.borrow(item.part, item.generation) if memory is not None else None
            if buffer is None:
                self._core.decisions.cancel_demote([item], self._core.clock())
                continue
            try:
                stored = stored_part(decode_header(buffer.memory))
            except IntegrityError:
                self._core.decisions.cancel_demote([item], self._core.clock())
                self._core.damaged(item.part, item.source, item.generation, "header")
                continue
            self._put(_Copy(stored, item.source, item.target, item), front=True)

    def _put(self, copy: _Copy, *, front: bool = False) -> None:
        if front:
            self._queue.appendleft(copy)
        else:
            self._queue.append(copy)
        self.queued_bytes += copy.stored.nbytes
        self._kick.set()

    async def make_room(self, level: Level, nbytes: int, tenant: str) -> bool:
        """Demote dirty parts of a tier to free ``nbytes``; whether anything was freed.

        Waits a bounded time. Cancelling the caller leaves the demotions under way.
        """
        core = self._core
        drops, demotes = core.decisions.make_room(
            level.index, nbytes, tenant=tenant, now=core.clock()
        )
        core.free(drops)
        if not demotes:
            return bool(drops)
        before = core.decisions.used(level.index)
        self.demote(demotes)
        try:
            async with asyncio.timeout(_ROOM_TIMEOUT_S):
                while core.decisions.used(level.index) > before - nbytes and self.pending:
                    await self._done.wait()
        except TimeoutError:
            pass
        return bool(drops) or core.decisions.used(level.index) < before

    async def bring_onwards(self, parts: Sequence[PartId]) -> None:
        """Copy parts that are in memory only to the next durable tier, and wait for it."""
        core = self._core
        now = core.clock()
        durable = [level for level in core.levels if level.backend.durable]
        for part in parts:
            state = core.decisions.state(part, now)
            if not durable or not state.tiers or any(t.index in state.tiers for t in durable):
                continue
            level = core.levels[state.tiers[0]]
            memory = level.memory
            buffer = memory.borrow(part, state.generation) if memory is not None else None
            if buffer is None or self.holds(part):
                continue
            self._put(
                _Copy(stored_part(decode_header(buffer.memory)), level.index, durable[0].index)
            )
        await self.drain()

    async def flush(self, parts: Sequence[PartId]) -> FlushResult:
        """Make these parts durable, as far as there are tiers and room for it.

        Raises:
            BackendError: if a durable tier refuses to sync.
        """
        core = self._core
        durable = {level.index for level in core.levels if level.backend.durable}
        await self.bring_onwards(parts)
        for index in durable:
            await core.workers.spawn(core.flush, core.levels[index], name="flush").wait()
        now = core.clock()
        resident = [s.tiers for s in (core.decisions.state(p, now) for p in parts) if s.tiers]
        safe = sum(bool(durable & set(tiers)) for tiers in resident)
        return FlushResult(durable=safe, missing=len(resident) - safe)

    async def drain(self) -> None:
        """Wait until everything queued by now was copied, or failed to be."""
        waiting = set(map(id, self._taken)) | set(map(id, self._queue))
        while waiting:
            waiting &= set(map(id, self._taken)) | set(map(id, self._queue))
            if waiting:
                await self._done.wait()

    # ------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Empty the queue for the engine's life. Supervised."""
        while True:
            if not self._queue:
                self._kick = Signal()
                await self._kick.wait()
            self._taken = self._batch()
            try:
                await self._copy(self._taken)
            finally:
                self._settle(self._taken)

    def _settle(self, batch: Sequence[_Copy]) -> None:
        undone = [c.demote for c in batch if c.demote is not None]
        if undone:
            self._core.decisions.cancel_demote(undone, self._core.clock())
        self._taken = []
        done, self._done = self._done, Signal()
        done.set()

    def _batch(self) -> list[_Copy]:
        first = self._queue.popleft()
        batch = [first]
        size = first.stored.nbytes
        while self._queue and len(batch) < _BATCH_PARTS:
            following = self._queue[0]
            if (following.source, following.target) != (first.source, first.target):
                break
            if size + following.stored.nbytes > _BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
            size += following.stored.nbytes
        self.queued_bytes -= size
        return batch

    async def _copy(self, batch: Sequence[_Copy]) -> None:
        core = self._core
        source, target = core.levels[batch[0].source], core.levels[batch[0].target]
        await core.purge(target)
        reservation = self._reserve(batch, source, target)
        open_items = {i for i, o in enumerate(reservation.outcomes) if o.generation}
        slices: list[Buffer] = []
        try:
            transcode = source.chain != target.chain
            if transcode and open_items:
                sizes = [self._bound(batch[i], target) for i in sorted(open_items)]
                slices = list(await stage(core.staging, sizes))
            prepared = await core.workers.run(
                self._prepare, batch, sorted(open_items), source, target, slices
            )
            items = [WriteItem(p.stored, p.buffer) for p in prepared]
            results = await core.write(target, items) if items else []
            for ready, result in zip(prepared, results, strict=True):
                if result.status is IoStatus.OK:
                    open_items.discard(ready.number)
                    self._publish(reservation, ready, batch[ready.number], target)
        except CapacityError:
            pass  # a frame larger than all staging memory: it stays where it is
        finally:
            if open_items:
                self.failed += len(open_items)
                core.free(core.decisions.rollback(reservation.id, sorted(open_items), core.clock()))
            for piece in slices:
                piece.release()
        self._leave_source(batch, reservation)

    def _reserve(self, batch: Sequence[_Copy], source: Level, target: Level) -> Reservation:
        core = self._core
        items = []
        for copy in batch:
            stored = copy.stored
            group = split_part(stored.part)[1]
            parent = part_id(stored.parent, group) if stored.parent is not None else None
            lossless = stored.lossless and (
                source.chain == target.chain or self._target_lossless(copy, target)
            )
            items.append(
                StoreItem(
                    part=stored.part,
                    parent=parent,
                    root=stored.root,
                    nbytes=target.backend.charge(self._bound(copy, target)),
                    exact=stored.exact,
                    lossless=lossless,
                )
            )
        reservation = core.reserve(target, items, tenant=batch[0].stored.tenant, source=source)
        skipped = [o.skip for o in reservation.outcomes if o.skip is not None]
        for reason in set(skipped):
            core.observer.skipped(
                tier=target.name, reason=reason.value, parts=skipped.count(reason)
            )
        return reservation

    def _space(self, copy: _Copy) -> Space | None:
        memory = self._core.levels[copy.source].memory
        stored = copy.stored
        buffer = memory.borrow(stored.part, stored.generation) if memory is not None else None
        if buffer is None:
            return None
        try:
            return self._core.spaces.get(decode_header(buffer.memory).space)
        except IntegrityError:
            return None

    def _bound(self, copy: _Copy, target: Level) -> int:
        """Most bytes that the copy may take in the target."""
        if self._core.levels[copy.source].chain == target.chain:
            return copy.stored.nbytes
        space = self._space(copy)
        if space is None:
            return copy.stored.nbytes
        bound = self._core.pipeline(space, target).max_bytes(split_part(copy.stored.part)[1])
        return max(bound, copy.stored.nbytes)

    def _target_lossless(self, copy: _Copy, target: Level) -> bool:
        space = self._space(copy)
        return space is None or self._core.pipeline(space, target).lossless

    def _prepare(
        self,
        batch: Sequence[_Copy],
        open_items: Sequence[int],
        source: Level,
        target: Level,
        slices: Sequence[Buffer],
    ) -> list[_Prepared]:
        """Verify each source frame and, where the chains differ, re-encode it. In a thread."""
        core = self._core
        out = []
        for position, index in enumerate(open_items):
            stored = batch[index].stored
            assert source.memory is not None
            buffer = source.memory.borrow(stored.part, stored.generation)
            if buffer is None:
                continue
            try:
                header = decode_header(buffer.memory)
                space = core.spaces.get(header.space)
                if space is not None:
                    header = open_frame(
                        buffer.memory, space, stored.part, stored.generation, stored.root
                    )
                verify(header, buffer.memory)
            except IntegrityError:
                continue  # it is found out, counted and dropped by the next load
            if slices and space is not None:
                piece = slices[position]
                done = core.pipeline(space, target).transcode(header, buffer.memory, piece.memory)
                header = open_frame(
                    piece.memory[: done.nbytes], space, stored.part, stored.generation, stored.root
                )
                out.append(_Prepared(index, stored_part(header), piece))
            else:
                out.append(_Prepared(index, stored, buffer))
        return out

    def _publish(
        self, reservation: Reservation, ready: _Prepared, copy: _Copy, target: Level
    ) -> None:
        core = self._core
        drops = core.decisions.commit(
            reservation.id,
            [ready.number],
            core.clock(),
            charges=[target.backend.charge(ready.stored.nbytes)],
            lossless=[ready.stored.lossless],
        )
        core.free(drops)

    def _leave_source(self, batch: Sequence[_Copy], reservation: Reservation) -> None:
        """Unpublish demoted parts in the faster tier, now that the slower one has them."""
        core = self._core
        for index, copy in enumerate(batch):
            if copy.demote is None:
                continue
            state = core.decisions.state(copy.stored.part, core.clock())
            demote, copy.demote = copy.demote, None
            core.decisions.cancel_demote([demote], core.clock())
            if copy.target in state.tiers:
                core.free(
                    core.decisions.dropped(
                        [(demote.part, demote.generation)],
                        demote.source,
                        EvictReason.DEMOTED,
                        core.clock(),
                    )
                )
            elif reservation.outcomes[index].skip is not None:
                # the slower tier has no room either: let it go, it is a cache
                core.free(
                    core.decisions.dropped(
                        [(demote.part, demote.generation)],
                        demote.source,
                        EvictReason.CAPACITY,
                        core.clock(),
                    )
                )

    def holds(self, part: PartId) -> bool:
        """Whether a copy of this part is still to be made."""
        return any(c.stored.part == part for c in self._taken) or any(
            c.stored.part == part for c in self._queue
        )
