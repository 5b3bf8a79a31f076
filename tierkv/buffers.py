"""Engine-owned memory: an arena of pages in size classes, and a byte window over one.

Frames live in one anonymous mapping, page-aligned, so that they can be read and written with
O_DIRECT and handed to codecs without a copy. Small frames are cut from *slabs* (runs of equal
chunks), large ones are runs of whole pages found by best fit; an empty slab returns to the common
pool, so a change of frame sizes wears out. Sizes are rounded up to one of eight classes an
octave: at most 12.5 % is lost inside a chunk, beside the rounding to 4 KiB pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from tierkv.errors import CapacityError, ClosedError
from tierkv.extents import Extent, PageRuns

if TYPE_CHECKING:
    from tierkv.abc import Buffer

__all__ = ["Arena", "ArenaBuffer", "Staging"]

_PAGE: Final = 4096
_SLAB: Final = 2 << 20
_TOUCH_STEP: Final = 2 << 20  # madvise holds the GIL: about 3 ms a step
_POISON: Final = 0xDB
_NORESERVE: Final = 0x4000  # MAP_NORESERVE; not named by the mmap module before 3.13
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; not named by the mmap module


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // _PAGE))


def _slab_pages(capacity: int, slab_bytes: int) -> int:
    return max(8, min(slab_bytes // _PAGE, capacity // _PAGE // 16))


def _class(pages: int, slab_pages: int) -> int:
    """Pages of the chunk that ``pages`` pages are put into."""
    if pages <= 8 or pages > slab_pages // 8:
        return pages
    step = 1 << ((pages - 1).bit_length() - 4)
    return -(-pages // step) * step


class _Slab:
    """A run of equal chunks; ``vacant`` holds the first pages of the free ones."""

    __slots__ = ("chunk", "chunks", "start", "vacant")

    def __init__(self, extent: Extent, chunk: int) -> None:
        self.start = extent.start
        self.chunk = chunk
        self.chunks = extent.pages // chunk
        self.vacant = list(
            range(extent.start + (self.chunks - 1) * chunk, extent.start - 1, -chunk)
        )


class ArenaBuffer:
    """A :class:`tierkv.abc.Buffer` inside an :class:`Arena`."""

    __slots__ = ("_arena", "_pages", "_slab", "_start", "nbytes")

    def __init__(
        self, arena: Arena, nbytes: int, start: int, pages: int, slab: _Slab | None
    ) -> None:
        self.nbytes = nbytes
        self._arena: Arena | None = arena
        self._start = start
        self._pages = pages
        self._slab = slab

    def __repr__(self) -> str:
        state = "released" if self._arena is None else f"page {self._start}"
        return f"<ArenaBuffer {self.nbytes} bytes, {state}>"

    @property
    def memory(self) -> memoryview:
        """The requested bytes, writable.

        Raises:
            ClosedError: if the buffer was released: its memory may be somebody else's by now.
        """
        return self._slice(self.nbytes)

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
        first = self._start * _PAGE
        return arena._memory[first : first + nbytes]


class Arena:
    """Page-aligned memory of a fixed size, carved into buffers. Thread-safe.

    The mapping is reserved at once and becomes real page by page, on first use or by
    :meth:`touch`. With ``TIERKV_DEBUG=1`` released memory is filled with 0xDB.

    Args:
        capacity: Bytes; rounded down to whole 4 KiB pages.
        slab_bytes: Length of the slabs that small frames are cut from; at most 1/16 of the
            capacity, so that one frame size cannot claim a small arena for itself.

    Raises:
        CapacityError: if the capacity is less than a page, or cannot be mapped.
    """

    def __init__(self, capacity: int, *, slab_bytes: int = _SLAB) -> None:
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
        self._partial: dict[int, dict[_Slab, None]] = {}  # chunk pages -> slabs with a vacancy
        self._slab_pages = _slab_pages(capacity, slab_bytes)
        self._total = total
        self._used = 0
        self._touched = 0
        self._poison = os.environ.get("TIERKV_DEBUG") == "1"

    def __repr__(self) -> str:
        return f"<Arena {self.used} of {self.capacity} bytes used>"

    @property
    def capacity(self) -> int:
        """Bytes in all."""
        return self._total * _PAGE

    @property
    def used(self) -> int:
        """Bytes of the chunks that are out, rounding included."""
        return self._used * _PAGE

    def charge(self, nbytes: int) -> int:
        """Bytes that a buffer of ``nbytes`` takes: its size class."""
        return _class(_pages(nbytes), self._slab_pages) * _PAGE

    @staticmethod
    def charge_in(capacity: int, nbytes: int) -> int:
        """:meth:`charge` of an arena of ``capacity`` bytes that is not made yet."""
        return _class(_pages(nbytes), _slab_pages(capacity, _SLAB)) * _PAGE

    def allocate(self, nbytes: int) -> ArenaBuffer | None:
        """Return a buffer, or None if no chunk of its class and no free run is left.

        The contents are undefined.
        """
        pages = _class(_pages(nbytes), self._slab_pages)
        with self._lock:
            slab = None
            if pages > self._slab_pages // 8:
                extent = self._runs.take(pages)
                if extent is None:
                    return None
                start = extent.start
            else:
                slab = self._slab_with_room(pages)
                if slab is None:
                    return None
                pages = slab.chunk
                start = slab.vacant.pop()
                if not slab.vacant:
                    self._forget(slab)
            self._used += pages
        return ArenaBuffer(self, nbytes, start, pages, slab)

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

    def _slab_with_room(self, chunk: int) -> _Slab | None:
        slabs = self._partial.get(chunk)
        if slabs:
            return next(iter(slabs))
        count = self._slab_pages // chunk
        while count:  # a shorter slab where no run is long enough: nothing is refused for that
            extent = self._runs.take(count * chunk)
            if extent is not None:
                slab = _Slab(extent, chunk)
                self._partial.setdefault(chunk, {})[slab] = None
                return slab
            count //= 2
        # a vacancy of a somewhat larger class is better than a refusal
        larger = [size for size in self._partial if chunk < size <= 2 * chunk]
        return next(iter(self._partial[min(larger)])) if larger else None

    def _forget(self, slab: _Slab) -> None:
        slabs = self._partial[slab.chunk]
        del slabs[slab]
        if not slabs:
            del self._partial[slab.chunk]

    def _release(self, buffer: ArenaBuffer) -> None:
        with self._lock:
            if buffer._arena is None:
                return
            buffer._arena = None
        if self._poison:
            first = buffer._start * _PAGE
            whole = self._memory[first : first + buffer._pages * _PAGE]
            np.frombuffer(whole, np.uint8).fill(_POISON)
        with self._lock:
            self._used -= buffer._pages
            slab = buffer._slab
            if slab is None:
                self._runs.give(Extent(buffer._start, buffer._pages))
                return
            slab.vacant.append(buffer._start)
            if len(slab.vacant) == slab.chunks:
                if slab.chunks > 1:
                    self._forget(slab)
                self._runs.give(Extent(slab.start, slab.chunks * slab.chunk))
            elif len(slab.vacant) == 1:
                self._partial.setdefault(slab.chunk, {})[slab] = None


class _Grant:
    """A staging buffer: wakes the next waiter when it is released."""

    __slots__ = ("_inner", "_staging", "nbytes")

    def __init__(self, staging: Staging, inner: ArenaBuffer) -> None:
        self.nbytes = inner.nbytes
        self._staging = staging
        self._inner = inner

    @property
    def memory(self) -> memoryview:
        return self._inner.memory

    @property
    def padded(self) -> memoryview:
        return self._inner.padded

    def release(self) -> None:
        self._inner.release()
        self._staging._released()


class Staging:
    """A bounded window of staging memory; waiters are served in order of arrival.

    ``acquire`` and ``acquire_nowait`` belong to one event loop; buffers may be released from any
    thread.

    Args:
        limit: Bytes that may be out at once, page rounding included.

    Raises:
        CapacityError: if the limit is less than a page.
    """

    def __init__(self, limit: int) -> None:
        self._arena = Arena(limit)
        self._waiters: deque[tuple[int, asyncio.Future[_Grant]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<Staging {self.used} of {self.limit} bytes used, {self.waiting} waiting>"

    @property
    def limit(self) -> int:
        """Bytes in all."""
        return self._arena.capacity

    @property
    def used(self) -> int:
        """Bytes that are out."""
        return self._arena.used

    @property
    def waiting(self) -> int:
        """Tasks waiting in :meth:`acquire`."""
        return len(self._waiters)

    def acquire_nowait(self, nbytes: int) -> Buffer | None:
        """Return a buffer, or None if there is no room now or somebody waits already.

        Raises:
            CapacityError: if ``nbytes`` can never fit.
        """
        self._check(nbytes)
        return None if self._waiters else self._try(nbytes)

    async def acquire(self, nbytes: int) -> Buffer:
        """Wait for a buffer, first come first served.

        Cancelling a waiter is safe: it holds nothing afterwards, and nobody behind it is stuck.

        Raises:
            CapacityError: if ``nbytes`` can never fit.
        """
        grant = self.acquire_nowait(nbytes)
        if grant is not None:
            return grant
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[_Grant] = loop.create_future()
        entry = (nbytes, future)
        self._waiters.append(entry)
        self._serve()  # a thread may have released memory just before we queued up
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled():
                future.result().release()  # granted in the same turn in which we were cancelled
            elif entry in self._waiters:
                self._waiters.remove(entry)
            self._serve()
            raise

    def _check(self, nbytes: int) -> None:
        if self._arena.charge(nbytes) > self.limit:
            raise CapacityError(
                f"{nbytes} bytes never fit a staging window of {self.limit}; raise `staging`"
            )

    def _try(self, nbytes: int) -> _Grant | None:
        inner = self._arena.allocate(nbytes)
        return None if inner is None else _Grant(self, inner)

    def _serve(self) -> None:
        while self._waiters:
            nbytes, future = self._waiters[0]
            if future.done():  # cancelled; its task has not run yet
                self._waiters.popleft()
                continue
            grant = self._try(nbytes)
            if grant is None:
                return
            self._waiters.popleft()
            future.set_result(grant)

    def _released(self) -> None:
        if not self._waiters or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._serve)
