"""Free runs of equal pages: best fit, coalescing, and splitting when nothing fits whole.

The same bookkeeping serves memory (an arena's pages) and disk (a tier's 4 KiB extents).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

__all__ = ["Extent", "PageRuns"]


class Extent(NamedTuple):
    """Consecutive pages.

    Attributes:
        start: First page.
        pages: Number of pages, at least 1.
    """

    start: int
    pages: int


class PageRuns:
    """A set of free pages, kept as maximal runs. Not thread-safe; decides nothing else.

    Every call is O(log n) in the number of distinct run lengths, plus the runs it takes.

    >>> runs = PageRuns()
    >>> runs.give(Extent(0, 10))
    >>> runs.take(4)
    Extent(start=0, pages=4)
    >>> runs.give(Extent(0, 4))
    >>> runs.free, runs.largest
    (10, 10)

    Attributes:
        free: Pages in the set.
    """

    __slots__ = ("_by_end", "_by_length", "_by_start", "_lengths", "free")

    def __init__(self) -> None:
        self.free = 0
        self._by_start: dict[int, int] = {}  # start -> length
        self._by_end: dict[int, int] = {}  # end -> start
        self._by_length: dict[int, dict[int, None]] = {}  # length -> starts, oldest first
        self._lengths: list[int] = []  # distinct lengths, sorted

    def __len__(self) -> int:
        return len(self._by_start)

    @property
    def largest(self) -> int:
        """Length of the longest run, 0 if there is none."""
        return self._lengths[-1] if self._lengths else 0

    def runs(self) -> list[Extent]:
        """All runs, by address."""
        return [Extent(start, self._by_start[start]) for start in sorted(self._by_start)]

    def give(self, extent: Extent) -> None:
        """Add pages, merging them with their neighbours.

        Raises:
            ValueError: if they overlap pages that are free already where that is visible at no
                cost (same start or end); nothing is changed then.
        """
        start, pages = extent
        if start in self._by_start or start + pages in self._by_end:
            raise ValueError(f"pages {start}..{start + pages} are free already")
        self.free += pages
        before = self._by_end.get(start)
        if before is not None:
            pages += start - before
            start = before
            self._drop(before)
        after = self._by_start.get(start + pages)
        if after is not None:
            self._drop(start + pages)
            pages += after
        self._add(start, pages)

    def take(self, pages: int) -> Extent | None:
        """Take ``pages`` pages from the start of the shortest run that has them, or None."""
        index = bisect_left(self._lengths, pages)
        if index == len(self._lengths):
            return None
        length = self._lengths[index]
        start = next(iter(self._by_length[length]))
        self._drop(start)
        if length > pages:
            self._add(start + pages, length - pages)
        self.free -= pages
        return Extent(start, pages)

    def take_split(self, pages: int) -> list[Extent] | None:
        """Take ``pages`` pages as few runs as possible: whole, else the longest runs first.

        Returns:
            None if fewer than ``pages`` pages are free; nothing is taken then.
        """
        if pages > self.free:
            return None
        taken: list[Extent] = []
        while pages:
            extent = self.take(min(pages, self.largest))
            assert extent is not None  # pages <= free, so there is a longest run
            taken.append(extent)
            pages -= extent.pages
        return taken

    def take_first(self, limit: int, border: int) -> Extent:
        """Take up to ``limit`` pages of the run with the lowest address, which costs O(runs).

        The extent crosses no multiple of ``border``.

        Raises:
            ValueError: if no page is free.
        """
        start = min(self._by_start)
        length = self._drop(start)
        pages = min(limit, length, border - start % border)
        if length > pages:
            self._add(start + pages, length - pages)
        self.free -= pages
        return Extent(start, pages)

    def take_last(self, limit: int) -> Extent | None:
        """Take up to ``limit`` pages from the end of the run with the highest address (O(runs))."""
        if not self._by_start:
            return None
        start = max(self._by_start)
        length = self._drop(start)
        pages = min(limit, length)
        if length > pages:
            self._add(start, length - pages)
        self.free -= pages
        return Extent(start + length - pages, pages)

    def _add(self, start: int, length: int) -> None:
        self._by_start[start] = length
        self._by_end[start + length] = start
        starts = self._by_length.get(length)
        if starts is None:
            self._by_length[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None

    def _drop(self, start: int) -> int:
        length = self._by_start.pop(start)
        del self._by_end[start + length]
        starts = self._by_length[length]
        del starts[start]
        if not starts:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length
