"""A tier that answers when told to, and a time-out that passes when told to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from tierkv.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tierkv.abc import Threads

__all__ = ["InTurn", "Timer", "Timers"]


class InTurn(Fault):
    """Calls wait until they are let through, one by one."""

    waits: ClassVar[bool] = True

    def __init__(self, *operations: str) -> None:
        super().__init__(*operations)
        self.waiting = 0
        self._turns = asyncio.Semaphore(0)

    def let_one_through(self) -> None:
        self._turns.release()

    async def before(self, operation: str, threads: Threads | None) -> None:
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1


@dataclass(eq=False)
class Timer:
    """What is to be done at a time; as much of a ``TimerHandle`` as is used."""

    when: float
    act: Callable[..., None]
    args: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """Time of the loop, for who looks whether a tier hangs: it passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._due: list[Timer] = []
        stand_in = SimpleNamespace(get_running_loop=lambda: self)
        monkeypatch.setattr("tierkv.mover.timing.asyncio", stand_in)

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def call_later(self, delay: float, act: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(self.now + delay, act, args)
        self._due.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass, and run what is due meanwhile, at its time."""
        end = self.now + seconds
        while due := [timer for timer in self._due if timer.when <= end]:
            first = min(due, key=lambda timer: timer.when)
            self._due.remove(first)
            if not first.cancelled:
                self.now = first.when
                first.act(*first.args)
        self.now = end
