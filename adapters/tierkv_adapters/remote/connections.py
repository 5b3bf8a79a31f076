"""Blocking connections to a server: one request at a time on each, as many as callers need."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import ClosedError, ConfigError
from tierkv_adapters.remote.records import error_from
from tierkv_adapters.remote.wire import WIRE, FrameReader, WireError, encode, peer_is_me

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ANSWER_S", "Connection", "Connections", "dial"]

ANSWER_S: Final = 30.0
"""Seconds within which a server answers what does not wait for anything."""
_PAUSES_S: Final = (0.0, 0.05, 0.1, 0.2, 0.4)
_IDLE: Final = 8
_CHUNK: Final = 1 << 18
_FORKED: Final = (
    "this process was forked after the connection was made: connect anew here, with an object of "
    "its own"
)


def dial(path: Path, within: float | None) -> socket.socket:
    """Connect to a server of this user; its socket waits for ``within`` seconds at most.

    Raises:
        OSError: if nobody listens there.
        ConfigError: if whoever does is another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(within)
        sock.connect(str(path))
        if not peer_is_me(sock):
            raise ConfigError(f"{path}: whoever listens there runs as another user")
    except BaseException:
        sock.close()
        raise
    return sock


class Connection:
    """One connection. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frames = FrameReader()
        self._sock = dial(path, ANSWER_S)
        try:
            hello, _ = self.ask({"op": "hello", "wire": WIRE})
        except BaseException:
            self._sock.close()
            raise
        self.line = str(hello.get("line"))
        self.instance = str(hello.get("instance"))

    def close(self) -> None:
        """End it. Idempotent."""
        self._sock.close()

    def is_stale(self) -> bool:
        """Whether the server has closed it, or it holds what nobody asked for."""
        try:
            self._sock.setblocking(False)
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def ask(
        self, header: dict[str, Any], body: bytes = b"", within: float | None = ANSWER_S
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for the answer, for ``within`` seconds at most.

        Raises:
            OSError: if the connection broke, or no answer came in time. It is of no further use.
            WireError: if the answer is none.
            TierKVError: what the server says.
        """
        data = encode(header, body)
        self._sock.settimeout(within)
        self._sock.sendall(data)
        while True:
            data = self._sock.recv(_CHUNK)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            for answer, rest in self._frames.feed(data):
                if answer.get("ok") is not True:
                    raise error_from(answer.get("error"))
                return answer, rest


class Connections:
    """A pool of connections to one server; thread-safe.

    A connection that broke is replaced: callers try for about a second while a server starts
    again, and once each when they know that it is down.

    Args:
        path: Of its socket.
        renewed: Called with the first connection to another server than before.
    """

    def __init__(self, path: Path, renewed: Callable[[Connection], None]) -> None:
        self._path = path
        self._renewed = renewed
        self._pid = os.getpid()
        self._idle: deque[Connection] = deque()  # its own methods are atomic: no lock
        self._instance: str | None = None
        self._down = False
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Close the idle ones, and each other once it is given back. Idempotent."""
        self._closed = True
        while (connection := self._pop()) is not None:
            connection.close()

    def take(self) -> Connection:
        """A connection of one's own, until it is given back or closed.

        Raises:
            ClosedError: if no server answers, this was closed, or the process was forked.
            ConfigError: if the server is another user's, or of another version.
        """
        self.check()
        while (connection := self._pop()) is not None:
            if not connection.is_stale():
                return connection
            connection.close()
        return self._connect()

    def give_back(self, connection: Connection) -> None:
        """Take back what :meth:`take` gave, in working order."""
        if len(self._idle) >= _IDLE:
            connection.close()
            return
        self._idle.append(connection)
        if self._closed:  # perhaps just now
            self.close()

    def check(self) -> None:
        """Raise if this cannot be used.

        Raises:
            ClosedError: if it was closed, or the process was forked.
        """
        if self._pid != os.getpid():
            raise ClosedError(_FORKED)
        if self._closed:
            raise ClosedError(f"the connection to the engine at {self._path} was closed")

    def gone(self, error: BaseException) -> ClosedError:
        """What a caller is told when the server does not answer."""
        return ClosedError(f"the engine at {self._path} is gone ({error})")

    def _pop(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self) -> Connection:
        failure: BaseException | None = None
        for pause in _PAUSES_S[: 1 if self._down else None]:
            time.sleep(pause)
            self.check()
            try:
                connection = Connection(self._path)
            except (OSError, WireError) as error:
                failure = error
                continue
            self._down = False
            if self._instance not in (None, connection.instance):
                try:
                    self._renewed(connection)
                except (OSError, WireError) as error:  # gone again
                    connection.close()
                    failure = error
                    continue
            self._instance = connection.instance  # now: no other thread comes before that is done
            return connection
        self._down = True
        assert failure is not None
        raise self.gone(failure) from failure
