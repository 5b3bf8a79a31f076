"""One-way switches that tasks wait for."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import anyio

__all__ = ["Signal"]


class Signal:
    """A one-way switch that many tasks can wait for; a cancelled waiter harms nobody."""

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._set

    def set(self) -> None:
        """Wake every waiter, now and later. Idempotent; call on the loop."""
        self._set = True
        for waiter in self._waiters:
            _finish(waiter)

    def attach(self, waiter: asyncio.Future[None]) -> None:
        """Resolve ``waiter`` as well when the switch is set. Pair with :meth:`detach`."""
        if self._set:
            _finish(waiter)
        else:
            self._waiters.add(waiter)

    def detach(self, waiter: asyncio.Future[None]) -> None:
        """Forget a waiter. Idempotent."""
        self._waiters.discard(waiter)

    async def wait(self, within: float | None = None) -> bool:
        """Wait until the switch is set, for at most ``within`` seconds; whether it is set."""
        if self._set:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = None if within is None else loop.call_later(max(within, 0.0), _finish, waiter)
        self.attach(waiter)
        try:
            await waiter
        finally:
            self.detach(waiter)
            if timer is not None:
                timer.cancel()
        return self._set

    async def outlast(self, within: float | None = None) -> bool:
        """Like :meth:`wait`, but a cancellation has to wait as well; it is re-raised afterwards."""
        try:
            return await self.wait(within)
        except asyncio.CancelledError as error:
            await self.after(error, within)

    async def after(
        self, cancelled: asyncio.CancelledError, within: float | None = None
    ) -> NoReturn:
        """Wait although the caller was cancelled; then raise the cancellation."""
        loop = asyncio.get_running_loop()
        end = None if within is None else loop.time() + within
        # a cancelled scope cancels again at every turn of the loop unless a shield stops it
        with anyio.CancelScope(shield=True):
            while not self._set and (end is None or loop.time() < end):
                try:
                    await self.wait(None if end is None else end - loop.time())
                except asyncio.CancelledError as error:
                    cancelled = error  # a native one: no scope may swallow it
        raise cancelled


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
