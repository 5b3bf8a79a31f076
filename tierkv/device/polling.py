"""Waiting for events without blocking the loop."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FIRST_PAUSE_S", "LAST_PAUSE_S", "Poller", "poll"]

FIRST_PAUSE_S: Final = 50e-6
LAST_PAUSE_S: Final = 1e-3
_GROWTH: Final = 1.5


async def poll(done: Callable[[], bool]) -> None:
    """Wait until ``done()``, asked after 50 us at first and then ever more rarely, to 1 ms.

    Never a callback of the driver: Python in one deadlocks on the GIL against the driver's lock.
    """
    pause = FIRST_PAUSE_S
    while not done():
        await asyncio.sleep(pause)
        pause = min(pause * _GROWTH, LAST_PAUSE_S)


class Poller:
    """Waits for the events of one stream: however many wait, one timer, and one question a time.

    A stream's events are done in the order of their numbers, so that only the oldest is asked for.
    One for each loop.

    Attributes:
        loop: See above.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: list[tuple[int, int, Callable[[], bool], asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._pause = FIRST_PAUSE_S
        self._entries = 0

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    async def wait(self, number: int, done: Callable[[], bool]) -> None:
        """Wait until ``done()`` of the event of this number.

        Raises:
            Exception: what ``done`` raised, for this event or an older one.

        Cancellation: ends this wait alone.
        """
        future: asyncio.Future[None] = self.loop.create_future()
        self._entries += 1  # two may wait for one event
        heapq.heappush(self._waiting, (number, self._entries, done, future))
        self._pause = FIRST_PAUSE_S  # a new one may be nearly done
        self._arm()
        await future

    def _arm(self) -> None:
        due = self.loop.time() + self._pause
        if self._timer is not None:
            if self._due <= due:
                return  # sooner: or ever new ones would put the question off for ever
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._due = due
            self._timer = self.loop.call_later(self._pause, self._ask)

    def _ask(self) -> None:
        self._timer = None
        progress = False
        try:
            while self._waiting:
                _, _, done, future = self._waiting[0]
                if not future.done() and not done():  # one that was cancelled asks no more
                    break
                heapq.heappop(self._waiting)
                progress = True
                if not future.done():
                    future.set_result(None)
        except Exception as error:  # noqa: BLE001 - the device failed: everybody is told
            waiting, self._waiting = self._waiting, []
            for entry in waiting:
                if not entry[3].done():
                    entry[3].set_exception(error)
        self._pause = FIRST_PAUSE_S if progress else min(self._pause * _GROWTH, LAST_PAUSE_S)
        self._arm()
