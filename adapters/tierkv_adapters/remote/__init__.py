"""An engine that lives in another process of the same user, through a unix socket.

The process that has the KV serves its manager with a
:class:`~tierkv_adapters.remote.server.RemoteServer`; others ask it with a
:class:`~tierkv_adapters.remote.client.RemoteManager`, which has the session calls of a
:class:`~tierkv.blocking.CacheManager`, or hear what it holds through a
:class:`~tierkv_adapters.remote.feeds.SocketFeed`. KV itself never passes through the socket.

The socket is for its owner alone: the folder is 0700, the socket 0600, and both ends compare the
other's user id, as the kernel tells it, before they say anything. What is said is JSON and arrays
of fixed layout, bounded in length; nothing is unpickled.
"""

from tierkv_adapters.remote.client import RemoteHold, RemoteManager
from tierkv_adapters.remote.feeds import LocalFeed, SocketFeed
from tierkv_adapters.remote.server import RemoteServer

__all__ = ["LocalFeed", "RemoteHold", "RemoteManager", "RemoteServer", "SocketFeed"]
