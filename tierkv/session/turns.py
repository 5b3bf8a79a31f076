"""Turns on a session: one owner at a time, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tierkv.errors import ClosedError, SessionBusyError

if TYPE_CHECKING:
    from tierkv.workers import Signal

__all__ = ["Turns"]


class Turns:
    """Who may change a session now. Belongs to the engine's loop.

    The owner may nest. A task that holds the turn through one owner and asks for it through
    another would wait for itself for ever: it is refused.
    """

    __slots__ = ("_name", "_owner", "_queue", "_tasks")

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner: object | None = None
        self._tasks: list[asyncio.Task[object] | None] = []  # who began each nesting level
        self._queue: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        state = f"{len(self._tasks)} deep" if self._owner is not None else "free"
        return f"<Turns {self._name!r}: {state}, {len(self._queue)} waiting>"

    async def begin(self, owner: object, *, closing: Signal, refuse: bool) -> None:
        """Wait for (or be refused) the turn; the same owner may nest.

        Args:
            owner: Whose turn it is to be.
            closing: Set when the engine closes, which ends the wait.
            refuse: Whether to refuse instead of waiting.

        Raises:
            SessionBusyError: if this very task holds the turn by another owner, or if another
                turn runs and ``refuse`` is set.
            ClosedError: if the engine is closed meanwhile.
        """
        task = asyncio.current_task()
        if self._owner is not owner:
            if self._owner is not None or self._queue:
                self._check(task, refuse)
                await self._wait(closing)
            self._owner = owner
        self._tasks.append(task)

    def _check(self, task: asyncio.Task[object] | None, refuse: bool) -> None:
        if task in self._tasks:
            raise SessionBusyError(
                f"this task has a turn running on session {self._name!r} already, through another "
                "handle: use that handle, or leave its match first"
            )
        if refuse:
            raise SessionBusyError(
                f"session {self._name!r} has a turn running; wait for it, use a fork, or set "
                "busy='wait'"
            )

    async def _wait(self, closing: Signal) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        closing.attach(waiter)
        try:
            await waiter  # resolved by the turn before us, which hands over, or by closing
            if self._owner is not waiter:
                raise ClosedError("the engine was closed before it was this turn's turn")
        except BaseException:
            if self._owner is waiter:
                self._hand_over()
            elif waiter in self._queue:  # else it was passed over, cancelled as it was
                self._queue.remove(waiter)
            raise
        finally:
            closing.detach(waiter)

    def end(self, owner: object) -> None:
        """End one nesting level; the last hands the turn to the next in line. Idempotent."""
        if self._owner is not owner:
            return
        task = asyncio.current_task()
        # a level may be ended by another task than began it: then by whichever is left
        self._tasks.remove(task if task in self._tasks else self._tasks[-1])
        if not self._tasks:
            self._hand_over()

    def free_for(self, owner: object) -> bool:
        """Whether no turn of anybody else runs."""
        return self._owner is None or self._owner is owner

    def _hand_over(self) -> None:
        self._owner = None
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                self._owner = waiter  # nobody slips in before the waiter wakes up
                waiter.set_result(None)
                return
