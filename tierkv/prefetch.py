"""Prefetch: bring a known prefix into the fastest tier that takes it, before it is asked for.

A prefetch evicts nothing hotter than what it brings, counts as no use, and belongs to the engine:
nobody has to wait for it. It works in a lane of its own, behind everything that somebody waits for
and behind write-behind.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.mover.copies import Copy
from tierkv.mover.copying import copy_batch
from tierkv.mover.fetch import Wanted
from tierkv.mover.find import find
from tierkv.mover.lease import Lease
from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import FoundPart, Query
    from tierkv.layout import Space
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.workers import Job

__all__ = ["Prefetcher"]


_AT_ONCE = 4
_IN_LINE = 256
_WINDOW_BYTES = 16 * 1024 * 1024  # most that a read which somebody waits for may find in its way
_WINDOW_PARTS = 128  # decided in one go, on the loop


class Prefetcher:
    """Starts prefetches as engine-owned jobs.

    A few run at a time, one batch at a time on each medium; the others wait in line, and beyond
    the line a prefetch does nothing. Bytes land in the fast tier itself or, on their way into a
    device, in staging memory that nobody waits for.
    """

    def __init__(self, core: Core, fetcher: Fetcher, behind: WriteBehind) -> None:
        self._core = core
        self._fetcher = fetcher
        self._turns = behind.turns
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._share = max(min(core.window_bytes, _WINDOW_BYTES) // _AT_ONCE, 1)
        self.open = 0

    def __repr__(self) -> str:
        return f"<Prefetcher: {self.open} running or waiting>"

    def start(self, space: Space, root: BlockKey, query: Query) -> Job[int]:
        """Bring the parts of a prefix into the fastest tier; the job's result counts them.

        Raises:
            ClosedError: if the engine is closed.
        """
        job = self._core.workers.spawn(
            self._run, space, root, query, name="prefetch", lane=Lane.PREFETCH
        )
        self.open += 1
        return job

    async def _run(self, space: Space, root: BlockKey, query: Query) -> int:
        core = self._core
        start = core.clock()
        try:
            if len(core.levels) == 1 or self.open > _IN_LINE:
                return 0  # there is no faster place to bring it to, or too much to bring already
            core.spaces.setdefault(space.fingerprint, space)
            async with self._slots:
                moved = await self._bring(space, root, query)
        finally:
            self.open -= 1
        core.observer.operation(
            op="prefetch", tier=core.levels[0].name, seconds=core.clock() - start
        )
        return moved

    async def _bring(self, space: Space, root: BlockKey, query: Query) -> int:
        core = self._core
        found = await find(core, query)
        lease = Lease(core, found.lease)
        moved = 0
        try:
            cold = [p for p in found.parts if p.tier > 0]
            for window in _windows(cold, self._share):
                left = [_wanted(p, space, root, query.keys) for p in window]
                if core.levels[0].memory is None:
                    left = await self._to_first(left)
                    moved += len(window) - len(left)
                moved += await self._to_memory(left)
        finally:
            lease.release()
        return moved

    async def _to_first(self, window: Sequence[Wanted]) -> list[Wanted]:
        """Copy parts of one tier into the fastest one, and return those that it did not take."""
        copies = [
            Copy(
                part=w.found.part,
                generation=w.found.generation,
                nbytes=self._core.levels[w.found.tier].backend.longest(w.found.nbytes),
                source=w.found.tier,
                target=0,
                space=w.space,
                root=w.root,
                parent=w.parent,
                promotion=True,
            )
            for w in window
        ]
        core, level = self._core, self._core.levels[copies[0].source]
        if not core.usable(level):
            return list(window)
        # a job of its own: where the tier hangs, only this batch and its turn are stuck
        job = core.workers.spawn(
            partial(copy_batch, patient=False), core, copies, self._turns, name="prefetch-copy"
        )
        if await core.landed(level, job.ended):
            await job.wait()
        return [w for w, copy in zip(window, copies, strict=True) if not copy.made]

    async def _to_memory(self, window: Sequence[Wanted]) -> int:
        """Read parts that are on a medium into the memory tier above it; how many arrived."""
        core = self._core
        wanted = [w for w in window if core.levels[w.found.tier].memory is None]
        if not wanted or not any(level.memory for level in core.levels):
            return 0
        tier = wanted[0].found.tier
        if not core.usable(core.levels[tier]):
            return 0  # its turn may be taken by a read that never ends
        moved = 0
        async with self._turns[tier].take(Lane.PREFETCH):
            flights = self._fetcher.join(wanted, demand=False)
            try:
                for flight in flights:
                    if await core.landed(core.levels[tier], flight.landed):
                        moved += flight.header is not None
            finally:
                for flight in flights:
                    flight.leave()
        return moved


def _wanted(found: FoundPart, space: Space, root: BlockKey, keys: Sequence[BlockKey]) -> Wanted:
    parent = part_id(keys[found.block - 1], found.group) if found.block else None
    return Wanted(found, space, root, parent)


def _windows(parts: Sequence[FoundPart], limit: int) -> Iterator[list[FoundPart]]:
    """Consecutive parts of one tier, about ``limit`` bytes of them at a time."""
    window: list[FoundPart] = []
    size = 0
    for found in parts:
        full = size + found.nbytes > limit or len(window) == _WINDOW_PARTS
        if window and (full or found.tier != window[0].tier):
            yield window
            window, size = [], 0
        window.append(found)
        size += found.nbytes
    if window:
        yield window
