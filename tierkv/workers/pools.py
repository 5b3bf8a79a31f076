"""Threads that grow in number when all of them hang."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pool"]

_T = TypeVar("_T")


class Pool(ThreadPoolExecutor):
    """A thread pool that a medium which hangs cannot take away from everybody else.

    Args:
        threads: Threads as a rule.
        name: Beginning of their names.
        most: Threads in the worst case.
    """

    def __init__(self, threads: int, name: str, most: int) -> None:
        super().__init__(threads, name)
        self._most = most
        self._began: dict[object, float] = {}

    def start(self, fn: Callable[..., _T], *args: object) -> Future[_T]:
        """Run ``fn(*args)`` in one of its threads.

        Raises:
            RuntimeError: if the pool was shut down.
        """
        return self.submit(self._timed, fn, *args)

    def _timed(self, fn: Callable[..., _T], *args: object) -> _T:
        call = object()
        self._began[call] = time.monotonic()
        try:
            return fn(*args)
        finally:
            del self._began[call]

    def relieve(self, after: float) -> bool:
        """Add a thread if every one has been busy with the same call for ``after`` seconds.

        Returns:
            Whether one was added.
        """
        began = list(self._began.values())  # one step, whatever the threads do meanwhile
        long_ago = time.monotonic() - after
        stuck = len(began) >= self._max_workers and all(start <= long_ago for start in began)
        if not stuck or self._max_workers >= self._most:
            return False
        self._max_workers += 1
        self.submit(_nothing)  # the executor starts threads only when it is given work
        return True


def _nothing() -> None:
    pass
