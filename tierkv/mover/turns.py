"""Taking turns on a medium: one background transfer at a time, the more urgent ones first.

Loads and stores that somebody waits for take no turn. What they can meet on a medium is then at
most one background batch, never a queue of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Turn"]


class Turn:
    """The one background transfer of one tier. Belongs to the event loop."""

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in Lane}

    def __repr__(self) -> str:
        return f"<Turn: {'taken' if self._taken else 'free'}, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Tasks waiting for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def take(self, lane: Lane) -> AsyncIterator[None]:
        """Wait for the turn: the most urgent lane first, in order of arrival within it.

        Cancellation: whoever waits leaves the line and holds nothing.
        """
        await self._enter(lane)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, lane: Lane) -> None:
        if not self._taken:  # then nobody waits: a turn is handed on, not given up
            self._taken = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                self._leave()  # it became ours in the turn of the loop in which we were cancelled
            elif waiter in self._waiting[lane]:
                self._waiting[lane].remove(waiter)
            raise

    def _leave(self) -> None:
        for queue in self._waiting.values():
            while queue:
                waiter = queue.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._taken = False
