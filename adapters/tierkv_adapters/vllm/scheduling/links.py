"""The scheduler side's line to a rank: what it holds comes in, and a reset goes out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from tierkv.errors import TierKVError
from tierkv_adapters.serving.registry import running

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierkv_adapters.serving.replicas import ReplicaIndex

__all__ = ["Link", "RankLink", "connect"]

_log = logging.getLogger(__name__)
_SNAPSHOT_WITHIN = 30.0


class Link(Protocol):
    """A line to one rank."""

    def reset(self) -> bool:
        """Empty the rank's tiers; whether it did."""
        ...

    def close(self) -> None:
        """Stop listening. Idempotent."""
        ...


class RankLink:
    """A feed of what a rank holds, and its engine.

    Args:
        number: The rank.
        feed: Keeps the index up to date; has ``close``.
        engine: Its manager, or a client of it; has ``reset`` (and ``close``, if it is a client).
        owned: Whether ``engine`` is this line's own, to be closed with it.
    """

    def __init__(self, number: int, feed: Any, engine: Any, owned: bool) -> None:
        self._number = number
        self._feed = feed
        self._engine = engine
        self._owned = owned

    def reset(self) -> bool:
        """Empty the rank's tiers; False, logged, if its engine cannot be reached or refuses."""
        try:
            self._engine.reset()
        except TierKVError as error:
            _log.warning("rank %d was not reset: %s", self._number, error)
            return False
        return True

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._feed.close()
        if self._owned:
            self._engine.close()


def connect(number: int, rank: Mapping[str, Any], index: ReplicaIndex) -> RankLink:
    """Connect to a rank: directly to a manager of this process, else through its socket.

    Waits a bounded time for the snapshot of what it holds; one that comes later is taken in then.

    Args:
        number: The rank.
        rank: What it told of itself (``socket``).
        index: Where what it holds is kept.
    """
    from tierkv_adapters.remote.client import RemoteManager
    from tierkv_adapters.remote.feeds import LocalFeed, SocketFeed

    socket = str(rank["socket"])
    manager = running(socket)
    if manager is not None:
        local = LocalFeed(manager, index, number)
        local.start(_SNAPSHOT_WITHIN)
        return RankLink(number, local, manager, owned=False)
    feed = SocketFeed(socket, index, number)
    feed.start(_SNAPSHOT_WITHIN)
    return RankLink(number, feed, RemoteManager(socket), owned=True)
