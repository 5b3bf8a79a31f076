"""The far end of an engine's socket, spoken to in bytes."""

from __future__ import annotations

import socket

from tierkv_adapters.remote import RemoteManager, RemoteServer
from tierkv_adapters.remote.wire import encode

__all__ = ["GUARD", "HELLO", "dial", "rest", "works"]

GUARD = 60.0
"""Seconds after which a hang is a failure."""

HELLO = encode({"op": "hello", "wire": 1})


def dial(server: RemoteServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(GUARD)
    sock.connect(server.path)
    return sock


def rest(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    out = b""
    try:
        while data := sock.recv(1 << 16):
            out += data
    except ConnectionError:
        pass
    finally:
        sock.close()
    return out


def works(server: RemoteServer) -> None:
    with RemoteManager(server.path) as client:
        assert client.health()["status"] == "open"
