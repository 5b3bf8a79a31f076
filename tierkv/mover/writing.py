"""One reserved chain on its way into one tier: allocate, fill, place.

What is common to every tier. Frames in host memory: :mod:`tierkv.mover.frames`; in a device's:
:mod:`tierkv.mover.gathering`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from tierkv.abc import StoredPart
from tierkv.decisions.types import SkipReason
from tierkv.mover.holding import Holding
from tierkv.mover.steps import never

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from tierkv.abc import Buffer, Device, Event, Move
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.frames import HostWriting
    from tierkv.mover.levels import Level
    from tierkv.pipeline import PartLabel
    from tierkv.workers import Signal

    _B = TypeVar("_B")

__all__ = ["Writing", "write_and_publish"]

_EVICT_ROUNDS = 3


class Writing(Holding):
    """One reserved chain on its way into one tier: how its frames are filled and placed."""

    @property
    @abstractmethod
    def device(self) -> Device | None:
        """Whose copies fill the frames (see :meth:`moves`); None: host memory is read directly."""

    # ------------------------------------------------------------------ filling

    @abstractmethod
    def to_stage(self) -> list[tuple[int, int]]:
        """Staging memory that it needs: numbers of the parts, and bytes; in order."""

    @abstractmethod
    def take(self, index: int, buffer: Buffer) -> None:
        """Own a piece of the staging memory asked for from here on."""

    @abstractmethod
    def allocate(self) -> None:
        """Get memory in the tier itself; parts without memory are skipped, tail first."""

    @abstractmethod
    def moves(self, layer: int | None = None) -> list[Move]:
        """What a device has to copy (of ``layer``).

        Raises:
            LayoutError: if the view does not fit the space.
        """

    def submitted(self, device: Device) -> None:
        """Submit what comes right behind the copies, on the stream for stores."""
        del device

    @abstractmethod
    def fill(self, stopped: Callable[[], bool] = never) -> None:
        """Build the frames: in a worker thread, or here; after the copies, where there are any.

        Args:
            stopped: Asked between frames; once it is true, the rest is left: nobody waits for it.
        """

    def last_moves(self) -> list[Move]:
        """What a device has to copy once the frames are built."""
        return []

    def protect(self, event: Event) -> None:
        """Say that work before ``event`` touches the frames' memory."""
        del event

    def label(self, index: int) -> PartLabel:
        """What the frame of a part says of itself."""
        generation = self._reservation.outcomes[index].generation
        return self.plan.label(self._batch[index], generation, self._expires)

    def sealed(self, index: int, nbytes: int, *, lossless: bool) -> None:
        """Note that a frame is complete."""
        new, plan = self._batch[index], self.plan
        self._sealed[index] = StoredPart(
            part=new.part,
            generation=self._reservation.outcomes[index].generation,
            parent=new.parent_key,
            root=plan.root,
            nbytes=nbytes,
            tenant=plan.tenant,
            exact=plan.fidelity == "exact",
            lossless=lossless,
            expires=self._expires,
        )

    def roomy(self, allocate: Callable[[int], _B | None], size: int) -> _B | None:
        """Allocate in the tier; evict a little more if its memory is fragmented."""
        core, level = self.core, self.level
        buffer = allocate(size)
        for _ in range(_EVICT_ROUNDS):
            if buffer is not None:
                return buffer
            tier, decisions = level.index, core.decisions
            free = decisions.capacity(tier) - decisions.used(tier) - decisions.reserved(tier)
            drops, demotes = decisions.make_room(
                tier, free + level.backend.charge(size), tenant=self.plan.tenant, now=core.clock()
            )
            core.free(drops)
            core.decisions.cancel_demote(demotes, core.clock())
            if not drops:
                return None
            buffer = allocate(size)
        return buffer

    @abstractmethod
    def place(self, index: int, stored: StoredPart) -> SkipReason | None:
        """Give a complete frame to the tier; None, or FULL or IN_FLIGHT if it does not take it."""

    def publish(self) -> None:
        """Make the batch visible in a tier that is written in place. Atomic: no await."""
        if self._chain_is_broken():
            return
        placed, refused = [], []
        for index in self.open:
            reason = self.place(index, self._sealed[index])
            if reason is None:
                placed.append(index)
            elif reason is SkipReason.FULL:
                self.give_up_from(index, reason)
                break
            else:
                refused.append(index)
        self._publish(placed)
        self._give_up(refused, SkipReason.IN_FLIGHT)


async def write_and_publish(
    core: Core,
    behind: WriteBehind,
    level: Level,
    works: Sequence[HostWriting],
    before: Signal | None,
) -> None:
    """Write several chains to a medium in one call and make them visible. Engine-owned.

    Args:
        core: What movements need.
        behind: Takes the copies onwards.
        level: The tier.
        works: The chains.
        before: Set once the batch before this one is settled: parents first.
    """
    try:
        chains = [(work, work.items()) for work in works]
        items = [item for _, mine in chains for _, item in mine]
        try:
            results = iter(await core.write(level, items) if items else [])
        except BaseException:  # cut short: some may be there nevertheless
            for work, mine in chains:
                work.forget(index for index, _ in mine)
            raise
        if before is not None:
            await before.wait()
        for work, mine in chains:
            work.settle([(index, next(results)) for index, _ in mine])
            behind.copy_onwards(level, work.plan.space, work.published)
    finally:
        for work in works:
            work.abandon()
