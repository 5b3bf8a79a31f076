"""Loads: blocks land in the caller's view in prefix order, each verified before it is copied.

A load is a list of windows. While one window is copied into the view, the next one is on its way
from its tier (read-ahead of one window, bounded by the staging memory).
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.decisions.types import EvictReason, MissReason
from tierkv.errors import CodecError
from tierkv.mover.core import INLINE_BYTES, SLICE_BYTES, derivation
from tierkv.mover.fetch import Wanted
from tierkv.pipeline import deliver, open_frame, verify

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import View
    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import Found, FoundPart
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher, Flight
    from tierkv.mover.lease import Lease

__all__ = ["LoadPlan", "Progress", "load"]

_BLOCKS = 256  # most blocks of a window: what is set up for it must not hold up the loop


@dataclass(slots=True)
class Progress:
    """How far a load got. Holds no memory of the caller, so that it may be kept.

    Attributes:
        blocks: Leading blocks that are in place.
        by_tier: Tokens in place by tier (the slowest one among a block's parts).
        derived: How the loaded KV differs from exact KV; empty if it is exact.
        reason: Why it stopped early; None if it did not.
    """

    blocks: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    derived: str = ""
    reason: MissReason | None = None


@dataclass(slots=True)
class LoadPlan:
    """One prefix to load.

    Attributes:
        space: Space of the blocks.
        root: Root of the key chain.
        keys: Keys of the blocks of the prefix.
        found: The lookup result.
        lease: The lease on its parts.
        view: Where the KV goes.
        progress: How far it got.
    """

    space: Space
    root: BlockKey
    keys: Sequence[BlockKey]
    found: Found
    lease: Lease
    view: View
    progress: Progress = field(default_factory=Progress)

    def tokens_of(self, block: int) -> int:
        """Tokens of one block of the prefix."""
        size = self.space.block_tokens
        return min(size, self.found.tokens - block * size)

    def wanted(self, found: FoundPart) -> Wanted:
        """Describe one of the found parts for a fetch."""
        parent = part_id(self.keys[found.block - 1], found.group) if found.block else None
        return Wanted(found, self.space, self.root, parent)


@dataclass(slots=True)
class _Step:
    """One block of one plan: its parts, and the flights of those that must travel."""

    plan: LoadPlan
    block: int
    parts: list[FoundPart]
    flights: dict[PartId, Flight] = field(default_factory=dict)


def _steps(plans: Sequence[LoadPlan]) -> Iterator[_Step]:
    for plan in plans:
        parts = iter(plan.found.parts)
        ahead = next(parts, None)
        for block in range(plan.found.blocks):
            mine = []
            while ahead is not None and ahead.block == block:
                mine.append(ahead)
                ahead = next(parts, None)
            yield _Step(plan, block, mine)


def _windows(core: Core, plans: Sequence[LoadPlan]) -> Iterator[list[_Step]]:
    window: list[_Step] = []
    cold = total = 0
    for step in _steps(plans):
        size = sum(p.nbytes for p in step.parts)
        away = sum(p.nbytes for p in step.parts if core.levels[p.tier].memory is None)
        if window and (
            cold + away > core.window_bytes or total + size > SLICE_BYTES or len(window) == _BLOCKS
        ):
            yield window
            window, cold, total = [], 0, 0
        window.append(step)
        cold += away
        total += size
    if window:
        yield window


async def load(
    core: Core, fetcher: Fetcher, plans: Sequence[LoadPlan], deadline: float | None = None
) -> None:
    """Load leased prefixes into their views, one backend call per tier and window.

    Args:
        core: The engine's core.
        fetcher: Its flights.
        plans: What to load; progress is written into them.
        deadline: Time on the core's clock after which no further window is waited for.

    Raises:
        ClosedError: if the engine is closed.
        LayoutError: if a view does not hold the tokens.

    Cancellation: at most one window's copy is waited for, then the cancellation is re-raised;
    reads under way go on without us and stay available to others.
    """
    under_way: list[list[_Step]] = []
    windows = _windows(core, plans)
    with ExitStack() as stack:
        for plan in plans:
            stack.enter_context(plan.lease)
        stack.callback(_leave, under_way)
        _depart(core, fetcher, next(windows, []), under_way)
        while under_way[0]:
            _depart(core, fetcher, next(windows, []), under_way)
            await _arrive(core, under_way[0], deadline)
            await _land(core, under_way[0])
            _leave([under_way.pop(0)])
            if all(plan.progress.reason is not None for plan in plans):
                break
            if deadline is not None and core.clock() >= deadline:
                for plan in plans:
                    if plan.progress.blocks < plan.found.blocks:
                        _stop(plan, MissReason.DEADLINE)
                break
            await asyncio.sleep(0)  # a load that never has to wait must not hold up the others


def _stop(plan: LoadPlan, reason: MissReason) -> None:
    if plan.progress.reason is None:
        plan.progress.reason = reason


def _depart(
    core: Core, fetcher: Fetcher, window: list[_Step], under_way: list[list[_Step]]
) -> None:
    """Start (or join) the reads of a window."""
    cold = [
        (step, found)
        for step in window
        if step.plan.progress.reason is None
        for found in step.parts
        if core.levels[found.tier].memory is None
    ]
    flights = fetcher.join([step.plan.wanted(found) for step, found in cold]) if cold else []
    for (step, found), flight in zip(cold, flights, strict=True):
        step.flights[found.part] = flight
    under_way.append(window)


def _leave(windows: Sequence[Sequence[_Step]]) -> None:
    for window in windows:
        for step in window:
            for flight in step.flights.values():
                flight.leave()
            step.flights.clear()


async def _arrive(core: Core, window: Sequence[_Step], deadline: float | None) -> None:
    waiting = [f for step in window for f in step.flights.values() if not f.landed.is_set()]
    if not waiting:
        return
    if deadline is None:
        for flight in waiting:
            await flight.landed.wait()
        return
    try:
        async with asyncio.timeout(max(deadline - core.clock(), 0)):
            for flight in waiting:
                await flight.landed.wait()
    except TimeoutError:
        for step in window:
            if any(not f.landed.is_set() for f in step.flights.values()):
                _stop(step.plan, MissReason.DEADLINE)


@dataclass(slots=True)
class _Ready:
    """A step whose bytes are in reach, and what came of it."""

    step: _Step
    frames: list[tuple[FoundPart, Header | None, memoryview]]
    bad: FoundPart | None = None
    derived: str = ""
    done: bool = False


async def _land(core: Core, window: Sequence[_Step]) -> None:
    """Copy a window into the views, in a worker thread unless it is small."""
    ready: list[_Ready] = []
    following: dict[int, int] = {}  # the block that each plan goes on with: never past a gap
    for step in window:
        plan = step.plan
        if step.block != following.get(id(plan), plan.progress.blocks):
            continue
        frames = _frames(core, step)
        if frames is not None:
            ready.append(_Ready(step, frames))
            following[id(plan)] = step.block + 1
    nbytes = sum(found.nbytes for item in ready for found, _, _ in item.frames)
    if nbytes < INLINE_BYTES:
        _copy(core.verify_host, ready)
    else:
        await core.workers.run(_copy, core.verify_host, ready)
    for item in ready:
        _account(core, item)


def _frames(core: Core, step: _Step) -> list[tuple[FoundPart, Header | None, memoryview]] | None:
    """Bytes of each part of a step; None (and a reason) if one did not arrive."""
    out: list[tuple[FoundPart, Header | None, memoryview]] = []
    for found in step.parts:
        flight = step.flights.get(found.part)
        if flight is not None:
            if not flight.landed.is_set():
                return None  # the deadline passed; the reason is set
            if flight.frame is None or flight.header is None:
                damaged = flight.failure is EvictReason.DAMAGED
                _stop(step.plan, MissReason.DAMAGED if damaged else MissReason.FAILED)
                return None
            out.append((found, flight.header, flight.frame))
            continue
        memory = core.levels[found.tier].memory
        buffer = memory.borrow(found.part, found.generation) if memory is not None else None
        if buffer is None:
            core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
            _stop(step.plan, MissReason.FAILED)
            return None
        out.append((found, None, buffer.memory))
    return out


def _copy(verify_host: bool, ready: Sequence[_Ready]) -> None:
    """Verify and copy blocks; a plan stops at its first damaged block. Runs in a thread."""
    stopped: set[int] = set()
    for item in ready:
        plan = item.step.plan
        if id(plan) in stopped:
            continue
        headers: list[Header] = []
        start = item.step.block * plan.space.block_tokens
        found = None
        try:
            for found, known, frame in item.frames:
                header = known
                if header is None:
                    header = open_frame(frame, plan.space, found.part, found.generation, plan.root)
                    if verify_host:
                        verify(header, frame)
                headers.append(header)
            for (part, _, frame), header in zip(item.frames, headers, strict=True):
                found = part
                deliver(header, frame, plan.view, start)
                item.derived = item.derived or derivation(header)
        except CodecError:
            item.bad = found
            stopped.add(id(plan))
        else:
            item.done = True


def _account(core: Core, item: _Ready) -> None:
    plan, step = item.step.plan, item.step
    progress = plan.progress
    if item.bad is not None:
        bad = item.bad
        core.damaged(bad.part, bad.tier, bad.generation, "checksum")
        _stop(plan, MissReason.DAMAGED)
    elif item.done:
        progress.blocks = step.block + 1
        progress.derived = progress.derived or item.derived
        core.bytes_copied += sum(found.nbytes for found in step.parts)
        if step.parts:
            name = core.levels[max(found.tier for found in step.parts)].name
            tokens = plan.tokens_of(step.block)
            progress.by_tier[name] = progress.by_tier.get(name, 0) + tokens
