"""The bytes of a prefetch: windows of cold parts, moved in the lane behind everybody else."""

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
    from tierkv.decisions.prefetching import Plan, Prefetching
    from tierkv.decisions.types import FoundPart, Query
    from tierkv.layout import Space
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.workers import Job

__all__ = ["IN_LINE", "Carrier"]

IN_LINE = 256
"""Most prefetches that run or wait."""

_AT_ONCE = 4
_WINDOW_BYTES = 16 * 1024 * 1024  # most that a read which somebody waits for may find in its way
_WINDOW_PARTS = 128  # decided in one go, on the loop


class Carrier:
    """Carries prefetches out as engine-owned jobs.

    A few run at a time, one batch at a time on each medium; the others wait in line, and beyond
    the line a prefetch does nothing. Bytes land in the fast tier itself or, on their way into a
    device, in staging memory that nobody waits for.

    Attributes:
        books: What was granted, and what it came to.
        open: Prefetches that run or wait.
    """

    def __init__(
        self, core: Core, fetcher: Fetcher, behind: WriteBehind, books: Prefetching
    ) -> None:
        self.books = books
        self.open = 0
        self._core = core
        self._fetcher = fetcher
        self._turns = behind.turns
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._share = max(min(core.window_bytes, _WINDOW_BYTES) // _AT_ONCE, 1)

    def spawn(
        self,
        space: Space,
        root: BlockKey,
        query: Query,
        plan: Plan | None,
        *,
        memory: bool = False,
    ) -> Job[int]:
        """Start one; the job's result counts the parts that were moved.

        Args:
            space: Space of the prefix.
            root: Root of its key chain.
            query: How it is looked up.
            plan: Whose books it is for; finished at the end of the job. None: nobody's.
            memory: Whether to bring it into a memory tier, whichever tier is the fastest, and to
                see to what others are reading there already, too.

        Raises:
            ClosedError: if the engine is closed; the plan is the caller's then.
        """
        job = self._core.workers.spawn(
            self._run, space, root, query, plan, memory, name="prefetch", lane=Lane.PREFETCH
        )
        self.open += 1
        return job

    async def _run(
        self, space: Space, root: BlockKey, query: Query, plan: Plan | None, memory: bool
    ) -> int:
        core = self._core
        start = core.clock()
        try:
            if len(core.levels) == 1 or self.open > IN_LINE:
                return 0  # there is no faster place to bring it to, or too much to bring already
            core.spaces.setdefault(space.fingerprint, space)
            async with self._slots:
                moved = await self._bring(space, root, query, plan, memory)
        finally:
            self.open -= 1
            if plan is not None:
                self.books.finish(plan, core.clock())
        core.observer.operation(
            op="prefetch", tier=core.levels[0].name, seconds=core.clock() - start
        )
        return moved

    async def _bring(
        self, space: Space, root: BlockKey, query: Query, plan: Plan | None, memory: bool
    ) -> int:
        core = self._core
        found = await find(core, query)
        lease = Lease(core, found.lease)
        moved = 0
        try:
            if memory:
                cold = [p for p in found.parts if core.levels[p.tier].memory is None]
            else:
                # what a load reads already comes by itself, and owes nothing to a prefetch
                cold = [p for p in found.parts if p.tier > 0 and not self._fetcher.flying(p)]
            for window in _windows(cold, self._share):
                parts, spent = self._granted(plan, window)
                wanted = [_wanted(p, space, root, query.keys) for p in parts]
                there = await self._move(wanted, memory)
                moved += there
                if spent:
                    break
        finally:
            lease.release()
        return moved

    def _granted(self, plan: Plan | None, window: list[FoundPart]) -> tuple[list[FoundPart], bool]:
        """What of a window to bring, and whether that was all that the budget covers."""
        if plan is None:
            return window, False
        asked = [(part.part, part.tier, part.nbytes) for part in window]
        numbers = self.books.grant(plan, asked, self._core.clock())
        return [window[n] for n in numbers], not self.books.out(window[-1].part)

    async def _move(self, wanted: Sequence[Wanted], memory: bool) -> int:
        """Bring parts of one tier up, and write down what became of each; how many arrived."""
        if not wanted:
            return 0
        left = list(wanted)
        if self._core.levels[0].memory is None and not memory:
            left = await self._to_first(left)
        missing = await self._to_memory(left)
        failed = dict.fromkeys(want.found.part for want in missing)  # in an order that is logged
        now = self._core.clock()
        self.books.landed([w.found.part for w in wanted if w.found.part not in failed], now)
        self.books.refused(failed, now)
        return len(wanted) - len(missing)

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
                ahead=True,
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

    async def _to_memory(self, window: Sequence[Wanted]) -> list[Wanted]:
        """Read parts of a medium into the memory tier above it; those that did not come."""
        core = self._core
        wanted = [w for w in window if core.levels[w.found.tier].memory is None]
        if not wanted or not any(level.memory for level in core.levels):
            return list(window)
        tier = wanted[0].found.tier
        if not core.usable(core.levels[tier]):
            return list(window)  # its turn may be taken by a read that never ends
        came: set[Wanted] = set()
        async with self._turns[tier].take(Lane.PREFETCH):
            flights = self._fetcher.join(wanted, demand=False)
            try:
                for want, flight in zip(wanted, flights, strict=True):
                    landed = await core.landed(core.levels[tier], flight.landed)
                    if landed and flight.header is not None:
                        came.add(want)
            finally:
                for flight in flights:
                    flight.leave()
        return [want for want in window if want not in came]


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
