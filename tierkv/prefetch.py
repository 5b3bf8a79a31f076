"""Prefetch: bring a known prefix into the fastest tier before it is asked for.

A prefetch evicts nothing hotter than what it brings, counts as no use, and belongs to the engine:
nobody has to wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.mover.fetch import Wanted
from tierkv.mover.find import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import FoundPart, Query
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.workers import Job

__all__ = ["Prefetcher"]


class Prefetcher:
    """Starts prefetches as engine-owned jobs."""

    def __init__(self, core: Core, fetcher: Fetcher) -> None:
        self._core = core
        self._fetcher = fetcher

    def start(self, space: Space, root: BlockKey, query: Query) -> Job[int]:
        """Bring the parts of a prefix into the fastest tier; the job's result counts them.

        Raises:
            ClosedError: if the engine is closed.
        """
        return self._core.workers.spawn(self._run, space, root, query, name="prefetch")

    async def _run(self, space: Space, root: BlockKey, query: Query) -> int:
        core = self._core
        if core.levels[0].memory is None:
            return 0  # there is no faster place to bring it to
        found = await find(core, query)
        moved = 0
        try:
            cold = [p for p in found.parts if core.levels[p.tier].memory is None]
            for window in _windows(cold, core.window_bytes):
                wanted = [_wanted(p, space, root, query.keys) for p in window]
                flights = self._fetcher.join(wanted)
                try:
                    for flight in flights:
                        await flight.landed.wait()
                        moved += flight.header is not None
                finally:
                    for flight in flights:
                        flight.leave()
        finally:
            core.free(core.decisions.release(found.lease, core.clock()))
        return moved


def _wanted(found: FoundPart, space: Space, root: BlockKey, keys: Sequence[BlockKey]) -> Wanted:
    parent = part_id(keys[found.block - 1], found.group) if found.block else None
    return Wanted(found, space, root, parent)


def _windows(parts: Sequence[FoundPart], limit: int) -> list[list[FoundPart]]:
    windows: list[list[FoundPart]] = []
    size = 0
    for found in parts:
        if not windows or size + found.nbytes > limit:
            windows.append([])
            size = 0
        windows[-1].append(found)
        size += found.nbytes
    return windows
