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
from typing import TYPE_CHECKING

from tierkv.decisions.types import EvictReason, SkipReason
from tierkv.errors import ClosedError, CodecError
from tierkv.frame import decode_header
from tierkv.mover.copying import Copy, copy_batch, most_bytes
from tierkv.mover.core import stored_part
from tierkv.mover.slices import sliced
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Demote
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level

__all__ = ["FlushResult", "WriteBehind"]

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_PARTS = 128
_ROOM_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush made sure of.

    Attributes:
        durable: Parts that would survive a crash of the machine.
        missing: Parts that would not: there is no such tier, no room in it, or it fails.
    """

    durable: int
    missing: int


class WriteBehind:
    """The queue, and the loop that empties it."""

    def __init__(self, core: Core, limit: int) -> None:
        self._core = core
        self._limit = limit
        self._batch_bytes = max(1, min(_BATCH_BYTES, core.window_bytes))
        self._queue: deque[Copy] = deque()
        self._taken: list[Copy] = []
        self._waiting: dict[tuple[PartId, int], Copy] = {}
        self._kick = Signal()
        self._done = Signal()
        self._ended = False
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

    def copy_onwards(self, level: Level, space: Space, published: Sequence[StoredPart]) -> None:
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
                    self._put(Copy(stored, space, level.index, target.index))
            if refused:
                self.dropped += refused
                self._core.observer.skipped(
                    tier=target.name, reason=SkipReason.BACKPRESSURE.value, parts=refused
                )

    def demote(self, demotes: Sequence[Demote]) -> list[Copy]:
        """Queue demotions, ahead of write-through copies.

        A tier that the engine cannot address has nothing to copy from in place: its parts are
        let go.
        """
        core = self._core
        queued = []
        for item in reversed(demotes):
            if core.levels[item.source].memory is None:
                gone = [(item.part, item.generation)]
                core.free(
                    core.decisions.dropped(gone, item.source, EvictReason.CAPACITY, core.clock())
                )
                continue
            copy = self._describe(item.part, item.generation, item.source, item.target, item)
            if copy is None:
                core.decisions.cancel_demote([item], core.clock())
            else:
                self._put(copy, front=True)
                queued.append(copy)
        return queued

    def _describe(
        self, part: PartId, generation: int, source: int, target: int, demote: Demote | None = None
    ) -> Copy | None:
        """Read from a part's own frame what a copy of it needs; None if it is not usable."""
        core = self._core
        memory = core.levels[source].memory
        buffer = memory.borrow(part, generation) if memory is not None else None
        if buffer is None:
            return None
        try:
            header = decode_header(buffer.memory)
            stored = stored_part(header)
        except CodecError:
            core.damaged(part, source, generation, "header")
            return None
        space = core.spaces.get(header.space)
        return None if space is None else Copy(stored, space, source, target, demote)

    def _put(self, copy: Copy, *, front: bool = False) -> None:
        if front:
            self._queue.appendleft(copy)
        else:
            self._queue.append(copy)
        self._waiting[copy.stored.part, copy.target] = copy
        self.queued_bytes += copy.stored.nbytes
        self._kick.set()

    # ------------------------------------------------------------------ waiting

    async def _settled(self, copies: Sequence[Copy]) -> None:
        """Wait until these copies were made or given up.

        Raises:
            ClosedError: if the engine is closed meanwhile.
        """
        for copy in copies:
            while not copy.settled:
                if self._ended:
                    raise ClosedError("the engine was closed before everything was written")
                await self._done.wait()

    def holding(self, level: Level) -> list[Copy]:
        """Copies under way out of this tier: what they copy may go only when they are done."""
        core = self._core
        mine = [copy for copy in self._taken if copy.source == level.index]
        return [] if mine and core.hangs(core.levels[mine[0].target]) else mine

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
                await self._settled(awaited)
        except TimeoutError:
            return False
        return True

    async def flush(self, parts: Collection[PartId]) -> FlushResult:
        """Make these parts durable, as far as there are tiers and room for it.

        Returns:
            How many of them are durable now, and how many are not, wherever they are.

        Raises:
            BackendError: if a durable tier refuses to sync.
            ClosedError: if the engine is closed meanwhile.
        """
        core = self._core
        start = core.clock()
        durable = [level for level in core.levels if level.backend.durable]
        if durable:
            await self._settled(await self._bring_onwards(parts, durable[0].index))
        # only what was written before the sync began is known to have reached the medium
        written = [part async for part in sliced(parts) if self._is_durable(part)]
        for level in durable:
            await core.workers.spawn(core.flush, level, name="flush").wait()
        safe = 0
        async for part in sliced(written):
            safe += self._is_durable(part)
        core.observer.operation(op="flush", tier="", seconds=core.clock() - start)
        return FlushResult(durable=safe, missing=len(parts) - safe)

    def _is_durable(self, part: PartId) -> bool:
        core = self._core
        tiers = core.decisions.state(part, core.clock()).tiers
        return any(core.levels[tier].backend.durable for tier in tiers)

    async def _bring_onwards(self, parts: Iterable[PartId], target: int) -> list[Copy]:
        """See that parts which are nowhere durable are on their way to ``target``."""
        core = self._core
        copies = []
        async for part in sliced(parts):
            copy = self._waiting.get((part, target))
            if copy is None and not self._is_durable(part):
                state = core.decisions.state(part, core.clock())
                if state.tiers:
                    copy = self._describe(part, state.generation, state.tiers[0], target)
                if copy is not None:
                    self._put(copy)
            if copy is not None:
                copies.append(copy)
        return copies

    async def drain(self) -> None:
        """Wait until everything queued by now was copied, or failed to be.

        Raises:
            ClosedError: if the engine is closed meanwhile.
        """
        await self._settled([*self._taken, *self._queue])

    # ------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Empty the queue for the engine's life. Supervised."""
        try:
            while True:
                if not self._queue:
                    self._kick = Signal()
                    await self._kick.wait()
                self._taken = self._batch()
                try:
                    self.failed += await copy_batch(self._core, self._taken)
                finally:
                    self._settle(self._taken)
        except asyncio.CancelledError:
            if self._core.workers.stopping:  # else a stray one: this loop is started again
                self._ended = True
                self._done.set()
            raise

    def _settle(self, batch: Sequence[Copy]) -> None:
        undone = [c.demote for c in batch if c.demote is not None]
        if undone:
            self._core.decisions.cancel_demote(undone, self._core.clock())
        for copy in batch:
            copy.settled = True
            name = (copy.stored.part, copy.target)
            if self._waiting.get(name) is copy:
                del self._waiting[name]
        self._taken = []
        done, self._done = self._done, Signal()
        done.set()

    def _batch(self) -> list[Copy]:
        """Take copies between the same two tiers, as many as may be encoded anew at once."""
        core, queue = self._core, self._queue
        target = core.levels[queue[0].target]
        batch: list[Copy] = []
        room = 0
        while queue and len(batch) < _BATCH_PARTS:
            copy = queue[0]
            if batch and (copy.source, copy.target) != (batch[0].source, target.index):
                break
            room += most_bytes(core, copy, target)
            if batch and room > self._batch_bytes:
                break
            batch.append(queue.popleft())
            self.queued_bytes -= copy.stored.nbytes
        return batch
