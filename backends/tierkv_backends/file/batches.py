"""Batches of one open directory: jobs for its threads, and what their ends mean for the index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.abc import OK, IoResult
from tierkv_backends.file.catalog import Entry
from tierkv_backends.file.files import gone, result_of
from tierkv_backends.file.transfer import Course, read_files, write_files
from tierkv_backends.results import MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId
    from tierkv_backends.file.store import Store
    from tierkv_backends.file.strand import Strand
    from tierkv_backends.file.transfer import ReadJob, WriteJob

__all__ = ["Batches"]

_ERASED_AT_ONCE: Final = 8


class Batches:
    """Reads, writes and deletes of one tier; used on the event loop.

    Args:
        store: The open directory.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, jobs: Sequence[ReadJob], results: list[IoResult]) -> None:
        """Read bytes of files, and note in ``results`` what went wrong.

        Cancellation: re-raised once no thread touches the memory any more.
        """
        todo = iter(jobs)

        async def lane(_: int, strand: Strand) -> None:
            course = Course(self._store.pool)
            try:
                call = (read_files, self._store.files, self._store.naming, todo, course)
                while await strand.call(*call, stop=course.stop):
                    pass
            finally:
                for job, error in course.read:
                    results[job.item] = self._ended(job, error)

        await self._store.spread(min(len(jobs), self._store.pool.size), lane)

    def _ended(self, job: ReadJob, error: OSError | None) -> IoResult:
        if error is None:
            self._store.counts["reads"] += 1
            self._store.counts["bytes_read"] += len(job.target)
            return OK
        if not gone(error):
            return result_of(error)
        if self._store.catalog.remove(job.part, job.entry):
            self._store.catalog.erased(job.entry)
            self._store.counts["vanished"] += 1
        return MISSING

    async def write(self, jobs: Sequence[WriteJob], results: list[IoResult]) -> None:
        """Write files, show them, and remove those that they replace; release what was set aside.

        Cancellation: re-raised once no thread touches the memory any more; each file is then in
        its place and in the index, or there is none.
        """
        todo = iter(jobs)
        left = {job.item: job for job in jobs}
        losers: list[tuple[PartId, Entry]] = []

        async def lane(_: int, strand: Strand) -> None:
            course = Course(self._store.pool)
            try:
                call = (write_files, self._store.files, todo, course)
                while await strand.call(*call, stop=course.stop):
                    pass
            finally:
                self._store.catalog.measured(course.directories)
                for job, ended in course.written:
                    del left[job.item]
                    self._store.catalog.release(job.charged, job.disk)
                    results[job.item] = self._landed(job, ended, losers)

        async def erase(_: int, strand: Strand) -> None:
            await self.erase(losers, strand)

        try:
            await self._store.spread(min(len(jobs), self._store.pool.size), lane)
        finally:
            for job in left.values():
                self._store.catalog.release(job.charged, job.disk)
            await self._store.spread(min(1, len(losers)), erase)

    def _landed(
        self, job: WriteJob, ended: int | OSError, losers: list[tuple[PartId, Entry]]
    ) -> IoResult:
        if isinstance(ended, OSError):
            return result_of(ended)
        stored = job.stored
        entry = Entry(stored.generation, stored.nbytes, job.size, ended, job.nonce)
        loser = self._store.catalog.put(stored.part, entry)
        self._store.note(job.path)
        if loser is not None:
            losers.append((stored.part, loser))
            if loser == entry:
                return MISSING  # a newer one came first
        self._store.counts["writes"] += 1
        self._store.counts["bytes_written"] += stored.nbytes
        return OK

    async def delete(self, doomed: Sequence[tuple[PartId, Entry]]) -> list[OSError]:
        """Remove files of publications taken out of the index; it shows again those that stay.

        Returns:
            Why some cannot be removed.

        Cancellation: re-raised once no thread removes anything any more.
        """
        refused: list[OSError] = []
        slots = min(self._store.pool.size, -(-len(doomed) // _ERASED_AT_ONCE))
        left = set(range(slots))

        async def some(slot: int, strand: Strand) -> None:
            left.discard(slot)
            refused.extend(await self.erase(doomed[slot::slots], strand, restore=True))

        try:
            await self._store.spread(slots, some)
        finally:
            for slot in left:  # cancelled before a thread took them up
                for part, entry in doomed[slot::slots]:
                    self._store.catalog.restore(part, entry)
        return refused

    async def erase(
        self, doomed: Sequence[tuple[PartId, Entry]], strand: Strand, *, restore: bool = False
    ) -> list[OSError]:
        """Remove files of publications that the index does not show any more.

        Args:
            doomed: The publications.
            strand: Threads.
            restore: Whether the index shows again those that cannot be removed.

        Returns:
            Why some cannot be removed.

        Cancellation: re-raised once the thread is done and the account is right.
        """
        if not doomed:
            return []
        paths = [self._store.path(part, entry) for part, entry in doomed]
        results: list[OSError | None] = []
        try:
            await strand.call(self._store.files.erase_all, paths, results)
        finally:
            hangs = OSError("the medium did not answer")
            ended = [*results, *[hangs] * len(doomed)]  # the thread may go on with its own list
            for (part, entry), path, error in zip(doomed, paths, ended, strict=False):
                if error is None:
                    self._store.catalog.erased(entry)
                    self._store.note_erased(path)
                elif restore:
                    self._store.catalog.restore(part, entry)
        return [error for error in ended[: len(doomed)] if error is not None]
