"""Loads out of RAM in the simplest case, which is the most frequent one: raw blocks of one group.

Nothing has to travel, to be decoded or to be converted: a block's frame is in memory that the
engine can address, and its bytes lie in the view as they lie in the frame. Where blocks are small
(64 KiB is a copy of 5 us), what is done and made for each of them decides. So they go by the
window from their tier to the view: one look-up each, one check of a header each, and then sums and
copies for all of them in few calls. What is not so plain is left for :mod:`tierkv.mover.landing`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.decisions.types import MissReason
from tierkv.errors import CodecError
from tierkv.layout import GroupKind
from tierkv.mover.blockcopies import Blocks
from tierkv.mover.core import INLINE_BYTES
from tierkv.mover.grids import grid_of, worthwhile
from tierkv.mover.rawcopies import all_raw
from tierkv.mover.steps import asks_to_stop, never, stop
from tierkv.sections import open_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.decisions.types import FoundPart
    from tierkv.frame import Header
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.mover.load import LoadPlan

__all__ = ["load_plainly"]

_AT_ONCE: Final = 512
"""Most blocks of a window: the loop does no more for each of them than to find it."""


class _Done(NamedTuple):
    """What became of a window.

    Attributes:
        blocks: Leading blocks that are right, and in place.
        damaged: Whether the next one is damaged.
    """

    blocks: int
    damaged: bool


async def load_plainly(
    core: Core, fetcher: Fetcher, plan: LoadPlan, limit: int, deadline: float | None
) -> bool:
    """Load the leading blocks of a plan that are plain; all of its parts must be in RAM.

    Args:
        core: The engine's core.
        fetcher: Its flights.
        plan: What to load into a view in host memory. Its progress is moved on.
        limit: Most bytes that are copied between two looks at the clock.
        deadline: Time on the core's clock after which no further window is begun.

    Returns:
        Whether the rest of the plan, if there is any, is to be loaded in another way.

    Raises:
        ClosedError: if the engine is closed.
        LayoutError: if the view does not hold a block.

    Cancellation: a thread that copies is waited for until it is done with the frames that it is
    at (1 MiB or one; 32 MiB where torch copies with strides); nothing of its window is reported.
    """
    parts, progress = plan.found.parts, plan.progress
    size = plan.space.block_tokens
    end = min(len(parts), plan.found.tokens // size - plan.first)  # not a partial block
    if not _suits(core, fetcher, plan, end):
        return True
    at = 0
    while at < end:
        frames = _frames(core, parts[at : min(end, at + _AT_ONCE)], limit)
        if not frames:
            return True  # it is gone, which has to be told
        window = parts[at : at + len(frames)]
        if sum([part.nbytes for part in window]) < INLINE_BYTES:
            done = _land(core, plan, window, frames, never)
        else:
            done = await core.workers.run(_land, core, plan, window, frames, asks_to_stop())
        _account(core, plan, window[: done.blocks])
        at += done.blocks
        if done.damaged:
            bad = parts[at]
            core.damaged(bad.part, bad.tier, bad.generation, "checksum")
            progress.spilled |= plan.view.owned_by_engine
            stop(plan, MissReason.DAMAGED)
            return False
        if done.blocks < len(window):
            return True
        if deadline is not None and core.clock() >= deadline:
            return False
        await asyncio.sleep(0)  # a load that never has to wait must not hold up the others
    return progress.blocks < plan.found.blocks


def _suits(core: Core, fetcher: Fetcher, plan: LoadPlan, blocks: int) -> bool:
    """Whether blocks of this plan may be plain, and are worth it."""
    groups = plan.space.layout.groups
    if len(groups) != 1 or groups[0].kind not in (GroupKind.FULL, GroupKind.LATENT):
        return False
    if len(plan.found.parts) != plan.found.blocks - plan.first:
        return False
    if any(map(fetcher.wanted_above, core.levels)):
        return False
    return blocks > 0


def _frames(core: Core, parts: Sequence[FoundPart], limit: int) -> list[memoryview]:
    """The frames of leading parts, as far as they are there and their bytes within the limit."""
    looks = [level.memory.look if level.memory is not None else None for level in core.levels]
    frames: list[memoryview] = []
    for part, _, _, tier, generation, nbytes in parts:
        look = looks[tier]
        frame = None if look is None else look(part, generation)
        limit -= nbytes
        if frame is None or (limit < 0 and frames):
            break
        frames.append(frame)
    return frames


def _land(
    core: Core,
    plan: LoadPlan,
    window: Sequence[FoundPart],
    frames: Sequence[memoryview],
    stopped: Callable[[], bool],
) -> _Done:
    """Check, verify and write the frames of one window, up to the first that is wrong or not plain.

    For a worker. Headers are read before large copies empty the caches.
    """
    headers, damaged = _open(plan, window, frames)
    if not headers or not worthwhile(len(headers), headers[0].sections):
        return _Done(0, damaged and not headers)
    first, size, view = headers[0], plan.space.block_tokens, plan.view
    begin = window[0].block * size
    starts = range(begin, begin + len(headers) * size, size)
    with view.writing():
        grid = grid_of(view, first.sections, size, starts, writing=True)
        if grid is None:
            return _Done(0, damaged=False)
        blocks = Blocks(grid, view, starts, frames[: len(headers)])
        due = [header.digests for header in headers] if core.verify_host else None
        loosely = view.owned_by_engine  # it may hold wrong bytes behind what is reported
        done = blocks.land(0, len(headers), due, loosely=loosely, stopped=stopped)
    if done < len(headers):
        return _Done(done, damaged=not stopped())
    return _Done(done, damaged)


def _open(
    plan: LoadPlan, window: Sequence[FoundPart], frames: Sequence[memoryview]
) -> tuple[list[Header], bool]:
    """Headers of the leading frames that are plain, and whether the next one is damaged."""
    space, root = plan.space, plan.root
    headers: list[Header] = []
    for part, frame in zip(window, frames, strict=True):
        try:
            header = open_frame(frame, space, part.part, part.generation, root)
        except CodecError:
            return headers, True
        if headers:
            first = headers[0]
            if header.sections is not first.sections or header.tokens != first.tokens:
                break
        elif not all_raw(header) or header.tokens != space.block_tokens or not header.per_token:
            break
        if header.folded or header.fidelity != "exact" or header.frame_bytes > len(frame):
            break
        headers.append(header)
    return headers, False


def _account(core: Core, plan: LoadPlan, parts: Sequence[FoundPart]) -> None:
    """Report full blocks that are in place."""
    progress, size = plan.progress, plan.space.block_tokens
    progress.blocks += len(parts)
    core.bytes_copied += sum([part.nbytes for part in parts])
    for level in core.levels:
        blocks = len(parts)
        if core.levels[1:]:
            blocks = sum([part.tier == level.index for part in parts])
        if blocks:
            progress.by_tier[level.name] = progress.by_tier.get(level.name, 0) + blocks * size
