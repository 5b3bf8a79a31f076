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
        while not core.decisions.advance(lookup, core.clock()):
            await asyncio.sleep(0)
    except BaseException:
        core.decisions.abandon(lookup, core.clock())
        raise
    return core.decisions.finish(lookup, core.clock())
