"""An engine with faults in its tiers, and what must hold when it is at rest."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tierkv
from tests import kit
from tierkv.decisions.types import EvictReason
from tierkv.registry import resolve
from tierkv.testing.faults import Fault, Faulty, inject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from tierkv.layout import Space
    from tierkv.session import Session

COMBINATIONS = (
    "host",
    "nvme",
    "file",
    "device",
    "host+nvme",
    "device+nvme",
    "device+file",
    "device+host+nvme",
)


def is_durable(kinds: str) -> bool:
    """Whether one of these tiers survives a restart."""
    return "nvme" in kinds or "file" in kinds


@dataclass
class Rig:
    """An open engine and the backends behind its tiers."""

    engine: tierkv.Engine
    backends: dict[str, Faulty]

    def calls(self, tier: str, operation: str) -> int:
        """Backend calls of one kind so far."""
        return sum(name == operation for name, _ in self.backends[tier].calls)

    async def settle(self) -> None:
        """Wait until nothing is under way any more."""
        async with asyncio.timeout(60):
            calm = 0
            while calm < 2:  # what has just ended may have more to say in the next round
                await asyncio.sleep(0 if calm else 0.001)
                calm = 0 if self._busy() else calm + 1

    def _busy(self) -> bool:
        runtime = self.engine.runtime
        return bool(
            runtime.fetcher.in_flight
            or runtime.behind.pending
            or runtime.prefetcher.open
            or runtime.core.storing
            or runtime.core.staging.used
            or any(level.probing for level in runtime.core.levels)
        )

    async def shrunk(self) -> None:
        """Wait until tiers that were made smaller hold no more than they may: ticks see to it."""
        async with asyncio.timeout(30):
            while any(
                stats.live_bytes > stats.capacity_bytes
                for stats in (level.backend.stats() for level in self.engine.core.levels)
            ):
                await asyncio.sleep(0.005)
                await self.settle()

    async def _purged(self) -> None:
        """Wait until nothing is under way and what was forgotten is deleted, both at once."""
        async with asyncio.timeout(60):
            while True:
                await self.shrunk()
                await self.settle()
                left = [x for x in self.engine.core.levels if x.doomed or x.purging is not None]
                if not left:
                    return
                for level in left:
                    await self.engine.workers.spawn(self.engine.core.purge, level).wait()

    async def at_rest(self) -> None:
        """Nothing is leaked, and all books agree."""
        await self._purged()
        # no await from here on: any tick may begin something new
        core, decisions = self.engine.core, self.engine.core.decisions
        decisions.check()
        assert decisions.leases() == 0
        assert core.staging.used == 0
        assert core.staging.waiting == 0
        assert core.storing == {}
        for level in core.levels:
            reserved = decisions.reserved(level.index)
            assert reserved == 0, f"{level}: {reserved} bytes are reserved"
            stats = level.backend.stats()
            mine, theirs = decisions.entries(level.index), stats.entries
            assert mine == theirs, f"{level}: {mine} entries, the backend has {theirs}"
            assert stats.live_bytes == decisions.used(level.index)
            # the peak may be from a time before a shrink
            most = max(stats.capacity_bytes, self.engine._usable[level.index])
            assert stats.live_bytes <= core.peaks[level.index] <= most
            assert stats.live_bytes <= stats.capacity_bytes

    def cool(self) -> None:
        """Drop from the first tier whatever the second one holds too."""
        core = self.engine.core
        if len(core.levels) == 1:
            return
        slower = {part for part, _, _ in core.decisions.parts(1)}
        left = [(p, g) for p, g, _ in core.decisions.parts(0) if p in slower]
        while left:  # leaves first
            drops = core.decisions.dropped(left, 0, EvictReason.CAPACITY, core.clock())
            core.free(drops)
            gone = {drop.part for drop in drops}
            assert gone
            left = [(p, g) for p, g in left if p not in gone]


def wrap(
    tiers: Sequence[tierkv.Tier], faults: Mapping[str, Sequence[Fault]] | None = None
) -> dict[str, Faulty]:
    """Backends for these tiers, each behind the faults given for its name."""
    faults = faults or {}
    return {
        tier.name: inject(resolve("backends", tier.kind)(tier), *faults.get(tier.name, ()))
        for tier in tiers
    }


@asynccontextmanager
async def running(
    kinds: str,
    path: Path,
    *,
    space: Space,
    capacity: int | str = "4MiB",
    faults: Mapping[str, Sequence[Fault]] | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """An open engine on these kinds of tiers; ``options`` are those of each tier."""
    tiers = kit.tiers(kinds, path, capacity, **(options or {}))
    backends = wrap(tiers, faults)
    async with tierkv.open(
        tiers=tiers, space=space, backends=list(backends.values()), **settings
    ) as engine:
        yield Rig(engine, backends)


async def load(session: Session, ids: list[int], **options: Any) -> tuple[int, kit.Memory]:
    """Match and load a prompt: tokens in place, and the memory they are in."""
    back = kit.Memory(session.space.layout, len(ids))
    async with session.match(ids) as match:
        result = await match.load(into=back.view, **options)
    return result.tokens, back


async def usable(rig: Rig, space: Space, seed: int = 99) -> None:
    """A fresh conversation can still be stored and loaded."""
    ids = kit.tokens(2, seed=seed)
    kv = kit.Memory(space.layout, 32, seed=seed)
    async with rig.engine.session(f"fresh-{seed}") as session:
        await session.store(ids, kv.view)
        tokens, back = await load(session, ids)
        assert tokens == 32
        assert back.same(kv, 32)
        session.destroy()
