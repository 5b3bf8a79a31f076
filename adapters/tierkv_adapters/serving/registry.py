"""Managers of this process, found by name: lent by an application, or opened by a rank.

A serving engine makes its connectors itself, from settings that are plain data. Where scheduler,
worker and application share one process, they still share one engine: an application *lends* its
manager under a token that travels in the settings, and a rank *announces* the manager that it
works with under its socket, where the scheduler's side looks for it before it opens the socket.

Nothing is found in a forked child: the engine's thread has stayed in the parent. Being found here
keeps no manager alive.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.blocking import CacheManager

__all__ = ["announce", "borrowed", "lend", "running", "withdraw"]

_guard = threading.Lock()
_managers: dict[str, tuple[int, weakref.ref[CacheManager]]] = {}


def lend(manager: CacheManager) -> str:
    """Lend a manager to the ranks of this process.

    Returns:
        The token under which :func:`borrowed` finds it.
    """
    token = f"manager:{uuid.uuid4()}"
    _put(token, manager)
    return token


def borrowed(token: str) -> CacheManager | None:
    """The manager that was lent under a token; None if it was lent in another process."""
    return _get(token)


def announce(socket: str, manager: CacheManager) -> None:
    """Tell which manager serves a socket; a later one takes its place."""
    _put(socket, manager)


def running(socket: str) -> CacheManager | None:
    """The manager of this process that serves a socket; None if another process does."""
    return _get(socket)


def withdraw(name: str) -> None:
    """Forget a token or socket. Idempotent."""
    with _guard:
        _managers.pop(name, None)


def _put(name: str, manager: CacheManager) -> None:
    with _guard:
        _managers[name] = os.getpid(), weakref.ref(manager)


def _get(name: str) -> CacheManager | None:
    with _guard:
        pid, manager = _managers.get(name, (0, None))
    return manager() if manager is not None and pid == os.getpid() else None
