"""One reserved chain on its way into one tier: allocate, encode, publish, or give all back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.abc import IoStatus, StoredPart, WriteItem
from tierkv.decisions.types import SkipReason
from tierkv.errors import CapacityError
from tierkv.mover.plans import PartOutcome
from tierkv.mover.staged import stage
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer, IoResult
    from tierkv.decisions.types import Reservation
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.pipeline import Pipeline

__all__ = ["Writing", "allocate", "frame_bytes", "write_and_publish"]

_EVICT_ROUNDS = 3


class Writing:
    """One reserved chain on its way into one tier.

    Attributes:
        handed_over: Whether an engine-owned job brings it to its end.
        published: What became visible.
        outcomes: What became of each part, in order.
        nbytes: Bytes that encoding will move.
    """

    def __init__(
        self,
        core: Core,
        plan: StorePlan,
        level: Level,
        batch: Sequence[NewPart],
        reservation: Reservation,
    ) -> None:
        self.handed_over = False
        self.published: list[StoredPart] = []
        self.outcomes = [PartOutcome(False, o.skip, level.index) for o in reservation.outcomes]
        self._core = core
        self._plan = plan
        self._level = level
        self._batch = batch
        self._reservation = reservation
        self._open = {i for i, o in enumerate(reservation.outcomes) if o.generation}
        self._buffers: dict[int, Buffer] = {}
        self._sealed: dict[int, StoredPart] = {}
        self._pipeline: Pipeline = core.pipeline(plan.space, level)
        self._sizes = {i: frame_bytes(self._pipeline, batch[i]) for i in self._open}
        # a frame of known size is built where it will stay; any other one in staging memory
        self._in_place = level.memory is not None and all(
            self._pipeline.fixed_bytes(batch[i].group, batch[i].tokens) is not None
            for i in self._open
        )
        self.nbytes = sum(self._sizes.values())
        for index in self._open:
            core.storing[batch[index].part] = Signal()

    def to_stage(self) -> list[int]:
        """Numbers of the parts that need staging memory, in order."""
        return [] if self._in_place else sorted(self._open)

    def allocate_in_place(self) -> None:
        """Get memory in the tier itself; parts without memory are skipped, tail first."""
        if not self._in_place:
            return
        for index in sorted(self._open):
            buffer = self._allocate_in(self._sizes[index])
            if buffer is None:
                self._give_up([i for i in self._open if i >= index], SkipReason.FULL)
                break
            self._buffers[index] = buffer
        self.nbytes = sum(self._sizes[i] for i in self._open)

    def size_of(self, index: int) -> int:
        """Most bytes that a part may take."""
        return self._sizes[index]

    def take(self, index: int, buffer: Buffer) -> None:
        """Own the staging memory of a part from here on."""
        self._buffers[index] = buffer

    def refuse(self, reason: SkipReason) -> None:
        """Skip whatever is still open. Atomic."""
        self._give_up(sorted(self._open), reason)

    def _allocate_in(self, size: int) -> Buffer | None:
        """Allocate in the memory tier; evict a little more if slabs are fragmented."""
        memory = self._level.memory
        assert memory is not None
        core = self._core
        buffer = memory.allocate(size)
        for _ in range(_EVICT_ROUNDS):
            if buffer is not None:
                return buffer
            tier, decisions = self._level.index, core.decisions
            free = decisions.capacity(tier) - decisions.used(tier) - decisions.reserved(tier)
            drops, demotes = decisions.make_room(
                tier, free + memory.charge(size), tenant=self._plan.tenant, now=core.clock()
            )
            core.free(drops)
            core.decisions.cancel_demote(demotes, core.clock())
            if not drops:
                return None
            buffer = memory.allocate(size)
        return buffer

    def encode(self) -> None:
        """Gather and encode every part into its buffer. May run in a worker thread."""
        wall = self._core.wall()
        expires = None if self._plan.ttl is None else wall + self._plan.ttl
        for index, buffer in self._buffers.items():
            new = self._batch[index]
            generation = self._reservation.outcomes[index].generation
            label = self._plan.label(new, generation, expires)
            encoded = self._pipeline.encode(label, self._plan.view, new.start, buffer.memory)
            self._sealed[index] = StoredPart(
                part=new.part,
                generation=generation,
                parent=new.parent_key,
                root=self._plan.root,
                nbytes=encoded.nbytes,
                tenant=self._plan.tenant,
                exact=self._plan.fidelity == "exact",
                lossless=encoded.lossless,
                expires=expires,
            )

    def publish_in_memory(self) -> None:
        """Make the batch visible in a memory tier. Atomic: no await."""
        memory = self._level.memory
        assert memory is not None
        for index in sorted(self._open):
            stored = self._sealed[index]
            buffer = self._buffers.pop(index)
            if not self._in_place:
                slot = self._allocate_in(stored.nbytes)
                if slot is not None:
                    _copy_bytes(buffer.memory[: stored.nbytes], slot.memory)
                buffer.release()
                if slot is None:
                    self._give_up([i for i in self._open if i >= index], SkipReason.FULL)
                    return
                buffer = slot
            if not self._in_use(index) and memory.adopt(stored, buffer):
                self._publish(index)
            else:
                buffer.release()
                self._give_up([index], SkipReason.IN_FLIGHT)

    def _in_use(self, index: int) -> bool:
        """Whether somebody reads an older copy, whose memory adopting this one would free."""
        core, level = self._core, self._level
        state = core.decisions.state(self._batch[index].part, core.clock())
        copied = any(tier != level.index for tier in state.pending)
        return level.index in state.tiers and (copied or state.leases > 0)

    def items(self) -> list[tuple[int, WriteItem]]:
        """What is to be written to a medium, with the numbers of the parts."""
        return [(i, WriteItem(self._sealed[i], self._buffers[i])) for i in sorted(self._open)]

    def settle(self, results: Sequence[tuple[int, IoResult]]) -> None:
        """Publish what was written; from the first failure on the rest is given up."""
        for index, result in results:
            if result.status is not IoStatus.OK:
                full = result.status is IoStatus.FULL
                rest = [i for i in self._open if i >= index]
                self._give_up(rest, SkipReason.FULL if full else SkipReason.FAILED)
                return
            self._publish(index)

    def _publish(self, index: int) -> None:
        stored = self._sealed[index]
        self._core.commit(self._level, self._reservation.id, [index], [stored])
        self._closed(index)
        self.outcomes[index] = PartOutcome(True, None, self._level.index)
        self.published.append(stored)

    def _give_up(self, indices: Sequence[int], reason: SkipReason) -> None:
        for index in indices:
            self._closed(index)
            self.outcomes[index] = PartOutcome(False, reason, self._level.index)
            buffer = self._buffers.pop(index, None)
            if buffer is not None:
                buffer.release()
        if indices:
            self._core.rollback(self._reservation.id, list(indices), reason)

    def _closed(self, index: int) -> None:
        self._open.discard(index)
        signal = self._core.storing.pop(self._batch[index].part, None)
        if signal is not None:
            signal.set()

    def leave(self) -> None:
        """Stop waiting for what is not published yet: as far as this store goes, it is skipped."""
        for index in self._open:
            self.outcomes[index] = PartOutcome(False, SkipReason.BACKPRESSURE, self._level.index)

    def abandon(self) -> None:
        """Roll back whatever was not published, as if it had never been. Atomic, idempotent."""
        self._give_up(sorted(self._open), SkipReason.CLOSED)
        for buffer in self._buffers.values():
            buffer.release()
        self._buffers.clear()


async def allocate(core: Core, works: Sequence[Writing]) -> None:
    """Get memory for each reserved part; one acquisition of staging memory for all of them."""
    for work in works:
        work.allocate_in_place()
    wanted = [(work, index) for work in works for index in work.to_stage()]
    try:
        slices = await stage(core.staging, [work.size_of(index) for work, index in wanted])
    except CapacityError:
        for work in {id(work): work for work, _ in wanted}.values():
            work.refuse(SkipReason.TOO_LARGE)
        return
    for (work, index), piece in zip(wanted, slices, strict=True):
        work.take(index, piece)


async def write_and_publish(core: Core, level: Level, works: Sequence[Writing]) -> None:
    """Write several chains to a medium in one call and make them visible. Engine-owned."""
    try:
        chains = [(work, work.items()) for work in works]
        items = [item for _, mine in chains for _, item in mine]
        results = iter(await core.write(level, items) if items else [])
        for work, mine in chains:
            work.settle([(index, next(results)) for index, _ in mine])
    finally:
        for work in works:
            work.abandon()


def frame_bytes(pipeline: Pipeline, new: NewPart) -> int:
    """Exact frame size where the chain's is known beforehand, else its bound."""
    fixed = pipeline.fixed_bytes(new.group, new.tokens)
    return fixed if fixed is not None else pipeline.max_bytes(new.group, new.tokens)


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
