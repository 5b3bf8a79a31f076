"""Large batches in several threads: one thread alone leaves a fast medium waiting between calls."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from tierkv.errors import ClosedError
from tierkv.workers import Signal
from tierkv_backends.nvme.transfer import PAGE, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierkv.abc import Threads

__all__ = ["DEPTH", "SHARD", "Hops", "split"]

_T = TypeVar("_T")
DEPTH: Final = 2
"""Threads that one tier keeps busy; two keep a disk busy, and the engine's others stay free."""
SHARD: Final = 8 << 20
"""Bytes below which a shard of its own costs more than it saves."""


class Hops:
    """The calls of one backend into worker threads.

    Attributes:
        under_way: Calls that somebody waits for.
        inside: Calls that a thread is in; a thread that hangs may be given up by who waits.
        hops: Calls so far.
        shards: Of these, parts of batches that were split.
        given_up: Whether the tier was closed over calls that hang.
    """

    def __init__(self, threads: Threads) -> None:
        self.under_way = 0
        self.inside = 0
        self.hops = 0
        self.shards = 0
        self.given_up = False
        self._threads = threads
        self._lock = threading.Lock()
        self._idle: Signal | None = None
        self._last: Callable[[], object] | None = None
        self._left = False

    async def run(self, fn: Callable[..., _T], *args: object) -> _T:
        """Run ``fn(*args)`` in a worker thread; see :meth:`tierkv.abc.Threads.run`."""
        self.hops += 1
        with self.busy():
            return await self._threads.run(self._in_thread, fn, args)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count as a call under way, for what takes other ways than a worker thread."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way and self._idle is not None:
                self._idle.set()
            self._leave()

    async def spread(self, fn: Callable[..., object], shards: Sequence[object]) -> None:
        """Run ``fn(shard)`` for each shard, side by side; ends when all have ended.

        Cancellation: shards that no thread has taken up are never run; it is re-raised once the
        others are done.

        Raises:
            BaseException: what the first shard that failed raised.
        """
        if len(shards) == 1:
            await self.run(fn, shards[0])
            return
        failed: list[BaseException] = []

        async def one(shard: object) -> None:
            try:
                await self.run(fn, shard)
            except Exception as error:  # noqa: BLE001 - raised below, when all threads are done
                failed.append(error)

        self.shards += len(shards)
        async with anyio.create_task_group() as group:
            for shard in shards[1:]:
                group.start_soon(one, shard)
            await one(shards[0])
        if failed:
            raise failed[0]

    def depth(self, nbytes: int) -> int:
        """Into how many shards a batch of ``nbytes`` is split now; 1: do not split it."""
        return max(1, min(DEPTH - self.under_way, nbytes // SHARD))

    async def settle(self, within: float) -> bool:
        """Wait at most ``within`` seconds until no call is under way; whether none is.

        Cancellation: re-raised at the end.
        """
        if not self.under_way:
            return True
        self._idle = Signal()
        try:
            return await self._idle.outlast(within)
        finally:
            self.given_up = self.under_way > 0

    def afterwards(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` once no call is under way and no thread is in one: now, or in the last one.

        No call gets through from then on.
        """
        self._last = fn
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            if self._last is None or self.under_way or self.inside:
                return
            last, self._last, self._left = self._last, None, True
        last()

    def _in_thread(self, fn: Callable[..., _T], args: Sequence[object]) -> _T:
        with self._lock:
            if self._left:  # its descriptors may be another file's by now
                raise ClosedError("the tier is closed")
            self.inside += 1
        try:
            return fn(*args)
        finally:
            with self._lock:
                self.inside -= 1
            self._leave()


def split(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Cut pieces into up to ``count`` shards of about equal bytes, each a run of the address space.

    Cuts lie at page boundaries of the files, so that no page belongs to two shards.

    >>> page = memoryview(bytearray(4 * PAGE))
    >>> [[(p.offset, len(p.memory)) for p in shard] for shard in split([Piece(0, 3, 0, page)], 2)]
    [[(0, 8192)], [(8192, 8192)]]
    """
    ordered = sorted(pieces, key=lambda piece: (piece.fd, piece.offset))
    total = sum(len(piece.memory) for piece in ordered)
    goal = max(PAGE, -(-total // max(1, count)))
    shards: list[list[Piece]] = [[]]
    room = goal
    for piece in ordered:
        item, fd, offset, memory = piece
        while len(memory) > room and len(shards) < count:
            cut = (offset + room) // PAGE * PAGE - offset
            if cut > 0:
                shards[-1].append(Piece(item, fd, offset, memory[:cut]))
                offset, memory = offset + cut, memory[cut:]
            shards.append([])
            room = goal
        shards[-1].append(Piece(item, fd, offset, memory))
        room -= len(memory)
    return [shard for shard in shards if shard]
