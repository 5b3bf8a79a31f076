"""How much of a found prefix is worth loading, and what is left of it then."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from tierkv.decisions.cost import profile
from tierkv.mover.probing import refresh

if TYPE_CHECKING:
    from tierkv.decisions.cost import LoadChoice, Run
    from tierkv.decisions.types import Found
    from tierkv.layout import Space
    from tierkv.mover.core import Core

__all__ = ["behind", "leading", "outline", "weigh"]

_INLINE_PARTS = 8192  # more are outlined in a thread: 2 ms on the loop are enough


async def outline(core: Core, space: Space, found: Found, first: int = 0) -> tuple[Run, ...]:
    """What loading a prefix from block ``first`` on needs of tiers that are not memory.

    Returns:
        The runs of those blocks; none if nothing is needed.
    """
    near = {x.index for x in core.levels if x.memory is not None or x.resident is not None}
    found = behind(found, first)
    if {part.tier for part in found.parts} <= near:
        return ()
    if len(found.parts) <= _INLINE_PARTS:
        return profile(found, space.block_tokens, near, first)
    return await core.workers.run(profile, found, space.block_tokens, near, first)


def weigh(
    core: Core,
    space: Space,
    found: Found,
    runs: tuple[Run, ...],
    until: float | None,
    first: int = 0,
) -> LoadChoice:
    """Decide how much of a prefix to load, for the record.

    A tier that is passed over because it is slow (or too slow for the deadline) is not read and
    would be thought slow for ever: when its last read is a while ago, the engine reads a few of
    these parts for itself.

    Args:
        core: The engine's core.
        space: Space of the prefix.
        found: The prefix, leased.
        runs: Its outline, not empty.
        until: Deadline on the core's clock, or None.
        first: First block of the outline: those before it are in place.

    Returns:
        The choice; its blocks and tokens are those of the whole prefix.
    """
    now = core.clock()
    budget = None if until is None else max(until - now, 0.0)
    choice = core.decisions.plan_load(space.fingerprint, runs, budget, now)
    if first:
        tokens = first * space.block_tokens + choice.tokens
        choice = replace(choice, blocks=first + choice.blocks, tokens=tokens)
    if choice.tier is not None:
        left = [p for p in found.parts if p.block >= choice.blocks and p.tier == choice.tier]
        refresh(core, core.levels[choice.tier], left)
    return choice


def leading(found: Found, choice: LoadChoice) -> Found:
    """The leading blocks of a prefix all of whose groups need every block."""
    end = bisect_left(found.parts, choice.blocks, key=lambda part: part.block)
    return replace(
        found,
        blocks=choice.blocks,
        tokens=choice.tokens,
        parts=found.parts[:end],
        reason=choice.reason,
    )


def behind(found: Found, first: int) -> Found:
    """The same prefix without the parts of the blocks before ``first``."""
    if not first:
        return found
    begin = bisect_left(found.parts, first, key=lambda part: part.block)
    return replace(found, parts=found.parts[begin:])
