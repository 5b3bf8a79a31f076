"""Closing what is open when the interpreter ends, while there are threads to write with."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["at_exit", "not_at_exit"]

_log = logging.getLogger(__name__)
_guard = threading.Lock()
_closers: dict[int, tuple[int, weakref.WeakMethod[Callable[[], object]]]] = {}
_registered = False


def at_exit(close: Callable[[], object]) -> None:
    """Call a bound method when the interpreter ends, if its object is still there.

    Nothing durable may depend on it: a process can be killed. It spares what is still queued for
    a slower tier where a serving engine ends without telling its connectors.
    """
    global _registered
    with _guard:
        _closers[id(close.__self__)] = os.getpid(), weakref.WeakMethod(close)  # type: ignore[attr-defined]
        if not _registered:
            # plain atexit runs when the pools of threads are gone, and nothing can be written
            register = getattr(threading, "_register_atexit", atexit.register)
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end already
                register(_close_all)
            _registered = True


def not_at_exit(close: Callable[[], object]) -> None:
    """Undo :func:`at_exit`. Idempotent."""
    with _guard:
        _closers.pop(id(close.__self__), None)  # type: ignore[attr-defined]


def _close_all() -> None:
    with _guard:
        left = list(_closers.values())
        _closers.clear()
    for pid, reference in left:
        close = reference()
        if close is None or pid != os.getpid():  # a forked child has none of the threads
            continue
        try:
            close()
        except Exception:  # noqa: BLE001 - the others have to be closed all the same
            _log.exception("closing at the end of the interpreter failed")
