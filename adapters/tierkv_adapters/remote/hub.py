"""The one thread that reads all of a process's feeds."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from tierkv.errors import TierKVError
from tierkv_adapters.remote.connections import dial
from tierkv_adapters.remote.records import error_from
from tierkv_adapters.remote.wire import WIRE, FrameReader, WireError, encode, unpack_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.blocks import PartId

__all__ = ["Fed", "Hub"]

_log = logging.getLogger("tierkv.remote")
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_LASTING: Final = 9  # tries after which an outage is no mere end, or restart: about ten seconds
_CHUNK: Final = 1 << 18
_JOIN_S: Final = 30.0
_DIAL_S: Final = 1.0
_GREETINGS: Final = 2  # answers to hello and subscribe


class Fed(Protocol):
    """A feed, as the hub sees it; called in the hub's thread."""

    path: Path

    def changed(self, changes: Sequence[tuple[PartId, int]]) -> None:
        """Take in changes."""

    def completed(self) -> None:
        """Take in that the snapshot was whole."""

    def broken(self) -> None:
        """Take in that the connection is gone."""


class _Link:
    """One feed's connection, or the wait for the next try."""

    def __init__(self, feed: Fed) -> None:
        self.feed = feed
        self.sock: socket.socket | None = None
        self.due = 0.0
        self.failures = 0
        self.frames = FrameReader()
        self.greeted = 0  # answers to what was said at the start


class Hub:
    """Connects, reads and connects anew, for any number of feeds, in one thread.

    The thread lives while there are feeds.
    """

    _one: Hub | None = None
    _guard = threading.Lock()  # of the hub of this process, and of what it is asked to do

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._links: dict[Fed, _Link] = {}
        self._todo: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tierkv-feeds", daemon=True)

    # ------------------------------------------------------------------ from other threads

    @classmethod
    def serve(cls, feed: Fed) -> Hub:
        """Begin to read for a feed; returns the hub that does.

        A forked child gets a hub of its own.
        """
        with cls._guard:
            hub = cls._one
            if hub is None or hub._pid != os.getpid():
                hub = cls._one = Hub()
                hub._thread.start()
            hub._todo.append(lambda: hub._links.update({feed: _Link(feed)}))
            hub._ring()
            return hub

    @classmethod
    def forked(cls) -> None:
        """Forget the parent's hub, whose thread is not here."""
        cls._one, cls._guard = None, threading.Lock()

    def remove(self, feed: Fed) -> None:
        """Stop reading for a feed; it is told nothing after this returned. Idempotent."""
        if self._pid != os.getpid():
            return
        if threading.current_thread() is self._thread:
            self._drop(feed)
            return
        done = threading.Event()

        def drop() -> None:
            self._drop(feed)
            done.set()

        with self._guard:
            if Hub._one is not self:
                return  # it ended with its last feed
            self._todo.append(drop)
            self._ring()
        if not done.wait(_JOIN_S):
            _log.error("the thread of the feeds hangs: an index may still be told something")

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been rung already
            self._rope.send(b"!")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._do_what_is_asked():
                self._connect_those_due()
                for key, _ in self._selector.select(self._pause()):
                    if key.data is None:
                        self._bell.recv(_CHUNK)
                    else:
                        self._guarded(key.data, self._read)
        finally:
            self._selector.close()
            self._bell.close()
            self._rope.close()

    def _do_what_is_asked(self) -> bool:
        """Add and drop feeds; False once there are none, which is final."""
        while True:
            with Hub._guard:
                todo, self._todo = self._todo, []
                if not todo and not self._links:
                    Hub._one = None
                    return False
            if not todo:
                return True
            for fn in todo:
                fn()

    def _pause(self) -> float | None:
        dues = [link.due for link in self._links.values() if link.sock is None]
        return max(min(dues) - time.monotonic(), 0.0) if dues else None

    def _connect_those_due(self) -> None:
        now = time.monotonic()
        for link in list(self._links.values()):
            if link.sock is None and link.due <= now:
                self._guarded(link, self._connect)

    def _guarded(self, link: _Link, fn: Callable[[_Link], None]) -> None:
        try:
            fn(link)
        except (OSError, TierKVError) as error:
            self._fail(link, error)
        except Exception as error:  # noqa: BLE001 - an index that fails must not end other feeds
            _log.exception("who is told what a rank holds failed")
            self._fail(link, error)

    def _connect(self, link: _Link) -> None:
        sock = dial(link.feed.path, _DIAL_S)
        try:
            sock.sendall(encode({"op": "hello", "wire": WIRE}) + encode({"op": "subscribe"}))
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, link)
        except BaseException:
            sock.close()
            raise
        link.sock, link.frames, link.greeted = sock, FrameReader(), 0

    def _read(self, link: _Link) -> None:
        if link.sock is None:
            return  # dropped by what was told to another feed
        data = link.sock.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("the engine closed the connection")
        for header, body in link.frames.feed(data):
            self._take(link, header, body)
            if link.sock is None:
                return

    def _take(self, link: _Link, header: dict[str, Any], body: bytes) -> None:
        if link.greeted < _GREETINGS:
            if header.get("ok") is not True:
                raise error_from(header.get("error"))
            link.greeted += 1
        elif header.get("on") == "changes":
            link.feed.changed(unpack_changes(body))
        elif header.get("on") == "complete":
            link.failures = 0
            link.feed.completed()
        else:
            raise WireError("a feed was told something that is no news of parts")

    def _fail(self, link: _Link, error: BaseException) -> None:
        cut = isinstance(error, OSError)  # as when both sides of a serving engine end
        if link.failures == 0:
            level = logging.INFO if cut else logging.WARNING
            _log.log(level, "the feed at %s is broken, and tried again: %s", link.feed.path, error)
        elif link.failures == _LASTING and cut:
            _log.warning("nothing answers at %s for a while now: %s", link.feed.path, error)
        link.due = time.monotonic() + _PAUSES_S[min(link.failures, len(_PAUSES_S) - 1)]
        link.failures += 1
        self._disconnect(link)

    def _drop(self, feed: Fed) -> None:
        link = self._links.pop(feed, None)
        if link is not None:
            self._disconnect(link)

    def _disconnect(self, link: _Link) -> None:
        if link.sock is not None:
            self._selector.unregister(link.sock)
            link.sock.close()
            link.sock = None
        try:
            link.feed.broken()
        except Exception:  # noqa: BLE001 - nor here
            _log.exception("who is told what a rank holds failed")


os.register_at_fork(after_in_child=Hub.forked)
