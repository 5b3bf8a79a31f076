"""What ranks hold, told to an index: from an engine in this process, or through its socket."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tierkv.errors import ClosedError, TierKVError
from tierkv.workers import Signal
from tierkv_adapters.remote.ending import first_of
from tierkv_adapters.remote.hub import Hub

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from tierkv.blocking import CacheManager
    from tierkv.blocks import PartId

__all__ = ["Index", "LocalFeed", "SocketFeed"]


class Index(Protocol):
    """Who is told: a :class:`~tierkv_adapters.serving.replicas.ReplicaIndex`, or one like it."""

    def apply(self, rank: int, changes: Sequence[tuple[PartId, int]]) -> None:
        """Take in (part, tier bits); 0: the part is gone."""

    def complete(self, rank: int) -> None:
        """Note that all that the rank held when its feed began has been told."""

    def lost(self, rank: int) -> None:
        """Note that the rank's feed broke: until it tells again, the rank holds nothing."""


class LocalFeed:
    """Tells an index what the engine of a manager in this process holds.

    The index is told on the engine's loop.
    """

    def __init__(self, manager: CacheManager, index: Index, rank: int) -> None:
        self._manager = manager
        self._index = index
        self._rank = rank
        self._whole = threading.Event()
        self._closing = Signal()
        self._stop: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "on" if self._stop is not None else "off"
        return f"<LocalFeed of rank {self._rank}: {state}>"

    def start(self, within: float) -> bool:
        """Begin, and wait for the snapshot for at most ``within`` seconds; whether it came.

        Raises:
            ClosedError: if the manager is not open, or the feed was started before.
        """
        if self._stop is not None:
            raise ClosedError("a feed is started once; make a new one")
        self._manager.call(self._begin)
        return self._whole.wait(within)

    async def _begin(self) -> None:
        engine = self._manager.engine
        self._stop = engine.watch(self._told)
        engine.workers.spawn(self._until_closed, name="feed")

    async def _until_closed(self) -> None:
        try:
            await first_of(self._manager.engine.core.closing, self._closing)
        finally:
            self._end()

    def _told(self, changes: Sequence[tuple[PartId, int]]) -> None:
        if changes:
            self._index.apply(self._rank, changes)
        else:
            self._index.complete(self._rank)
            self._whole.set()

    def _end(self) -> None:
        stop, self._stop = self._stop, _nothing
        if stop is not None and stop is not _nothing:
            stop()
            self._index.lost(self._rank)

    def close(self) -> None:
        """Stop telling; the rank then counts as lost. Idempotent."""
        try:
            self._manager.call(self._ended)
        except TierKVError:  # the manager was closed, and this with it
            self._end()

    async def _ended(self) -> None:
        self._closing.set()
        self._end()


class SocketFeed:
    """Tells an index what the engine behind a socket holds, for as long as it is not closed.

    One thread serves all of a process's feeds, and tells their indexes. A connection that breaks
    is made again, with a back-off, and begins with a snapshot; in between the rank counts as lost.
    """

    def __init__(self, path: str | os.PathLike[str], index: Index, rank: int) -> None:
        self.path = Path(path).absolute()
        self._index = index
        self._rank = rank
        self._whole = threading.Event()
        self._hub: Hub | None = None

    def __repr__(self) -> str:
        return f"<SocketFeed of rank {self._rank} at {self.path}>"

    def start(self, within: float) -> bool:
        """Begin, and wait for the snapshot for at most ``within`` seconds; whether it came.

        Where nobody answers it goes on trying.

        Raises:
            ClosedError: if it was started before.
        """
        if self._hub is not None:
            raise ClosedError("a feed is started once; make a new one")
        self._hub = Hub.serve(self)
        return self._whole.wait(within)

    def close(self) -> None:
        """Stop; nothing is told after this returned. The rank then counts as lost. Idempotent."""
        if self._hub is not None:
            self._hub.remove(self)

    # ------------------------------------------------------------------ in the hub's thread

    def changed(self, changes: Sequence[tuple[PartId, int]]) -> None:
        """Pass changes on."""
        self._index.apply(self._rank, changes)

    def completed(self) -> None:
        """Pass on that the snapshot was whole."""
        self._index.complete(self._rank)
        self._whole.set()

    def broken(self) -> None:
        """Pass on that the connection is gone."""
        self._index.lost(self._rank)


def _nothing() -> None:
    pass
