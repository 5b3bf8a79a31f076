"""Loads: blocks land in the caller's view in prefix order, each verified before it is copied.

A load is a list of windows. While one window is copied into the view, the next one is on its way
from its tier (read-ahead of one window, bounded by the staging memory).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.blocks import part_id
from tierkv.decisions.types import EvictReason, MissReason
from tierkv.errors import IntegrityError
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

__all__ = ["LoadPlan", "load"]


@dataclass(slots=True)
class LoadPlan:
    """One prefix to load, and how far it got.

    Attributes:
        space: Space of the blocks.
        root: Root of the key chain.
        keys: Keys of the blocks of the prefix.
        found: The leased lookup result.
        view: Where the KV goes.
        blocks: Leading blocks that are in place.
        by_tier: Tokens in place by tier (the slowest one among a block's parts).
        derived: How the loaded KV differs from exact KV; empty if it is exact.
        reason: Why it stopped early; None if it did not.
    """

    space: Space
    root: BlockKey
    keys: Sequence[BlockKey]
    found: Found
    view: View
    blocks: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    derived: str = ""
    reason: MissReason | None = None

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
        by_block: dict[int, list[FoundPart]] = {}
        for found in plan.found.parts:
            by_block.setdefault(found.block, []).append(found)
        for block in range(plan.found.blocks):
            yield _Step(plan, block, by_block.get(block, []))


def _windows(core: Core, plans: Sequence[LoadPlan]) -> Iterator[list[_Step]]:
    window: list[_Step] = []
    cold = total = 0
    for step in _steps(plans):
        size = sum(p.nbytes for p in step.parts)
        away = sum(p.nbytes for p in step.parts if core.levels[p.tier].memory is None)
        if window and (cold + away > core.window_bytes or total + size > SLICE_BYTES):
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

    Cancellation: at most one window's copy is waited for, then the cancellation is re-raised;
    reads under way go on without us and stay available to others.
    """
    windows = list(_windows(core, plans))
    for number, window in enumerate(windows):
        try:
            if number == 0:
                _depart(core, fetcher, window)
            if number + 1 < len(windows):
                _depart(core, fetcher, windows[number + 1])
            await _arrive(core, window, deadline)
            await _land(core, window)
        except BaseException:
            _leave(windows[number : number + 2])
            raise
        _leave([window])
        if all(plan.reason is not None for plan in plans):
            _leave(windows[number + 1 : number + 2])
            break


def _depart(core: Core, fetcher: Fetcher, window: Sequence[_Step]) -> None:
    """Start (or join) the reads of a window."""
    cold = [
        (step, found)
        for step in window
        if step.plan.reason is None
        for found in step.parts
        if core.levels[found.tier].memory is None
    ]
    flights = fetcher.join([step.plan.wanted(found) for step, found in cold]) if cold else []
    for (step, found), flight in zip(cold, flights, strict=True):
        step.flights[found.part] = flight


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
            late = any(not f.landed.is_set() for f in step.flights.values())
            if late and step.plan.reason is None:
                step.plan.reason = MissReason.DEADLINE


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
    stopped: set[int] = set()
    for step in window:
        if step.plan.reason is not None and step.plan.reason is not MissReason.DEADLINE:
            continue
        if id(step.plan) in stopped:
            continue
        frames = _frames(core, step)
        if frames is None:
            stopped.add(id(step.plan))
        else:
            ready.append(_Ready(step, frames))
    nbytes = sum(found.nbytes for item in ready for found, _, _ in item.frames)
    if nbytes < INLINE_BYTES:
        _copy(core.verify_host, ready)
    else:
        await core.workers.run(_copy, core.verify_host, ready)
    core.bytes_copied += nbytes
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
                step.plan.reason = MissReason.DAMAGED if damaged else MissReason.FAILED
                return None
            out.append((found, flight.header, flight.frame))
            continue
        memory = core.levels[found.tier].memory
        buffer = memory.borrow(found.part, found.generation) if memory is not None else None
        if buffer is None:
            core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
            step.plan.reason = MissReason.FAILED
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
        headers = []
        for found, known, frame in item.frames:
            header = known
            if header is None:
                try:
                    header = open_frame(frame, plan.space, found.part, found.generation, plan.root)
                    if verify_host:
                        verify(header, frame)
                except IntegrityError:
                    item.bad = found
                    stopped.add(id(plan))
                    break
            headers.append(header)
        if item.bad is not None:
            continue
        start = item.step.block * plan.space.block_tokens
        for (_, _, frame), header in zip(item.frames, headers, strict=True):
            deliver(header, frame, plan.view, start)
            item.derived = item.derived or derivation(header)
        item.done = True


def _account(core: Core, item: _Ready) -> None:
    plan, step = item.step.plan, item.step
    if item.bad is not None:
        bad = item.bad
        core.damaged(bad.part, bad.tier, bad.generation, "checksum")
        plan.reason = MissReason.DAMAGED
        return
    if not item.done:
        return
    plan.blocks = step.block + 1
    plan.derived = plan.derived or item.derived
    tokens = min(plan.space.block_tokens, plan.found.tokens - step.block * plan.space.block_tokens)
    if step.parts:
        name = core.levels[max(found.tier for found in step.parts)].name
        plan.by_tier[name] = plan.by_tier.get(name, 0) + tokens
