"""Prefetch: bring a known prefix into the fastest tier before it is asked for.

A prefetch evicts nothing hotter than what it brings, counts as no use, and belongs to the engine:
nobody has to wait for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.mover.fetch import Wanted
from tierkv.mover.find import find
from tierkv.mover.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import FoundPart, Query
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.workers import Job

__all__ = ["Prefetcher"]


_AT_ONCE = 4
_IN_LINE = 256


class Prefetcher:
    """Starts prefetches as engine-owned jobs.

    A few run at a time, each with its share of one window of bytes under way; the others wait in
    line, and beyond the line a prefetch does nothing. Bytes land in the fast tier itself, never in
    staging memory.
    """

    def __init__(self, core: Core, fetcher: Fetcher) -> None:
        self._core = core
        self._fetcher = fetcher
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._share = max(core.window_bytes // _AT_ONCE, 1)
        self.open = 0

    def __repr__(self) -> str:
        return f"<Prefetcher: {self.open} running or waiting>"

    def start(self, space: Space, root: BlockKey, query: Query) -> Job[int]:
        """Bring the parts of a prefix into the fastest tier; the job's result counts them.

        Raises:
            ClosedError: if the engine is closed.
        """
        job = self._core.workers.spawn(self._run, space, root, query, name="prefetch")
        self.open += 1
        return job

    async def _run(self, space: Space, root: BlockKey, query: Query) -> int:
        core = self._core
        start = core.clock()
        try:
            if core.levels[0].memory is None or self.open > _IN_LINE:
                return 0  # there is no faster place to bring it to, or too much to bring already
            core.spaces.setdefault(space.fingerprint, space)
            async with self._slots:
                moved = await self._bring(space, root, query)
        finally:
            self.open -= 1
        name = core.levels[0].name
        core.observer.operation(op="prefetch", tier=name, seconds=core.clock() - start)
        return moved

    async def _bring(self, space: Space, root: BlockKey, query: Query) -> int:
        core = self._core
        found = await find(core, query)
        lease = Lease(core, found.lease)
        moved = 0
        try:
            cold = [p for p in found.parts if core.levels[p.tier].memory is None]
            for window in _windows(cold, self._share):
                wanted = [_wanted(p, space, root, query.keys) for p in window]
                flights = self._fetcher.join(wanted, demand=False)
                try:
                    for flight in flights:
                        await flight.landed.wait()
                        moved += flight.header is not None
                finally:
                    for flight in flights:
                        flight.leave()
        finally:
            lease.release()
        return moved


def _wanted(found: FoundPart, space: Space, root: BlockKey, keys: Sequence[BlockKey]) -> Wanted:
    parent = part_id(keys[found.block - 1], found.group) if found.block else None
    return Wanted(found, space, root, parent)


def _windows(parts: Sequence[FoundPart], limit: int) -> Iterator[list[FoundPart]]:
    window: list[FoundPart] = []
    size = 0
    for found in parts:
        if window and size + found.nbytes > limit:
            yield window
            window, size = [], 0
        window.append(found)
        size += found.nbytes
    if window:
        yield window
