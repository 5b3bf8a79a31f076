"""Engine-owned memory: an arena of pages, and a byte window over one.

Frames live in one anonymous mapping, page-aligned, so that they can be read and written with
O_DIRECT and handed to codecs without a copy. A buffer is a run of whole 4 KiB pages found by best
fit; neighbours merge when they are released. Less than a page is lost inside a buffer. Slabs of
size classes were measured too: with frames of mixed size under eviction they leave 58-87 % of
the memory usable at the first refusal, best fit 87-94 %, and a frame costs microseconds either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tierkv.errors import CapacityError, ClosedError
from tierkv.extents import Extent, PageRuns

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import Buffer

__all__ = ["Arena", "ArenaBuffer", "Staging", "StagingHeldError"]

_PAGE: Final = 4096
_TOUCH_STEP: Final = 2 << 20  # madvise holds the GIL: about 3 ms a step
_POISON: Final = 0xDB
_NORESERVE: Final = 0x4000  # MAP_NORESERVE; not named by the mmap module before 3.13
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; not named by the mmap module


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // _PAGE))


class ArenaBuffer:
    """A :class:`tierkv.abc.Buffer` inside an :class:`Arena`."""

    __slots__ = ("_arena", "_extent", "_first", "nbytes")

    def __init__(self, arena: Arena, nbytes: int, extent: Extent) -> None:
        self.nbytes = nbytes
        self._arena: Arena | None = arena
        self._extent = extent
        self._first = extent.start * _PAGE

    def __repr__(self) -> str:
        state = "released" if self._arena is None else f"page {self._extent.start}"
        return f"<ArenaBuffer {self.nbytes} bytes, {state}>"

    @property
    def memory(self) -> memoryview:
        """The requested bytes, writable.

        Raises:
            ClosedError: if the buffer was released: its memory may be somebody else's by now.
        """
        arena = self._arena
        if arena is None:
            return self._slice(0)  # which tells
        return arena._memory[self._first : self._first + self.nbytes]

    @property
    def padded(self) -> memoryview:
        """The same memory, rounded up to 4 KiB.

        Raises:
            ClosedError: if the buffer was released.
        """
        return self._slice(_pages(self.nbytes) * _PAGE)

    def release(self) -> None:
        """Give the memory back; idempotent, callable from any thread."""
        arena = self._arena
        if arena is not None:
            arena._release(self)

    def _slice(self, nbytes: int) -> memoryview:
        arena = self._arena
        if arena is None:
            raise ClosedError("this buffer was released; take a new one from its arena")
        return arena._memory[self._first : self._first + nbytes]


class Arena:
    """Page-aligned memory of a fixed size, carved into buffers. Thread-safe.

    The mapping is reserved at once and becomes real page by page, on first use or by
    :meth:`touch`. With ``TIERKV_DEBUG=1`` released memory is filled with 0xDB.

    Args:
        capacity: Bytes; rounded down to whole 4 KiB pages.

    Raises:
        CapacityError: if the capacity is less than a page, or cannot be mapped.
    """

    def __init__(self, capacity: int) -> None:
        total = capacity // _PAGE
        if total < 1:
            raise CapacityError(f"an arena needs at least {_PAGE} bytes, not {capacity}")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, total * _PAGE, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(f"cannot map {capacity} bytes of memory: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._map)
        self._lock = threading.Lock()
        self._runs = PageRuns()
        self._runs.give(Extent(0, total))
        self._total = total
        self._touched = 0
        self._poison = os.environ.get("TIERKV_DEBUG") == "1"

    def __repr__(self) -> str:
        return f"<Arena {self.used} of {self.capacity} bytes used>"

    @property
    def capacity(self) -> int:
        """Bytes in all."""
        return self._total * _PAGE

    @property
    def whole(self) -> memoryview:
        """All of its memory, whoever has pieces of it: for pinning, not for reading or writing."""
        return self._memory

    @property
    def used(self) -> int:
        """Bytes of the pages that are out."""
        return (self._total - self._runs.free) * _PAGE

    @staticmethod
    def charge(nbytes: int) -> int:
        """Bytes that a buffer of ``nbytes`` takes: whole pages, at least one."""
        return _pages(nbytes) * _PAGE

    def allocate(self, nbytes: int) -> ArenaBuffer | None:
        """Return a buffer, or None if no free run is long enough.

        The contents are undefined.
        """
        with self._lock:
            extent = self._runs.take(_pages(nbytes))
        return None if extent is None else ArenaBuffer(self, nbytes, extent)

    def touch(self, nbytes: int) -> int:
        """Make up to ``nbytes`` further bytes real memory, lowest addresses first.

        Contents are kept. The first touch of memory runs at a tenth of the speed of a copy, so
        do it ahead of need, in a worker thread (about 1.5 s a GiB).

        Returns:
            Bytes touched; 0 once everything is, or where the kernel (before 5.14) cannot.
        """
        done = 0
        while done < nbytes:
            with self._lock:
                start = self._touched
                length = min(_TOUCH_STEP, _pages(nbytes - done) * _PAGE, self.capacity - start)
                if length <= 0:
                    break
                self._touched += length
            try:
                self._map.madvise(_POPULATE_WRITE, start, length)
            except OSError:
                break
            done += length
        return done

    def _release(self, buffer: ArenaBuffer) -> None:
        with self._lock:
            if buffer._arena is None:
                return
            buffer._arena = None
            extent = buffer._extent
            if not self._poison:
                self._runs.give(extent)
                return
        whole = self._memory[extent.start * _PAGE : (extent.start + extent.pages) * _PAGE]
        np.frombuffer(whole, np.uint8).fill(_POISON)
        with self._lock:
            self._runs.give(extent)


class _Grant:
    """A staging buffer: wakes the next waiter when it is released."""

    __slots__ = ("_inner", "_released", "_staging", "background", "nbytes")

    def __init__(self, staging: Staging, inner: ArenaBuffer, background: bool) -> None:
        self.nbytes = inner.nbytes
        self.background = background
        self._staging = staging
        self._inner = inner
        self._released = False

    @property
    def memory(self) -> memoryview:
        return self._inner.memory

    @property
    def padded(self) -> memoryview:
        return self._inner.padded

    def release(self) -> None:
        self._staging._give_back(self)


class StagingHeldError(CapacityError):
    """Who waited for staging memory gave up: a tier that does not answer holds it."""


class _Waiter(NamedTuple):
    nbytes: int
    future: asyncio.Future[_Grant]


class Staging:
    """A bounded window of staging memory, shared by what is waited for and what is not.

    Who waits on somebody's behalf is served first, in order of arrival; *background* users come
    after all of them and hold at most half of the window, so that the next load or store never
    waits for a queue of writes. (A single piece larger than that half is given out alone.)

    ``acquire`` and ``acquire_nowait`` belong to one event loop; buffers may be released from any
    thread.

    Args:
        limit: Bytes that may be out at once, page rounding included.

    Attributes:
        patience: Seconds that somebody waits for memory, if it is held by what will not end.
        held_up: Whether there is such a thing now.

    Raises:
        CapacityError: if the limit is less than a page.
    """

    def __init__(self, limit: int) -> None:
        self.patience = 10.0
        self.held_up: Callable[[], bool] = bool
        self._arena = Arena(limit)
        self._share = self._arena.capacity // 2
        self._waiters: dict[bool, deque[_Waiter]] = {False: deque(), True: deque()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._background = 0

    def __repr__(self) -> str:
        return f"<Staging {self.used} of {self.limit} bytes used, {self.waiting} waiting>"

    @property
    def limit(self) -> int:
        """Bytes in all."""
        return self._arena.capacity

    @property
    def whole(self) -> memoryview:
        """All of its memory, as :attr:`Arena.whole`."""
        return self._arena.whole

    @property
    def used(self) -> int:
        """Bytes that are out."""
        return self._arena.used

    @property
    def background_used(self) -> int:
        """Bytes that background users hold."""
        return self._background

    @property
    def waiting(self) -> int:
        """Tasks waiting in :meth:`acquire`."""
        return sum(map(len, self._waiters.values()))

    def acquire_nowait(self, nbytes: int, *, background: bool = False) -> Buffer | None:
        """Return a buffer, or None if there is no room now or somebody to be served first waits.

        Raises:
            CapacityError: if ``nbytes`` can never fit.
        """
        if self._arena.charge(nbytes) > self.limit:
            raise CapacityError(
                f"{nbytes} bytes never fit a staging window of {self.limit}; raise `staging`"
            )
        first = self._waiters[False] or (background and self._waiters[True])
        return None if first else self._try(nbytes, background)

    async def acquire(self, nbytes: int, *, background: bool = False) -> Buffer:
        """Wait for a buffer, first come first served within each of the two kinds of users.

        Cancelling a waiter is safe: it holds nothing afterwards, and nobody behind it is stuck.

        Raises:
            CapacityError: if ``nbytes`` can never fit.
            StagingHeldError: if it took longer than :attr:`patience`, and a tier hangs. Background
                users wait on: nobody waits for them.
        """
        grant = self.acquire_nowait(nbytes, background=background)
        if grant is not None:
            return grant
        loop = self._loop = asyncio.get_running_loop()
        entry = _Waiter(nbytes, loop.create_future())
        queue = self._waiters[background]
        queue.append(entry)
        self._serve()  # a thread may have released memory just before we queued up
        timer = None if background else loop.call_later(self.patience, self._look_at, entry)
        try:
            return await entry.future
        except BaseException:
            if entry in queue:
                queue.remove(entry)
            elif not entry.future.cancelled():
                entry.future.result().release()  # granted in the turn in which we were cancelled
            self._serve()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _look_at(self, entry: _Waiter) -> None:
        """Let somebody who has waited for long go, if a tier hangs; else look again later."""
        if entry.future.done():
            return
        if self.held_up():
            why = f"a tier that hangs holds staging memory, {entry.nbytes} bytes are wanted"
            entry.future.set_exception(StagingHeldError(why))
        elif self._loop is not None:
            self._loop.call_later(self.patience, self._look_at, entry)

    def _try(self, nbytes: int, background: bool) -> _Grant | None:
        size = self._arena.charge(nbytes)
        with self._lock:
            if background and self._background and self._background + size > self._share:
                return None
            inner = self._arena.allocate(nbytes)
            if inner is None:
                return None
            self._background += size * background
        return _Grant(self, inner, background)

    def _serve(self) -> None:
        for background, queue in self._waiters.items():  # what is waited for comes first
            while queue:
                if queue[0].future.done():  # cancelled; its task has not run yet
                    queue.popleft()
                    continue
                grant = self._try(queue[0].nbytes, background)
                if grant is None:
                    return
                queue.popleft().future.set_result(grant)

    def _give_back(self, grant: _Grant) -> None:
        with self._lock:
            if grant._released:
                return
            grant._released = True
            self._background -= self._arena.charge(grant.nbytes) * grant.background
        grant._inner.release()
        if not self.waiting or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._serve)
