"""Reserved room: which parts have it, and how each of them comes to its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import IoStatus
from tierkv.decisions.types import SkipReason
from tierkv.mover.plans import PartOutcome
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv.abc import IoResult, StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import Reservation
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.pipeline import Pipeline

__all__ = ["Holding", "Reserved", "frame_bytes"]


class Reserved(NamedTuple):
    """Room for a batch of one plan in one tier.

    Attributes:
        core: What movements need.
        plan: Whose parts they are.
        level: The tier.
        batch: The parts, in order.
        reservation: What the decisions said of each.
        pipeline: How they are encoded there.
        announced: Whether others that store the same parts wait for this.
    """

    core: Core
    plan: StorePlan
    level: Level
    batch: Sequence[NewPart]
    reservation: Reservation
    pipeline: Pipeline
    announced: bool = True


class Holding(ABC):
    """Parts that have room in a tier, until each of them is published or given up.

    Attributes:
        handed_over: Whether an engine-owned job brings it to its end.
        published: What became visible.
        outcomes: What became of each part, in order.
        previous: The part of the same plan that is on its way before this one.
        broken: Why parts that had room were given up: what follows in the chain is as well.
    """

    def __init__(self, reserved: Reserved) -> None:
        core, plan, level, batch, reservation, pipeline, announced = reserved
        self.core = core
        self.plan = plan
        self.level = level
        self.pipeline = pipeline
        self.handed_over = False
        self.published: list[StoredPart] = []
        self.outcomes = [PartOutcome(False, o.skip, level.index) for o in reservation.outcomes]
        self.previous: Holding | None = None
        self.broken: SkipReason | None = None
        self._batch = batch
        self._reservation = reservation
        self._open = {i for i, o in enumerate(reservation.outcomes) if o.generation}
        self._sealed: dict[int, StoredPart] = {}
        sizes: dict[tuple[int, int], int] = {}
        self._sizes: dict[int, int] = {}
        for index in self._open:
            new = batch[index]
            kind = new.group, new.tokens
            if kind not in sizes:
                sizes[kind] = frame_bytes(pipeline, new)
            self._sizes[index] = sizes[kind]
        self._signals: dict[PartId, Signal] = {}
        self._expires = None if plan.ttl is None else core.wall() + plan.ttl
        if announced:
            self.announce()

    @property
    def open(self) -> list[int]:
        """Numbers of the parts that are neither published nor given up, in order."""
        return sorted(self._open)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames that are still to come."""
        return sum(self._sizes[i] for i in self._open)

    def raw_bytes(self) -> int:
        """Bytes that it takes out of the view."""
        parts = (self._batch[i] for i in self._open)
        return sum(self.pipeline.raw_bytes(new.group, new.tokens) for new in parts)

    def announce(self) -> None:
        """Let others that store the same parts wait for this outcome. Idempotent."""
        for index in self._open:
            part = self._batch[index].part
            if part not in self._signals:
                self._signals[part] = self.core.storing[part] = Signal()

    def in_use(self, index: int) -> bool:
        """Whether somebody reads an older copy, whose memory adopting this one would free."""
        core, level = self.core, self.level
        if not core.decisions.has(self._batch[index].part, level.index):
            return False  # nearly always: what is stored is new
        state = core.decisions.state(self._batch[index].part, core.clock())
        copied = any(tier != level.index for tier in state.pending)
        return level.index in state.tiers and (copied or state.leases > 0)

    def settle(self, results: Sequence[tuple[int, IoResult]]) -> None:
        """Publish what was written; from the first failure on the rest is given up."""
        written = [index for index, result in results if result.status is IoStatus.OK]
        try:
            self._settle(results)
        finally:
            self.forget([i for i in written if not self.outcomes[i].stored])

    def forget(self, indices: Iterable[int]) -> None:
        """Have frames deleted that may be in the tier, and are in no book."""
        resident = self.level.resident
        for part in (self._sealed[index] for index in indices):
            if resident is not None:
                resident.discard(part.part, part.generation)
            else:
                self.level.doomed.append((part.part, part.generation))

    def _settle(self, results: Sequence[tuple[int, IoResult]]) -> None:
        if self._chain_is_broken():
            return
        bad = (n for n, (_, result) in enumerate(results) if result.status is not IoStatus.OK)
        good = next(bad, len(results))
        self._publish([index for index, _ in results[:good]])
        for index, result in results[good : good + 1]:
            full = result.status is IoStatus.FULL
            self.give_up_from(index, SkipReason.FULL if full else SkipReason.FAILED)

    def _chain_is_broken(self) -> bool:
        """Give everything up if what it stands on was given up: it would be out of reach.

        The same if the engine was reset since the store was asked for: it would come back.
        """
        if self.core.resets != self.plan.resets:
            self.refuse(SkipReason.RESET)
            return True
        previous, self.previous = self.previous, None  # or a long store keeps all its batches
        if previous is None or previous.broken is None:
            return False
        self.refuse(previous.broken)
        return True

    def _publish(self, indices: Sequence[int]) -> None:
        """Make parts visible, parents first, in one step."""
        if not indices:
            return
        stored = [self._sealed[index] for index in indices]
        self.core.commit(self.level, self._reservation.id, indices, stored)
        for index in indices:
            self._closed(index)
            self.outcomes[index] = PartOutcome(True, None, self.level.index)
        self.published += stored

    def give_up_from(self, index: int, reason: SkipReason) -> None:
        """Skip this part and everything behind it. Atomic."""
        self.broken = reason
        self._give_up([i for i in self.open if i >= index], reason)

    def keep_first(self, count: int) -> None:
        """Have nothing to do any more with the parts from number ``count`` on. Atomic."""
        self._give_up([i for i in self.open if i >= count], SkipReason.CLOSED)
        self.broken = None
        del self.outcomes[count:]

    def refuse(self, reason: SkipReason) -> None:
        """Skip whatever is still open. Atomic."""
        if self._open:
            self.broken = reason
        self._give_up(self.open, reason)

    def _give_up(self, indices: Sequence[int], reason: SkipReason) -> None:
        for index in indices:
            self._closed(index)
            self.outcomes[index] = PartOutcome(False, reason, self.level.index)
            self.drop(index)
        if indices:
            self.core.rollback(self._reservation.id, list(indices), reason)

    def _closed(self, index: int) -> None:
        self._open.discard(index)
        part = self._batch[index].part
        signal = self._signals.pop(part, None)
        if signal is not None:
            del self.core.storing[part]
            signal.set()

    def leave(self) -> None:
        """Stop waiting for what is not published yet: as far as this store goes, it is skipped."""
        for index in self._open:
            self.outcomes[index] = PartOutcome(False, SkipReason.BACKPRESSURE, self.level.index)

    @abstractmethod
    def drop(self, index: int) -> None:
        """Give the memory of a part back."""

    def abandon(self) -> None:
        """Roll back whatever was not published, as if it had never been. Atomic, idempotent.

        No copy may be under way into its memory, unless :meth:`protect` knows of it.
        """
        self._give_up(self.open, SkipReason.CLOSED)
        for index in self._sizes:
            self.drop(index)


def frame_bytes(pipeline: Pipeline, new: NewPart) -> int:
    """Exact frame size where the chain's is known beforehand, else its bound."""
    fixed = pipeline.fixed_bytes(new.group, new.tokens)
    return fixed if fixed is not None else pipeline.max_bytes(new.group, new.tokens)
