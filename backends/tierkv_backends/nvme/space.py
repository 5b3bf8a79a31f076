"""Which pages are free, backed or bare, and how much of the capacity each kind of file may take.

Every real byte under the root counts: segments, journal, checkpoint, even the directory. Data may
use what the metadata cannot need; the metadata's need grows with the number of live records. While
data holds more than its share (the tier was reopened smaller, or frames became smaller and more),
free pages are punched out until it does not.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from tierkv.extents import Extent, PageRuns
from tierkv_backends.nvme.transfer import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_backends.nvme.segments import Segments

__all__ = ["Metadata", "Space", "merge", "reserve_bytes"]

_SLACK: Final = 32 << 10  # extent trees of fragmented files, the directory's own growth
_GROW_PAGES: Final = 2048
_WHOLE_PAGES: Final = 256  # from here on, writing zeros first costs more than it saves later


class Metadata:
    """Bytes that the metadata takes and may come to take.

    Attributes:
        step: Allocation step of the journal; also the size at which it is worth a checkpoint.
        live: Bytes of the live put records: the next checkpoint.
        disk: Real bytes of everything under the root that is no segment.
    """

    __slots__ = ("disk", "live", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.live = 0
        self.disk = 0

    def need(self, extra: int) -> int:
        """Bytes to keep for the metadata if ``extra`` bytes of records are added.

        A checkpoint is written beside the old one and the journal, and the journal is as long as a
        checkpoint at most; rounded up to whole steps so that it moves seldom.
        """
        live = self.live + extra
        need = max(3 * live, self.disk + extra + live) + self.step + _SLACK
        return -(-need // self.step) * self.step


def reserve_bytes(capacity: int) -> int:
    """Capacity that a caller should not count on for frames: metadata and page rounding.

    Enough for frames of 8 KiB in a small tier and of 40 KiB or more in any; smaller frames in
    larger tiers are refused (FULL) a few per cent earlier.
    """
    return min(capacity // 2, (128 << 10) + capacity // 32)


class Space:
    """Allocation of pages under a capacity. Thread-safe.

    ``lock`` guards the page sets and is never held across I/O; growing and shrinking serialise on
    a lock of their own.

    Args:
        segments: The files.
        capacity: Bytes that everything under the root may take.
        pages: Size of the address space in pages.
        metadata: Account of the metadata.
    """

    def __init__(self, segments: Segments, capacity: int, pages: int, metadata: Metadata) -> None:
        self.lock = threading.Lock()
        self.metadata = metadata
        self.data_disk = 0
        self._segments = segments
        self._capacity = capacity
        self._pages = pages
        self._resize = threading.Lock()
        self._free = PageRuns()
        self._bare = PageRuns()
        self._bare_in: dict[int, int] = {}  # bare pages per segment
        self._can_punch = True
        self._raw = False  # whether pages were backed that nobody has written yet

    def recover(self, used: Sequence[Extent]) -> None:
        """Take over what is on disk: ``used`` pages are taken, by address, without overlaps.

        Raises:
            OSError: if the files cannot be examined.
        """
        segments = self._segments
        backed = segments.backed()
        self.data_disk = segments.disk_bytes()
        for extent in _subtract(backed, used):
            for part in segments.split(extent):
                self._free.give(part)
        holes = _subtract([Extent(0, self._pages)], merge(backed, used))
        inside = {extent.start // segments.segment_pages for extent in segments.present()}
        known = sum(extent.pages for extent in backed) * PAGE
        for extent in holes:
            for part in segments.split(extent):
                # blocks that a dying process allocated but never wrote would count for nothing
                index = part.start // segments.segment_pages
                if self.data_disk > known and index in inside:
                    with contextlib.suppress(OSError):
                        segments.punch(part)
                self._add_bare(part)
        self._drop_empty()
        self.data_disk = segments.disk_bytes()

    def take(self, pages: int, record: int) -> list[Extent] | None:
        """Take pages that are backed already, without any I/O; None where it would take some."""
        if self.data_disk > self._share(record):
            return None
        with self.lock:
            return self._free.take_split(pages)

    def allocate(self, pages: int, record: int, more: int = 0) -> list[Extent] | None:
        """Take pages for a frame whose metadata record has ``record`` bytes. Blocks.

        Args:
            pages: What the frame needs.
            record: Bytes of records of this batch so far.
            more: Pages that the same batch will ask for next: growing takes them along.

        Returns:
            As few extents as possible, or None if the capacity does not allow it.

        Raises:
            OSError: if the file system refuses to grow a segment.
        """
        if self.data_disk > self._share(record) and not self.trim(record):
            return None
        while True:
            with self.lock:
                extents = self._free.take_split(pages)
            if extents is not None:
                return extents
            if not self._grow(pages, record, more):
                return None

    def free(self, extents: Sequence[Extent]) -> None:
        """Give pages back for reuse."""
        with self.lock:
            for extent in extents:
                for part in self._segments.split(extent):
                    self._free.give(part)

    def trim(self, record: int = 0) -> bool:
        """Punch free pages until data is within its share; return whether it is. Blocks."""
        with self._resize:
            while True:
                over = self.data_disk - self._share(record)
                if over <= 0:
                    return True
                if not self._can_punch:
                    return False
                with self.lock:
                    extent = self._free.take_last(-(-over // PAGE))
                if extent is None:
                    return False
                self._punch(extent)

    def _share(self, record: int) -> int:
        return self._capacity - self.metadata.need(record)

    def recount(self) -> None:
        """Count the blocks of the segments again: first writes may have changed their trees."""
        if self._raw:
            with self._resize:
                self._raw = False
                self.data_disk = self._segments.disk_bytes()

    def _grow(self, pages: int, record: int, more: int) -> bool:
        """Back some more pages; False if the capacity does not allow what is missing.

        Large batches get what they are about to write, allocated only: a first write into fresh
        blocks is slow, but quicker than zeros and a second write. Small frames get a larger piece
        that is written once here, in few calls.
        """
        size = self._segments.segment_pages
        with self._resize:
            with self.lock:
                missing = pages - self._free.free
                if missing <= 0:
                    return True  # somebody else grew it, or gave pages back
                room = (self._share(record) - self.data_disk) // PAGE
                if room < missing or self._bare.free < missing:
                    return False
                whole = missing + more
                raw = whole >= _WHOLE_PAGES
                part = self._bare.take_first(min(room, whole if raw else _GROW_PAGES), size)
                self._count_bare(part, -1)
            try:
                self._segments.back(part, zero=not raw)
                self._raw = self._raw or raw
            except OSError:
                self._add_bare(part)
                self.data_disk = self._segments.disk_bytes()
                raise
            with self.lock:
                self._free.give(part)
            self.data_disk = self._segments.disk_bytes()
            return True

    def _punch(self, extent: Extent) -> None:
        for part in self._segments.split(extent):
            try:
                self._segments.punch(part)
            except OSError:
                self._can_punch = False
                with self.lock:
                    self._free.give(part)
                continue
            self._add_bare(part)
        self._drop_empty()
        self.data_disk = self._segments.disk_bytes()

    def _add_bare(self, part: Extent) -> None:
        with self.lock:
            self._bare.give(part)
            self._count_bare(part, +1)

    def _count_bare(self, part: Extent, sign: int) -> None:
        index = part.start // self._segments.segment_pages
        self._bare_in[index] = self._bare_in.get(index, 0) + sign * part.pages

    def _drop_empty(self) -> None:
        size = self._segments.segment_pages
        for index in list(self._segments.indices()):
            whole = min(size, self._pages - index * size)
            if self._bare_in.get(index, 0) >= whole:
                self._segments.remove(index)


def merge(first: Sequence[Extent], second: Sequence[Extent]) -> list[Extent]:
    """Pages in either of two sets of extents, as few extents, by address."""
    merged: list[Extent] = []
    for start, pages in sorted((*first, *second)):
        if merged and start <= merged[-1].start + merged[-1].pages:
            low = merged[-1].start
            merged[-1] = Extent(low, max(merged[-1].pages, start + pages - low))
        else:
            merged.append(Extent(start, pages))
    return merged


def _subtract(whole: Sequence[Extent], holes: Sequence[Extent]) -> list[Extent]:
    """Pages of ``whole`` that are in none of ``holes``; both by address, without overlaps."""
    left: list[Extent] = []
    index = 0
    for start, pages in whole:
        end = start + pages
        while index < len(holes) and holes[index].start + holes[index].pages <= start:
            index += 1
        at = index
        while start < end:
            if at == len(holes) or holes[at].start >= end:
                left.append(Extent(start, end - start))
                break
            if holes[at].start > start:
                left.append(Extent(start, holes[at].start - start))
            start = max(start, holes[at].start + holes[at].pages)
            at += 1
    return left
