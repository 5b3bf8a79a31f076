"""Prefetch: bring a known prefix into the fastest tier before it is asked for.

A prefetch evicts nothing hotter than what it brings, counts as no use, and belongs to the engine:
nobody has to wait for it.
"""

from __future__ import annotations

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
    from tierkv.mover.fetch import Fetcher, Flight
    from tierkv.workers import Job

__all__ = ["Prefetcher"]


class Prefetcher:
    """Starts prefetches as engine-owned jobs.

    All of them together have one window of bytes under way; what does not fit into it when its
    turn comes is not prefetched. Bytes land in the fast tier itself, never in staging memory.
    """

    def __init__(self, core: Core, fetcher: Fetcher) -> None:
        self._core = core
        self._fetcher = fetcher
        self.budget = core.window_bytes

    def __repr__(self) -> str:
        return f"<Prefetcher: {self.budget} bytes left to have under way>"

    def start(self, space: Space, root: BlockKey, query: Query) -> Job[int]:
        """Bring the parts of a prefix into the fastest tier; the job's result counts them.

        Raises:
            ClosedError: if the engine is closed.
        """
        return self._core.workers.spawn(self._run, space, root, query, name="prefetch")

    async def _run(self, space: Space, root: BlockKey, query: Query) -> int:
        core = self._core
        start = core.clock()
        if core.levels[0].memory is None:
            return 0  # there is no faster place to bring it to
        core.spaces.setdefault(space.fingerprint, space)
        found = await find(core, query)
        lease = Lease(core, found.lease)
        moved = 0
        try:
            cold = [p for p in found.parts if core.levels[p.tier].memory is None]
            for window in _windows(cold, self.budget):
                size = sum(part.nbytes for part in window)
                if size > self.budget:
                    break
                wanted = [_wanted(p, space, root, query.keys) for p in window]
                self.budget -= size
                flights: list[Flight] = []
                try:
                    flights = self._fetcher.join(wanted, demand=False)
                    for flight in flights:
                        await flight.landed.wait()
                        moved += flight.header is not None
                finally:
                    self.budget += size
                    for flight in flights:
                        flight.leave()
        finally:
            lease.release()
        name = core.levels[0].name
        core.observer.operation(op="prefetch", tier=name, seconds=core.clock() - start)
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
