"""Where an engine belongs: one event loop, in one process."""

from __future__ import annotations

import asyncio
import os

from tierkv.errors import ClosedError

__all__ = ["Home"]


class Home:
    """The loop and process that something without locks belongs to, once it settled there."""

    __slots__ = ("_place",)

    def __init__(self) -> None:
        self._place: tuple[asyncio.AbstractEventLoop, int] | None = None

    def settle(self) -> None:
        """Belong to the running loop of this process."""
        self._place = asyncio.get_running_loop(), os.getpid()

    def refuse_elsewhere(self) -> None:
        """Refuse calls from another loop (or thread), or from a forked process.

        Raises:
            ClosedError: if this is one: nothing is locked against the one, and the other has none
                of the threads.
        """
        if self._place is not None and self._place != (_running(), os.getpid()):
            raise ClosedError(
                "this engine belongs to the event loop and process that opened it: open one of "
                "your own here, or use tierkv.blocking.CacheManager, which takes any thread"
            )


def _running() -> asyncio.AbstractEventLoop | None:
    """The running loop; asyncio knows of none in a process that was forked out of one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
