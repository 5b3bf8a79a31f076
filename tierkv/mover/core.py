"""What every movement needs: the decisions, the tiers in order, memory, threads and a clock."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.abc import IoResult, IoStatus, MemoryBackend, StoredPart
from tierkv.chains import stored_chain
from tierkv.decisions.types import EvictReason
from tierkv.errors import IntegrityError
from tierkv.frame import decode_header
from tierkv.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.abc import Backend, Observer, ReadRequest, WriteItem
    from tierkv.blocks import PartId
    from tierkv.buffers import Staging
    from tierkv.decisions.core import Decisions
    from tierkv.decisions.types import Drop, Reservation, StoreItem
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.workers import Signal, Workers

__all__ = ["INLINE_BYTES", "SLICE_BYTES", "Core", "Level", "derivation", "stored_part"]

_log = logging.getLogger("tierkv.mover")

INLINE_BYTES = 512 * 1024
"""A batch of RAM copies below this runs on the loop: a thread hop would cost more."""

SLICE_BYTES = 32 * 1024 * 1024
"""Most bytes copied in one worker call: what a cancelled caller may have to wait for."""


@dataclass(slots=True)
class Level:
    """One tier of a running engine."""

    index: int
    backend: Backend
    chain: str
    write_through: bool = True
    doomed: list[tuple[PartId, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self.backend.name

    @property
    def memory(self) -> MemoryBackend | None:
        """The backend, if the engine can address its bytes."""
        return self.backend if isinstance(self.backend, MemoryBackend) else None


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
        lossless=is_lossless(header),
        expires=header.expires,
    )


def is_lossless(header: Header) -> bool:
    """Whether no section of this frame went through a lossy codec."""
    return all(stored_chain(name).lossless for name in {s.chain for s in header.sections})


def derivation(header: Header) -> str:
    """How KV loaded from this frame differs from exact KV; empty if it does not."""
    if header.fidelity != "exact":
        return header.fidelity.removeprefix("derived:")
    return "" if is_lossless(header) else "lossy-codec"


class Core:
    """Decisions joined to backends: frees what was dropped, times and counts every batch."""

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
    ) -> None:
        self.decisions = decisions
        self.levels = tuple(levels)
        self.workers = workers
        self.staging = staging
        self.observer = observer
        self.clock = clock
        self.wall = wall
        self.verify_host = verify_host
        self.window_bytes = max(min(staging.limit // 4, 2 * SLICE_BYTES), 1)
        self.closed = False
        self.bytes_copied = 0
        self.spaces: dict[bytes, Space] = {}
        self.storing: dict[PartId, Signal] = {}
        self.peaks = [0] * len(self.levels)
        self._pipelines: dict[tuple[bytes, str], Pipeline] = {}

    def pipeline(self, space: Space, level: Level) -> Pipeline:
        """The codec chain of a tier, bound to a space."""
        key = (space.fingerprint, level.chain)
        found = self._pipelines.get(key)
        if found is None:
            found = self._pipelines[key] = Pipeline(space, level.chain)
        return found

    def chain_of(self, level: Level, part: PartId, generation: int) -> str | None:
        """Codec chain of a copy in a memory tier, as its own frame says; None if not there."""
        buffer = level.memory.borrow(part, generation) if level.memory is not None else None
        if buffer is None:
            return None
        try:
            header = decode_header(buffer.memory)
        except IntegrityError:
            return None
        return ",".join(sorted({section.chain for section in header.sections}))

    async def flush(self, level: Level) -> None:
        """Make every completed write to a tier durable. Engine-owned callers only."""
        await self.purge(level)
        await level.backend.flush()

    # ------------------------------------------------------------------ freeing

    def free(self, drops: Iterable[Drop]) -> None:
        """Free the bytes of copies that the decisions forgot.

        Memory is freed at once; a copy on another medium is deleted before the next write there.
        """
        for drop in drops:
            level = self.levels[drop.tier]
            self.observer.evicted(tier=level.name, reason=drop.reason.value, nbytes=drop.nbytes)
            if level.memory is not None:
                level.memory.discard(drop.part, drop.generation)
            else:
                level.doomed.append((drop.part, drop.generation))

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
        )
        self.free(reservation.drops)
        self.peaks[level.index] = max(self.peaks[level.index], self.decisions.used(level.index))
        return reservation

    async def purge(self, level: Level) -> None:
        """Delete what :meth:`free` left to delete in this tier. Engine-owned callers only."""
        if level.doomed:
            doomed, level.doomed = level.doomed, []
            start = self.clock()
            await level.backend.delete(doomed)
            self.observer.io(
                tier=level.name,
                direction="delete",
                nbytes=0,
                operations=len(doomed),
                seconds=self.clock() - start,
                failed=0,
            )

    def damaged(self, part: PartId, tier: int, generation: int, kind: str) -> None:
        """Forget a copy whose bytes are wrong."""
        self.observer.corrupted(tier=self.levels[tier].name, kind=kind)
        self.lost(part, tier, generation, EvictReason.DAMAGED)

    def lost(self, part: PartId, tier: int, generation: int, reason: EvictReason) -> None:
        """Forget a copy that cannot be read."""
        self.free(self.decisions.invalidate(part, tier, generation, reason, self.clock()))

    # ------------------------------------------------------------------ batches

    async def read(
        self, level: Level, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """One backend read, timed; whatever the backend raises becomes a result."""
        start = self.clock()
        try:
            results = await level.backend.read(requests, into)
        except Exception as error:  # noqa: BLE001 - a third-party backend may raise anything
            _log.warning("tier %s: a read of %d ranges failed", level.name, len(requests))
            results = [IoResult(IoStatus.ERROR, error)] * len(requests)
        done = sum(q.length for q, r in zip(requests, results, strict=True) if _ok(r))
        self._observe(level, "read", done, len(requests), start, results)
        return results

    async def write(self, level: Level, items: Sequence[WriteItem]) -> list[IoResult]:
        """One backend write, timed; whatever the backend raises becomes a result."""
        start = self.clock()
        try:
            await self.purge(level)
            results = await level.backend.write(items)
        except Exception as error:  # noqa: BLE001 - a third-party backend may raise anything
            _log.warning("tier %s: a write of %d frames failed", level.name, len(items))
            results = [IoResult(IoStatus.ERROR, error)] * len(items)
        done = sum(i.stored.nbytes for i, r in zip(items, results, strict=True) if _ok(r))
        self._observe(level, "write", done, len(items), start, results)
        return results

    def _observe(
        self,
        level: Level,
        direction: str,
        nbytes: int,
        operations: int,
        start: float,
        results: Sequence[IoResult],
    ) -> None:
        self.observer.io(
            tier=level.name,
            direction=direction,
            nbytes=nbytes,
            operations=operations,
            seconds=self.clock() - start,
            failed=sum(not _ok(r) for r in results),
        )


def _ok(result: IoResult) -> bool:
    return result.status is IoStatus.OK
