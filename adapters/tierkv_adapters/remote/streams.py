"""The stream of what an engine holds, to one subscriber: a snapshot, then every change."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final

from tierkv.workers import Signal
from tierkv_adapters.remote.wire import encode, pack_changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId
    from tierkv.engine import Engine

__all__ = ["MOST_BEHIND", "Stream"]

MOST_BEHIND: Final = 1 << 20
"""Changed parts, beyond those of the snapshot, that may wait for a subscriber."""
_FRAME: Final = 2048


class Stream:
    """What one engine holds, written to one connection, on the engine's loop.

    Of the changes that wait for a slow reader only the last one of each part is kept, and a reader
    that falls behind too far loses its connection: memory is bounded, and there are no gaps.
    Whoever connects anew begins with a snapshot.
    """

    def __init__(self, engine: Engine, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._waiting: dict[PartId, int] = {}
        self._most: int | None = None  # None until the snapshot is whole
        self._of_snapshot: int | None = None  # how much of it still waits
        self._stirred = Signal()
        self._ended = False

    def end(self) -> None:
        """Send no more: the reader is gone."""
        self._ended = True
        self._stirred.set()

    def _told(self, changes: Sequence[tuple[PartId, int]]) -> None:
        waiting = self._waiting
        if changes:
            waiting.update(changes)  # a part that waits already keeps its place
        else:
            self._of_snapshot = len(waiting)
            self._most = len(waiting) + MOST_BEHIND
        if self._most is not None and len(waiting) > self._most:
            waiting.clear()
            self._writer.transport.abort()
        self._stirred.set()

    async def run(self) -> None:
        """Send until :meth:`end` is called, or the reader is found gone.

        Raises:
            ConnectionError: if it is found gone.

        Cancellation: at any await; the engine is watched no more.
        """
        stop = self._engine.watch(self._told)
        try:
            while not self._ended:
                await self._stirred.wait()
                self._send()
                await self._writer.drain()
                await asyncio.sleep(0)  # a reader that keeps up must not keep the loop
        finally:
            stop()

    def _send(self) -> None:
        some = list(islice(self._waiting.items(), _FRAME))
        for part, _ in some:
            del self._waiting[part]
        if some:
            self._writer.write(encode({"on": "changes"}, pack_changes(some)))
        if self._of_snapshot is not None:
            self._of_snapshot -= len(some)
            if self._of_snapshot <= 0:
                self._of_snapshot = None
                self._writer.write(encode({"on": "complete"}))
        if not self._waiting and not self._ended:
            self._stirred = Signal()
