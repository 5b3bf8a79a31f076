"""Write-behind: copies between tiers, after the caller has gone on.

Three kinds of copies share one queue, bounded in bytes: *demotion* of parts that must leave a full
tier, *write-through* of new parts, and *promotion* of parts that were read from a slower tier. A
copy is verified on its way, published in its new tier, and only then (demotion) unpublished in the
old one: at no moment is it in neither. When the queue is full, promotions go first; then new
write-through copies are not taken: the tail of a chain is lost first, never a block in its middle.

Each tier that something is copied to has loops of its own, so that one that hangs holds up nobody
else. All of them work in the background lane, one transfer at a time on each medium.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tierkv.blocks import part_id, split_part
from tierkv.decisions.types import SkipReason
from tierkv.errors import ClosedError
from tierkv.mover.copies import Copy, CopyQueue
from tierkv.mover.copying import copy_batch
from tierkv.mover.flushing import FlushResult, flush
from tierkv.mover.recoding import Recoder
from tierkv.mover.reforming import most_room
from tierkv.mover.turns import Turn
from tierkv.workers import Lane, Signal, enter_lane

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Demote
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level

__all__ = ["FlushResult", "WriteBehind"]

_BATCH_BYTES = 16 * 1024 * 1024  # most that a read which somebody waits for may find in its way
_BATCH_PARTS = 128
_OVERLAP = 2  # while one batch is written, the next one is read, verified and encoded
_ROOM_TIMEOUT_S = 2.0


class WriteBehind:
    """The queue, and the loops that empty it.

    Attributes:
        turns: Whose turn it is on each tier, in order of the tiers.
        recoder: Converts copies where they are.
        dropped: Write-through copies that found the queue full.
        failed: Copies that had room in their target and were not made nevertheless.
    """

    def __init__(self, core: Core, limit: int) -> None:
        self.turns = [Turn() for _ in core.levels]
        self.recoder = Recoder(core, self.turns)
        self.dropped = 0
        self.failed = 0
        self._core = core
        self._batch_bytes = max(1, min(_BATCH_BYTES, core.window_bytes))
        self._queue = CopyQueue(len(core.levels), limit)
        self._taken: list[Copy] = []
        self._kicks = [Signal() for _ in core.levels]
        self._done = Signal()
        self._ended = False

    def __repr__(self) -> str:
        return f"<WriteBehind: {len(self._queue)} queued, {self.queued_bytes} bytes>"

    @property
    def pending(self) -> int:
        """Copies not yet made."""
        return len(self._queue) + len(self._taken)

    @property
    def under_way(self) -> list[Copy]:
        """Copies being made."""
        return list(self._taken)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be copied."""
        return self._queue.nbytes

    @property
    def oldest_seconds(self) -> float:
        """Seconds for which the oldest copy has waited or been under way; promotions aside."""
        times = [copy.since for copy in self._taken if not copy.promotion]
        queued = self._queue.oldest()
        if queued is not None:
            times.append(queued)
        return max(self._core.clock() - min(times), 0.0) if times else 0.0

    # ------------------------------------------------------------------ producers

    def copy_onwards(self, level: Level, space: Space, published: Sequence[StoredPart]) -> None:
        """Queue write-through copies of parts just published in ``level``."""
        core = self._core
        for target in core.levels[level.index + 1 :]:
            if not target.write_through or not published:
                continue
            refused = len(published) if core.hangs(target) else 0
            for stored in published if not refused else ():
                copy = self._describe(level, target, space, stored)
                # and everything after one that is refused: the tail goes first
                if refused or not self._queue.offer(copy):
                    refused += 1
            self._kicks[target.index].set()
            if refused:
                self.dropped += refused
                core.observer.skipped(
                    tier=target.name, reason=SkipReason.BACKPRESSURE.value, parts=refused
                )

    def promote(self, level: Level, parts: Sequence[StoredPart], space: Space) -> None:
        """Queue copies of parts of ``level`` to the fastest tier, as far as it has room for them.

        Nobody waits for them: they evict nothing that was used later, take no memory that
        somebody else waits for, and are the first to go when the queue is full.
        """
        core = self._core
        target = core.levels[0]
        if level.index == 0 or core.closed:
            return
        for stored in parts:
            if self._queue.find(stored.part, 0) is None:
                copy = self._describe(level, target, space, stored)
                copy.promotion = True
                if not self._queue.offer(copy):
                    break
        self._kicks[0].set()

    def _describe(self, level: Level, target: Level, space: Space, stored: StoredPart) -> Copy:
        group = split_part(stored.part)[1]
        return Copy(
            part=stored.part,
            generation=stored.generation,
            nbytes=stored.nbytes,
            source=level.index,
            target=target.index,
            space=space,
            root=stored.root,
            parent=part_id(stored.parent, group) if stored.parent is not None else None,
            since=self._core.clock(),
        )

    def demote(self, demotes: Sequence[Demote]) -> list[Copy]:
        """Queue demotions, ahead of everything else."""
        levels, now = self._core.levels, self._core.clock()
        queued = [
            Copy(
                part=d.part,
                generation=d.generation,
                nbytes=levels[d.source].backend.longest(d.nbytes),
                source=d.source,
                target=d.target,
                demote=d,
                since=now,
            )
            for d in demotes
        ]
        self.add(queued)
        return queued

    def add(self, copies: Sequence[Copy]) -> None:
        """Queue copies that somebody waits for, or whose room is needed, whatever their size."""
        for copy in copies:
            self._queue.put(copy)
            self._kicks[copy.target].set()

    # ------------------------------------------------------------------ waiting

    def find(self, part: PartId, target: int) -> Copy | None:
        """The copy of a part to a tier that waits or is under way."""
        return self._queue.find(part, target)

    async def settled(self, copies: Sequence[Copy], *, unless_hanging: bool = False) -> None:
        """Wait until these copies were made or given up.

        Args:
            copies: Copies that were queued.
            unless_hanging: Whether those into a tier that hangs are not waited for.

        Raises:
            ClosedError: if the engine is closed meanwhile.
        """
        for copy in copies:
            level = self._core.levels[copy.target]
            while not copy.settled:
                if self._ended:
                    raise ClosedError("the engine was closed before everything was written")
                if not unless_hanging:
                    await self._done.wait()
                elif not await self._core.landed(level, self._done, writing=True):
                    break

    def holding(self, level: Level) -> list[Copy]:
        """Copies under way out of this tier: what they copy may go only when they are done."""
        core = self._core
        return [
            copy
            for copy in self._taken
            if copy.source == level.index and not core.hangs(core.levels[copy.target])
        ]

    async def make_room(self, level: Level, nbytes: int, tenant: str) -> bool:
        """Demote dirty parts of a tier until ``nbytes`` are free there, or wait for copies of it.

        Returns:
            Whether the tier was quick enough that asking again makes sense.

        Cancellation: leaves the demotions under way.
        """
        core = self._core
        drops, demotes = core.decisions.make_room(
            level.index, nbytes, tenant=tenant, now=core.clock()
        )
        core.free(drops)
        if drops and not demotes:
            return True
        if any(core.hangs(core.levels[target]) for target in {d.target for d in demotes}):
            core.decisions.cancel_demote(demotes, core.clock())
            return False
        awaited = self.demote(demotes) if demotes else self.holding(level)
        if not awaited:
            return False
        try:
            async with asyncio.timeout(_ROOM_TIMEOUT_S):
                await self.settled(awaited)
        except TimeoutError:
            return False
        return True

    async def flush(self, parts: Collection[PartId]) -> FlushResult:
        """Make these parts durable; see :func:`tierkv.mover.flushing.flush`."""
        return await flush(self._core, self, parts)

    async def drain(self) -> None:
        """Wait until everything queued by now was copied, or failed to be; promotions are dropped.

        Raises:
            ClosedError: if the engine is closed meanwhile.
        """
        self._queue.drop_promotions()
        await self.settled([*self._taken, *self._queue.waiting()])

    # ------------------------------------------------------------------ the loops

    async def run(self) -> None:
        """Start supervised loops for each tier that anything can be copied to."""
        core = self._core
        if core.decisions.compressing:
            core.workers.supervise("compression", self.recoder.run, Lane.BACKGROUND)
        for level in core.levels if len(core.levels) > 1 else ():
            for _ in range(_OVERLAP):
                core.workers.supervise(
                    "write-behind", partial(self._serve, level.index), Lane.BACKGROUND
                )

    async def _serve(self, target: int) -> None:
        """Make the copies into one tier, for the engine's life."""
        core = self._core
        room = partial(most_room, core)
        try:
            while True:
                batch = self._queue.take(target, _BATCH_PARTS, self._batch_bytes, room)
                if not batch:
                    if self._kicks[target].is_set():
                        self._kicks[target] = Signal()
                    await self._kicks[target].wait()
                    continue
                self._taken += batch
                promotion = batch[0].promotion
                enter_lane(Lane.PREFETCH if promotion else Lane.BACKGROUND)
                try:
                    left = await copy_batch(core, batch, self.turns, patient=not promotion)
                    self.failed += 0 if promotion else left
                finally:
                    self._settle(batch)
        except asyncio.CancelledError:
            if core.workers.stopping:  # else a stray one: this loop is started again
                self._ended = True
                self._done.set()
            raise

    def _settle(self, batch: Sequence[Copy]) -> None:
        undone = [c.demote for c in batch if c.demote is not None]
        if undone:
            self._core.decisions.cancel_demote(undone, self._core.clock())
        self._queue.settle(batch)
        gone = set(batch)
        self._taken = [copy for copy in self._taken if copy not in gone]
        done, self._done = self._done, Signal()
        done.set()
