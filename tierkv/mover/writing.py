"""One reserved batch on its way into one tier: allocate, encode, publish, or give all back."""

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

    from tierkv.abc import Buffer
    from tierkv.decisions.types import Reservation
    from tierkv.mover.core import Core, Level
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.pipeline import Pipeline

__all__ = ["Writing", "frame_bytes"]

_EVICT_ROUNDS = 3


class Writing:
    """One reserved batch on its way into one tier."""

    def __init__(
        self,
        core: Core,
        plan: StorePlan,
        level: Level,
        batch: Sequence[NewPart],
        reservation: Reservation,
    ) -> None:
        self.core = core
        self.plan = plan
        self.level = level
        self.batch = batch
        self.reservation = reservation
        self.handed_over = False
        self.published: list[StoredPart] = []
        self.outcomes = [PartOutcome(False, o.skip, level.index) for o in reservation.outcomes]
        self._open = {i for i, o in enumerate(reservation.outcomes) if o.generation}
        self._buffers: dict[int, Buffer] = {}
        self._sealed: dict[int, StoredPart] = {}
        self._staged = False
        pipeline = core.pipeline(plan.space, level)
        self._pipeline = pipeline
        self._sizes = {i: frame_bytes(pipeline, batch[i]) for i in self._open}
        self.nbytes = sum(self._sizes.values())
        for index in self._open:
            core.storing[batch[index].part] = Signal()

    async def allocate(self) -> None:
        """Get memory for each reserved part; parts without memory are skipped, tail first.

        Frames of known size are built in place in a memory tier; others in staging memory.
        """
        order = sorted(self._open)
        in_place = self.level.memory is not None and all(
            self._pipeline.fixed_bytes(self.batch[i].group, self.batch[i].tokens) for i in order
        )
        if not in_place:
            try:
                slices = await stage(self.core.staging, [self._sizes[i] for i in order])
            except CapacityError:
                self._give_up(order, SkipReason.TOO_LARGE)
            else:
                self._buffers.update(zip(order, slices, strict=True))
            self._staged = True
            return
        for index in order:
            buffer = self._allocate_in(self._sizes[index])
            if buffer is None:
                self._give_up([i for i in order if i >= index], SkipReason.FULL)
                break
            self._buffers[index] = buffer
        self.nbytes = sum(self._sizes[i] for i in self._open)

    def _allocate_in(self, size: int) -> Buffer | None:
        """Allocate in the memory tier; evict a little more if slabs are fragmented."""
        memory = self.level.memory
        assert memory is not None
        core = self.core
        buffer = memory.allocate(size)
        for _ in range(_EVICT_ROUNDS):
            if buffer is not None:
                return buffer
            drops, demotes = core.decisions.make_room(
                self.level.index, memory.charge(size), tenant=self.plan.tenant, now=core.clock()
            )
            core.free(drops)
            core.decisions.cancel_demote(demotes, core.clock())
            if not drops:
                return None
            buffer = memory.allocate(size)
        return buffer

    def encode(self) -> None:
        """Gather and encode every part into its buffer. May run in a worker thread."""
        wall = self.core.wall()
        expires = None if self.plan.ttl is None else wall + self.plan.ttl
        for index, buffer in self._buffers.items():
            new = self.batch[index]
            generation = self.reservation.outcomes[index].generation
            label = self.plan.label(new, generation, expires)
            encoded = self._pipeline.encode(label, self.plan.view, new.start, buffer.memory)
            self._sealed[index] = StoredPart(
                part=new.part,
                generation=generation,
                parent=new.parent_key,
                root=self.plan.root,
                nbytes=encoded.nbytes,
                tenant=self.plan.tenant,
                exact=self.plan.fidelity == "exact",
                lossless=encoded.lossless,
                expires=expires,
            )

    def publish_in_memory(self) -> None:
        """Make the batch visible in a memory tier. Atomic: no await."""
        memory = self.level.memory
        assert memory is not None
        for index in sorted(self._open):
            stored = self._sealed[index]
            buffer = self._buffers.pop(index)
            if self._staged:
                slot = self._allocate_in(stored.nbytes)
                if slot is not None:
                    _copy_bytes(buffer.memory[: stored.nbytes], slot.memory)
                buffer.release()
                if slot is None:
                    self._give_up([i for i in self._open if i >= index], SkipReason.FULL)
                    return
                buffer = slot
            if memory.adopt(stored, buffer):
                self._publish(index)
            else:
                buffer.release()
                self._give_up([index], SkipReason.IN_FLIGHT)

    async def write_and_publish(self) -> None:
        """Write the batch to a medium and make it visible. Engine-owned."""
        try:
            order = sorted(self._open)
            items = [WriteItem(self._sealed[i], self._buffers[i]) for i in order]
            results = await self.core.write(self.level, items) if items else []
            for index, result in zip(order, results, strict=True):
                if result.status is IoStatus.OK:
                    self._publish(index)
                else:
                    full = result.status is IoStatus.FULL
                    rest = [i for i in self._open if i >= index]
                    self._give_up(rest, SkipReason.FULL if full else SkipReason.FAILED)
                    break
        finally:
            self.abandon()

    def _publish(self, index: int) -> None:
        stored = self._sealed[index]
        drops = self.core.decisions.commit(
            self.reservation.id,
            [index],
            self.core.clock(),
            charges=[self.level.backend.charge(stored.nbytes)],
            lossless=[stored.lossless],
        )
        self._closed(index)
        self.core.free(drops)
        self.outcomes[index] = PartOutcome(True, None, self.level.index)
        self.published.append(stored)

    def _give_up(self, indices: Sequence[int], reason: SkipReason) -> None:
        for index in indices:
            self._closed(index)
            self.outcomes[index] = PartOutcome(False, reason, self.level.index)
            buffer = self._buffers.pop(index, None)
            if buffer is not None:
                buffer.release()
        self.core.free(
            self.core.decisions.rollback(
                self.reservation.id, list(indices), self.core.clock(), reason=reason
            )
        )

    def _closed(self, index: int) -> None:
        self._open.discard(index)
        signal = self.core.storing.pop(self.batch[index].part, None)
        if signal is not None:
            signal.set()

    def abandon(self) -> None:
        """Roll back whatever was not published. Atomic, idempotent."""
        if self._open:
            self._give_up(sorted(self._open), SkipReason.FAILED)
        for buffer in self._buffers.values():
            buffer.release()
        self._buffers.clear()


def frame_bytes(pipeline: Pipeline, new: NewPart) -> int:
    """Exact frame size where the chain's is known beforehand, else its bound."""
    fixed = pipeline.fixed_bytes(new.group, new.tokens)
    return fixed if fixed is not None else pipeline.max_bytes(new.group, new.tokens)


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
