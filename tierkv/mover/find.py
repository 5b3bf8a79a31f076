"""Lookups on the loop: long ones are sliced so that nobody else waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.decisions.types import Found, Query
    from tierkv.mover.core import Core

__all__ = ["find"]


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
