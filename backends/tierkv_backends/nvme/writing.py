"""Writes of one root: take pages, move the data, journal, show. In steps that threads can share.

Whatever is visible is complete: the data is written before the put record is journalled, and the
frame becomes visible last.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tierkv.abc import OK, IoResult
from tierkv_backends.nvme.catalog import Draft
from tierkv_backends.nvme.transfer import PAGE, Piece
from tierkv_backends.results import FULL, MISSING, SHORT, failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierkv.abc import StoredPart, WriteItem
    from tierkv_backends.nvme.catalog import Catalog
    from tierkv_backends.nvme.segments import Segments
    from tierkv_backends.nvme.space import Space

__all__ = ["WriteJob", "Writer", "page_bytes"]

_RECORD: Final = 256  # a put record with a short tenant name, generously


@dataclass(slots=True)
class WriteJob:
    """One batch of writes under way.

    Attributes:
        size: Items of the batch.
        drafts: Frames that got pages.
        results: Results known so far, by item.
        shards: Moves that have to end before anything is shown.
        moving: Threads that may write to the pages of the drafts now.
        settled: Whether the drafts are being shown, or were.
        given_up: Whether they will never be.
    """

    size: int
    drafts: list[Draft] = field(default_factory=list)
    results: dict[int, IoResult] = field(default_factory=dict)
    shards: int = 1
    moving: int = 0
    settled: bool = False
    given_up: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes to move, whole pages."""
        return sum(page_bytes(draft.stored.nbytes) for draft in self.drafts)

    def outcome(self) -> list[IoResult]:
        """The results, in the order of the items."""
        return [self.results[item] for item in range(self.size)]


class Writer:
    """Makes frames visible. Thread-safe.

    Args:
        catalog: Index and journal.
        space: Where pages come from.
        segments: The files.
    """

    def __init__(self, catalog: Catalog, space: Space, segments: Segments) -> None:
        self._catalog = catalog
        self._space = space
        self._segments = segments
        self._files = len(segments)
        self._lock = threading.Lock()

    def begin(self, job: WriteJob, items: Sequence[tuple[StoredPart, int]], *, grow: bool) -> bool:
        """Take pages for each item, or note in ``job`` why it gets none.

        Args:
            job: A new job of that many items.
            items: What to write, and how many bytes of it are at hand.
            grow: Whether files may grow, which blocks.

        Returns:
            False if that takes I/O and ``grow`` is not set; ``job`` is as before then.

        Whatever happens, call :meth:`abandon` in the end.
        """
        pending = 0
        more = sum(_pages(stored.nbytes) for stored, _ in items)
        for item, (stored, at_hand) in enumerate(items):
            pages = _pages(stored.nbytes)
            more -= pages
            if self._catalog.newer(stored):
                job.results[item] = MISSING
                continue
            if at_hand < stored.nbytes:
                job.results[item] = SHORT
                continue
            pending += _RECORD + len(stored.tenant)
            try:
                if grow:
                    extents = self._space.allocate(pages, pending, more)
                else:
                    extents = self._space.take(pages, pending)
                    if extents is None:
                        self._undo(job)
                        job.results.clear()
                        return False
            except OSError as error:
                job.results[item] = failure(error)
                continue
            if extents is None:
                job.results[item] = FULL
            else:
                job.drafts.append(Draft(item, stored, extents))
        return True

    def pieces(self, job: WriteJob, items: Sequence[WriteItem]) -> list[Piece]:
        """Where the bytes of the drafts go.

        Raises:
            ClosedError: if a buffer was released, which is a bug of the caller.
        """
        return [
            piece
            for draft in job.drafts
            for piece in self._segments.pieces(
                draft.item, draft.extents, 0, _padded(items[draft.item])
            )
        ]

    def moving(self, job: WriteJob) -> bool:
        """Begin one shard; False if the job was given up: nothing may be written then."""
        with self._lock:
            if not job.given_up:
                job.moving += 1
            return not job.given_up

    def broke(self, job: WriteJob) -> None:
        """End one shard that raised: the job will not be published."""
        self._leave(job)

    def moved(self, job: WriteJob, failed: Mapping[int, IoResult]) -> bool:
        """End one shard; return whether it was the last, so that the job is to be published."""
        with self._lock:
            job.results.update(failed)
            job.shards -= 1
            job.settled = job.shards == 0 and not job.given_up
        self._leave(job)
        return job.settled

    def publish(self, job: WriteJob) -> None:
        """Journal and show the drafts whose data is written; free the pages of the others. Blocks.

        Call once, after :meth:`moved` said so. Fills ``job.results`` completely.
        """
        self._segments.written(extent for draft in job.drafts for extent in draft.extents)
        written = []
        for draft in job.drafts:
            if draft.item in job.results:
                self._space.free(draft.extents)
            else:
                written.append(draft)
        job.results.update(self._catalog.commit(written))
        self._catalog.checkpoint()
        self._space.recount()
        self.notice_files()

    def abandon(self, job: WriteJob) -> None:
        """Give the pages of a job back that is not published; no-op if it is.

        A thread that hangs in the medium may write to its pages at any time: they are kept back
        until it returns.
        """
        with self._lock:
            if job.settled or job.given_up:
                return
            job.given_up = True
            hangs = job.moving > 0
        if not hangs:
            self._undo(job)

    def notice_files(self) -> None:
        """Count the directory again after files came or went: it grows with its entries."""
        if len(self._segments) != self._files:
            self._files = len(self._segments)
            self._catalog.refresh_disk()

    def good(self, job: WriteJob) -> list[int]:
        """Lengths of the frames that a published job has shown."""
        return [d.stored.nbytes for d in job.drafts if job.results[d.item] is OK]

    def _leave(self, job: WriteJob) -> None:
        with self._lock:
            job.moving -= 1
            free = job.given_up and job.moving == 0
        if free:
            self._undo(job)

    def _undo(self, job: WriteJob) -> None:
        for draft in job.drafts:
            self._space.free(draft.extents)
        job.drafts.clear()


def page_bytes(nbytes: int) -> int:
    """Bytes that a frame takes: whole pages, at least one."""
    return _pages(nbytes) * PAGE


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE))


def _padded(item: WriteItem) -> memoryview:
    """Whole pages of a frame to write; the padding is zeroed, it may hold somebody's bytes."""
    nbytes = item.stored.nbytes
    memory = item.buffer.padded[: -(-nbytes // PAGE) * PAGE]
    if len(memory) > nbytes:  # less than a page
        memory[nbytes:] = bytes(len(memory) - nbytes)
    return memory
