"""The scheduler side's connection to one rank: residency comes in, holds are asked for."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from tierkv.errors import ClosedError
from tierkv_adapters.remote.client import RemoteManager
from tierkv_adapters.remote.feeds import LocalFeed, SocketFeed
from tierkv_adapters.serving.registry import running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocking import CacheManager
    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import Space
    from tierkv_adapters.serving.orders import RequestFacts
    from tierkv_adapters.serving.replicas import ReplicaIndex

__all__ = ["Held", "RankLink", "open_link"]

_HOLD_S: Final = 30.0  # a hold waits for disks: beyond this it ends with what it has


class Held(Protocol):
    """What a rank holds for us."""

    @property
    def blocks(self) -> int:
        """Leading blocks that are held."""
        ...

    @property
    def parts(self) -> Sequence[PartId]:
        """The parts that are held: those that a load of these blocks reads."""
        ...

    def release(self) -> None:
        """Give it back; idempotent."""
        ...


class RankLink(Protocol):
    """One rank. Called by the feed's threads, one call at a time for each of them."""

    def start(self, within: float) -> None:
        """Begin to hear what the rank holds; waits for all of it for at most ``within`` seconds."""
        ...

    def hold(self, space: Space, facts: RequestFacts, keys: Sequence[BlockKey]) -> Held:
        """Ask for the leading ones of these blocks; waits until they are in memory.

        Raises:
            TierKVError: if the rank does not answer, or is gone.
        """
        ...

    def close(self) -> None:
        """Let go of the rank, and of every hold."""
        ...


def open_link(path: str, index: ReplicaIndex, rank: int) -> RankLink:
    """Connect to a rank: directly if it is in this process, else through its socket.

    Raises:
        TierKVError: if it cannot be reached.
    """
    manager = running(path)
    if manager is not None:
        return _LocalLink(manager, index, rank)
    return _SocketLink(path, index, rank)


class _LocalHeld:
    def __init__(self, manager: CacheManager, hold: Any) -> None:
        self._manager = manager
        self._hold = hold
        self.blocks: int = hold.blocks
        self.parts: Sequence[PartId] = hold.parts

    def release(self) -> None:
        async def let_go() -> None:
            self._hold.release()

        with contextlib.suppress(ClosedError):  # the engine is closed, and every hold gone with it
            self._manager.submit(let_go)


class _LocalLink:
    """A rank of this process."""

    def __init__(self, manager: CacheManager, index: ReplicaIndex, rank: int) -> None:
        self._manager = manager
        self._feed = LocalFeed(manager, index, rank)

    def start(self, within: float) -> None:
        self._feed.start(within)

    def hold(self, space: Space, facts: RequestFacts, keys: Sequence[BlockKey]) -> Held:
        hold = partial(
            self._manager.engine.hold, tenant=facts.tenant, salt=facts.salt, deadline=_HOLD_S
        )
        return _LocalHeld(self._manager, self._manager.call(hold, space, keys))

    def close(self) -> None:
        self._feed.close()


class _SocketLink:
    """A rank of another process on this machine."""

    def __init__(self, path: str, index: ReplicaIndex, rank: int) -> None:
        self._remote = RemoteManager(path)
        self._feed = SocketFeed(path, index, rank)

    def start(self, within: float) -> None:
        self._feed.start(within)

    def hold(self, space: Space, facts: RequestFacts, keys: Sequence[BlockKey]) -> Held:
        return self._remote.hold(
            keys, space=space, tenant=facts.tenant, salt=facts.salt, deadline=_HOLD_S
        )

    def close(self) -> None:
        self._feed.close()
        self._remote.close()
