"""Lookups on the loop: long ones are sliced so that nobody else waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.decisions.types import Found, Query
    from tierkv.mover.core import Core

__all__ = ["find", "tokens_by_tier"]


async def find(core: Core, query: Query) -> Found:
    """Find the longest loadable prefix; its parts are leased if the query says so.

    Cancellation: every lease taken so far is given back.
    """
    lookup = core.decisions.begin_lookup(query, core.clock())
    try:
        done = core.decisions.advance(lookup, core.clock())
        while not done:
            await asyncio.sleep(0)
            done = core.decisions.advance(lookup, core.clock())
    except BaseException:
        core.decisions.abandon(lookup, core.clock())
        raise
    return core.decisions.finish(lookup, core.clock())


def tokens_by_tier(core: Core, found: Found, block_tokens: int) -> dict[str, int]:
    """Tokens of a prefix by tier: a block counts for the slowest one that a part of it is in."""
    tiers = {part.tier for part in found.parts}
    if len(tiers) == 1 and len(found.parts) >= found.blocks and not found.parts[0].block:
        return {core.levels[tiers.pop()].name: found.tokens}
    slowest: dict[int, int] = {}
    for part in found.parts:
        slowest[part.block] = max(slowest.get(part.block, 0), part.tier)
    out: dict[str, int] = {}
    for block, tier in slowest.items():
        name = core.levels[tier].name
        out[name] = out.get(name, 0) + min(block_tokens, found.tokens - block * block_tokens)
    return out
