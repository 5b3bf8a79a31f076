"""What every movement needs: the decisions, the tiers in order, memory, threads and a clock."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from tierkv.abc import IoResult, IoStatus, StoredPart
from tierkv.chains import stored_chain
from tierkv.decisions.types import EvictReason, SkipReason
from tierkv.device import Devices
from tierkv.errors import IntegrityError
from tierkv.frame import decode_header
from tierkv.mover.faults import passes
from tierkv.mover.traffic import Traffic
from tierkv.pipeline import Pipeline
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.abc import Observer
    from tierkv.blocks import PartId
    from tierkv.buffers import Staging
    from tierkv.decisions.coding_rules import Age
    from tierkv.decisions.core import Decisions
    from tierkv.decisions.types import Drop, FoundPart, Reservation, StoreItem
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.levels import Level
    from tierkv.workers import Workers

__all__ = [
    "INLINE_BYTES",
    "SLICE_BYTES",
    "Core",
    "derivation",
    "stored_part",
]

INLINE_BYTES = 512 * 1024
"""A batch of RAM copies below this runs on the loop: a thread hop would cost more."""

SLICE_BYTES = 32 * 1024 * 1024
"""Most bytes that a cancelled caller may have to wait for: of one worker call, or, where only RAM
is copied, of what a call does between two looks at whether its caller was cancelled."""

_AGES = 65536
"""Parts being stored whose age is kept in mind until their session tells the decisions of it."""

_PATIENCE_S = 10.0
"""Seconds without an answer after which a tier is taken to hang, if nothing else is set."""


def stored_part(header: Header) -> StoredPart:
    """What a tier should remember of the frame with this header."""
    return StoredPart(
        part=header.part,
        generation=header.generation,
        parent=header.parent,
        root=header.root,
        nbytes=header.frame_bytes,
        tenant=header.tenant,
        exact=header.fidelity == "exact",
        lossless=_is_lossless(header),
        expires=header.expires,
    )


def _is_lossless(header: Header) -> bool:
    """Whether no section of this frame went through a lossy codec."""
    return all(stored_chain(name).lossless for name in {s.chain for s in header.sections})


def _chains(header: Header) -> str:
    return ",".join(sorted({section.chain for section in header.sections}))


def derivation(header: Header) -> str:
    """How KV loaded from this frame differs from exact KV; empty if it does not."""
    if header.fidelity != "exact":
        return header.fidelity.removeprefix("derived:")
    return "" if _is_lossless(header) else "lossy-codec"


class Core(Traffic):
    """Decisions joined to backends: frees what was dropped, times and counts every batch.

    Attributes:
        bytes_copied: Bytes copied into callers' views by loads.
        bytes_gathered: Bytes copied out of callers' views by stores.
        memories: Tiers, one bit each, whose bytes the engine can address; -1: there is no other.
        on_drop: Told (part, tier) of each copy that leaves a tier, if set.
        ages: What stores under way know of their parts (:meth:`expect`).
    """

    def __init__(
        self,
        *,
        decisions: Decisions,
        levels: Sequence[Level],
        workers: Workers,
        staging: Staging,
        observer: Observer,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        verify_host: bool = True,
        timeout: float = _PATIENCE_S,
    ) -> None:
        super().__init__(
            decisions=decisions, workers=workers, observer=observer, clock=clock, timeout=timeout
        )
        self.levels = tuple(levels)
        self.memories = sum(1 << level.index for level in levels if level.memory is not None)
        if len(self.levels) == 1 and self.memories:
            self.memories = -1
        self.staging = staging
        staging.patience, staging.held_up = timeout, self._any_hangs
        self.wall = wall
        self.verify_host = verify_host
        self.window_bytes = max(min(staging.limit // 4, 2 * SLICE_BYTES), 1)
        self.closing = Signal()
        self.bytes_copied = 0
        self.bytes_gathered = 0
        self.resets = 0
        self.on_drop: Callable[[PartId, int], object] | None = None
        self.devices = Devices()
        self.spaces: dict[bytes, Space] = {}
        self.storing: dict[PartId, Signal] = {}
        self.peaks = [0] * len(self.levels)
        self.ages: OrderedDict[PartId, Age] = OrderedDict()
        plain = all(level.chain == "raw" and level.candidate is None for level in self.levels)
        self._plain = plain and not decisions.compressing
        self._pipelines: dict[tuple[bytes, str], Pipeline] = {}

    @property
    def closed(self) -> bool:
        """Whether the engine is closed, or being closed."""
        return self.closing.is_set()

    def _any_hangs(self) -> bool:
        return any(level.stalled.is_set() for level in self.levels)

    def pipeline(self, space: Space, level: Level) -> Pipeline:
        """The codec chain of a tier, bound to a space."""
        return self.pipeline_of(space, level.chain)

    def pipeline_of(self, space: Space, chain: str) -> Pipeline:
        """A codec chain, bound to a space."""
        key = (space.fingerprint, chain)
        found = self._pipelines.get(key)
        if found is None:
            found = self._pipelines[key] = Pipeline(space, chain)
        return found

    def expect(self, part: PartId, age: Age) -> None:
        """Keep in mind how old a part is that is about to be stored, for copies made of it."""
        self.ages[part] = age
        if len(self.ages) > _AGES:
            self.ages.popitem(last=False)

    def chain_of(self, level: Level, part: PartId, generation: int) -> str | None:
        """Codec chain of a copy in a memory tier, as its own frame says; None if not there."""
        if level.resident is not None and not self._plain:
            found = level.resident.borrow(part, generation)
            return None if found is None else _chains(found.header)
        buffer = level.memory.borrow(part, generation) if level.memory is not None else None
        if buffer is None:
            return None
        if self._plain:
            return "raw"
        try:
            return _chains(decode_header(buffer.memory))
        except IntegrityError:
            return None

    # ------------------------------------------------------------------ freeing

    def free(self, drops: Iterable[Drop]) -> None:
        """Free the bytes of copies that the decisions forgot.

        Memory (the host's or a device's) is freed at once; a copy on another medium is deleted
        before the next write there.
        """
        evicted, told = self.observer.evicted, self.on_drop
        for part, tier, generation, nbytes, reason in drops:
            level = self.levels[tier]
            evicted(tier=level.name, reason=reason.value, nbytes=nbytes)
            if told is not None:
                told(part, tier)
            if level.memory is not None:
                level.memory.discard(part, generation)
            elif level.resident is not None:
                level.resident.discard(part, generation)
            else:
                level.doomed.append((part, generation))

    def reserve(
        self,
        level: Level,
        items: Sequence[StoreItem],
        *,
        tenant: str = "",
        session: str = "",
        session_bytes: int = 0,
        demand: bool = True,
        source: Level | None = None,
        ahead: bool = False,
    ) -> Reservation:
        """Reserve room in a tier and free what had to go for it."""
        reservation = self.decisions.reserve(
            level.index,
            items,
            tenant=tenant,
            now=self.clock(),
            session=session,
            session_bytes=session_bytes,
            demand=demand,
            source=source.index if source is not None else None,
            ahead=ahead,
        )
        self.free(reservation.drops)
        return reservation

    def commit(
        self,
        level: Level,
        reservation: int,
        done: Sequence[int],
        stored: Sequence[StoredPart] | None = None,
    ) -> tuple[Drop, ...]:
        """Make written items visible and free what they replace.

        Args:
            level: Where they were written.
            reservation: Their reservation.
            done: Their numbers in it.
            stored: What was really written; None takes what was reserved.
        """
        charges = lossless = None
        if stored is not None:
            charges = [level.backend.charge(s.nbytes) for s in stored]
            lossless = [s.lossless for s in stored]
        drops = self.decisions.commit(
            reservation, done, self.clock(), charges=charges, lossless=lossless
        )
        self.free(drops)
        tier = level.index
        self.peaks[tier] = max(self.peaks[tier], self.decisions.used(tier))
        return drops

    def rollback(self, reservation: int, items: Sequence[int], reason: SkipReason) -> None:
        """Give reserved room back; FAILED is remembered as the reason of later misses."""
        self.free(self.decisions.rollback(reservation, items, self.clock(), reason=reason))

    def damaged(self, part: PartId, tier: int, generation: int, kind: str) -> None:
        """Forget a copy whose bytes are wrong."""
        self.observer.corrupted(tier=self.levels[tier].name, kind=kind)
        self.lost(part, tier, generation, EvictReason.DAMAGED)

    def lost(self, part: PartId, tier: int, generation: int, reason: EvictReason) -> None:
        """Forget a copy that cannot be read."""
        self.free(self.decisions.invalidate(part, tier, generation, reason, self.clock()))

    def unreadable(self, found: FoundPart, result: IoResult) -> EvictReason:
        """Draw the consequences of a read that did not succeed; why the part is not there.

        A copy is given up for good, unless the medium says that it may come back, or the engine
        itself is closing.
        """
        if result.status is IoStatus.SHORT:
            self.damaged(found.part, found.tier, found.generation, "short")
            return EvictReason.DAMAGED
        shared = self.levels[found.tier].backend.shared
        if not passes(result.error, shared=shared) and not self.closed:
            self.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
        return EvictReason.FAILED
