"""Standing leases: a prefix in a memory tier, verified there, for as long as somebody wants it.

For callers that promise KV to others before they load it: a scheduler that may offer only what
cannot be lost any more until it is asked for.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from tierkv.decisions.types import EvictReason
from tierkv.errors import BackendError, CapacityError, ClosedError, CodecError, ConfigError
from tierkv.fitting import ForeignFrame
from tierkv.mover.find import find
from tierkv.mover.lease import Lease
from tierkv.pipeline import open_frame, verify
from tierkv.prefetch.hearing import prefix_query

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import Found, FoundPart, Query
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.prefetch.hearing import Prefetcher

__all__ = ["Hold", "Holder"]

_WINDOW_BYTES: Final = 16 * 1024 * 1024  # verified in one go: other work gets a thread in between
_WINDOW_PARTS: Final = 128
_ROUNDS: Final = 8  # lookups that damage may cost; then nothing is held


class Hold:
    """Leading blocks of a prefix that are in a memory tier, were verified there, and stay.

    They stay until :meth:`release`, or until the engine is closed: nothing evicts, demotes or
    replaces their bytes. Owners may still have them forgotten (``session.destroy``, ``reset``),
    after which no lookup finds them any more; :meth:`Engine.watch` tells.

    Attributes:
        blocks: How many leading blocks.
        parts: The parts that a load of them reads, in order of blocks.
    """

    def __init__(self, holder: Holder, found: Found, lease: Lease | None) -> None:
        self.blocks = found.blocks if lease is not None else 0
        self.parts: tuple[PartId, ...] = tuple(p.part for p in found.parts) if lease else ()
        self._holder = holder
        self._lease = lease

    def __repr__(self) -> str:
        return f"<Hold: {self.blocks} blocks, {'held' if self._lease else 'released'}>"

    @property
    def held(self) -> bool:
        """Whether anything is still kept."""
        return self._lease is not None

    def release(self) -> None:
        """Let go: the blocks may be evicted again. Idempotent; on the engine's loop, no await."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._holder.forget(self)
            lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Holder:
    """Makes the holds of one engine, and ends them with it."""

    def __init__(self, core: Core, prefetcher: Prefetcher) -> None:
        self._core = core
        self._prefetcher = prefetcher
        self._holds: set[Hold] = set()
        self._memory = sum(1 << x.index for x in core.levels if x.memory is not None)
        self._others = sum(1 << x.index for x in core.levels if x.resident is None)

    def __repr__(self) -> str:
        return f"<Holder: {len(self._holds)} holds>"

    def forget(self, hold: Hold) -> None:
        """A hold was released."""
        self._holds.discard(hold)

    def close(self) -> None:
        """Release all holds. Idempotent."""
        for hold in list(self._holds):
            hold.release()

    async def hold(
        self,
        space: Space,
        root: BlockKey,
        keys: Sequence[BlockKey],
        *,
        lossy: bool,
        until: float | None,
    ) -> Hold:
        """Bring, verify and keep leading blocks of a prefix; see :meth:`Engine.hold`."""
        core = self._core
        if core.closed:
            raise ClosedError("the engine is closed")
        if not self._memory:
            raise ConfigError("blocks are held in memory: this engine needs a tier of kind 'host'")
        query = prefix_query(space, keys, lossy=lossy, touch=True)
        found = await find(core, replace(query, tiers=self._others))
        lease = Lease(core, found.lease)
        try:
            # leased all the while: what has come must not go before the rest is there
            if any(not self._memory >> part.tier & 1 for part in found.parts):
                await self._bring(space, root, query, until)
            return await self._keep(space, root, replace(query, touch=False), until)
        finally:
            lease.release()

    async def _bring(self, space: Space, root: BlockKey, query: Query, until: float | None) -> None:
        """Have what is in slower tiers read into memory, as far as there is room and time."""
        core = self._core
        query = replace(query, touch=False, tiers=self._others)
        job = self._prefetcher.start(space, root, query, memory=True)
        within = None if until is None else max(until - core.clock(), 0.0)
        if await job.ended.wait(within):
            with suppress(BackendError, CapacityError):  # logged where it happened: less is held
                await job.wait()

    async def _keep(self, space: Space, root: BlockKey, query: Query, until: float | None) -> Hold:
        """Lease what is in memory, and verify it; what is damaged shortens the prefix."""
        core = self._core
        fine: set[tuple[PartId, int]] = set()
        for _ in range(_ROUNDS):
            found = await find(core, replace(query, tiers=self._memory))
            lease: Lease | None = Lease(core, found.lease)
            try:
                left = [p for p in found.parts if (p.part, p.generation) not in fine]
                for window in _windows(left):
                    if until is not None and core.clock() >= until:
                        break
                    fine.update(await self._verify(window, space, root))
                if core.closed:
                    raise ClosedError("the engine was closed meanwhile")
                rest = [p.block for p in left if (p.part, p.generation) not in fine]
                if not rest:
                    hold = Hold(self, found, lease if found.blocks else None)
                    if hold.held:
                        self._holds.add(hold)
                        lease = None
                    return hold
            finally:
                if lease is not None:
                    lease.release()
            end = min(rest)  # blocks before it are fine, or of no use to a shorter prefix
            query = replace(query, keys=query.keys[:end], tokens=end * query.block_tokens)
        return Hold(self, found, None)

    async def _verify(
        self, window: Sequence[FoundPart], space: Space, root: BlockKey
    ) -> list[tuple[PartId, int]]:
        """Check frames in memory, in a worker thread, which the leases outlast.

        Returns:
            Part and generation of those that are right; damaged ones are dropped.
        """
        core = self._core
        frames: list[tuple[FoundPart, memoryview]] = []
        for found in window:
            memory = core.levels[found.tier].memory
            buffer = None if memory is None else memory.borrow(found.part, found.generation)
            if buffer is None:
                core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
            else:
                frames.append((found, buffer.memory))
        bad = await core.workers.run(_refused, frames, space, root)
        for found, damaged in bad:
            if damaged:
                core.damaged(found.part, found.tier, found.generation, "checksum")
        wrong = {found.part for found, _ in bad}
        return [(f.part, f.generation) for f, _ in frames if f.part not in wrong]


def _refused(
    frames: Sequence[tuple[FoundPart, memoryview]], space: Space, root: BlockKey
) -> list[tuple[FoundPart, bool]]:
    """Parts that are not held, and whether that is for damage; else they are not the asker's."""
    bad = []
    for found, frame in frames:
        try:
            header = open_frame(frame, space, found.part, found.generation, root)
            verify(header, frame)
        except ForeignFrame:
            bad.append((found, False))
        except CodecError:
            bad.append((found, True))
    return bad


def _windows(parts: Sequence[FoundPart]) -> Iterator[list[FoundPart]]:
    window: list[FoundPart] = []
    size = 0
    for found in parts:
        if window and (size + found.nbytes > _WINDOW_BYTES or len(window) == _WINDOW_PARTS):
            yield window
            window, size = [], 0
        window.append(found)
        size += found.nbytes
    if window:
        yield window
