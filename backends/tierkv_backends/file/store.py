"""One open directory: its index, its files, and the batches under way in it."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from tierkv.errors import BackendError
from tierkv.workers import Signal
from tierkv_backends.file import scan
from tierkv_backends.file.catalog import Catalog, Entry
from tierkv_backends.file.files import Files
from tierkv_backends.file.records import RECORD_ROOM, Naming
from tierkv_backends.file.root import Root
from tierkv_backends.file.strand import Strand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv_backends.file.strand import Pool

__all__ = ["Store"]

_COUNTS: Final = (
    "bytes_read",
    "bytes_written",
    "damaged",
    "damaged_removed",
    "foreign",
    "leftovers",
    "reads",
    "superseded",
    "vanished",
    "writes",
)
_SETTLED_S: Final = 600.0
"""The kernel writes dirty pages back within seconds: older files need no sync of ours."""


class Store:
    """Root, index and threads of one tier; used on the event loop.

    Args:
        tier: Name of the tier, for errors.
        path: Root directory.
        capacity: Bytes that may be taken.
        sync: ``"flush"``, ``"write"`` or ``"none"``.
        pool: Threads; belongs to the store from now on.

    Attributes:
        root: The directory, once open.
        naming: Where it puts which part.
        files: What can be done to its files.
        catalog: What is in it.
        pool: Its threads.
        counts: Figures for ``stats()``.
    """

    root: Root
    naming: Naming
    files: Files

    def __init__(self, tier: str, path: str, capacity: int, sync: str, pool: Pool) -> None:
        self._tier = tier
        self._path = path
        self._capacity = capacity
        self._sync = sync
        self.pool = pool
        self._calls = 0
        self._quiet: Signal | None = None
        self._dirty_files: set[str] = set()
        self._dirty_directories: set[str] = set()
        self._sync_error: OSError | None = None
        self._syncing = asyncio.Lock()
        self._made: list[Root] = []
        self.catalog = Catalog(capacity, RECORD_ROOM)
        self.counts = dict.fromkeys(_COUNTS, 0)

    @property
    def salt(self) -> int:
        """The root's random number."""
        return self.root.superblock.salt

    def path(self, part: PartId, entry: Entry) -> str:
        """File of a publication, relative to the root."""
        return self.naming.path(part, entry.generation, entry.nonce)

    # ------------------------------------------------------------------ life

    async def open(self) -> list[StoredPart]:
        """Enter the root and learn what is in it.

        Raises:
            BackendError: if it cannot be used. Call :meth:`close` then, as after a cancellation.
        """
        strand = Strand(self.pool)
        try:
            await strand.call(self._enter)
            branches = [await strand.call(scan.clean, self.root)]
            uppers = list(self.naming.upper())

            async def look(number: int, strand: Strand) -> None:
                branch = await strand.call(scan.scan, self.root, self.naming, uppers[number])
                branches.append(branch)

            await self.spread(len(uppers), look)
            return await strand.call(self._recover, branches)
        except OSError as error:
            raise BackendError(self._tier, f"cannot read {self._path!r}: {error}") from error

    def _enter(self) -> None:
        # kept even if the caller is gone by the time it is made, so that somebody closes it
        root = Root(self._tier, self._path, self._capacity)
        self._made.append(root)
        self.root = root
        self.naming = Naming(root.superblock.salt, root.superblock.bits)
        self.files = Files(root, sync_writes=self._sync == "write")

    def _recover(self, branches: Sequence[scan.Scan]) -> list[StoredPart]:
        """Fill the index; in a thread, while nobody uses it yet."""
        newest: dict[PartId, scan.Found] = {}
        losers: list[tuple[PartId, Entry]] = []
        everything = [found for branch in branches for found in branch.found]
        for found in sorted(everything, key=_order):
            part = found.stored.part
            loser = self.catalog.put(part, found.entry)
            newest[part] = found
            if loser is not None:
                losers.append((part, loser))
        for branch in branches:
            self.catalog.measured(branch.sizes)
            self.counts["leftovers"] += branch.leftovers
            self.counts["foreign"] += branch.foreign
        damaged = [one for branch in branches for one in branch.damaged]
        sizes, removed = scan.keep_damaged(self.root, damaged, self._capacity // 64)
        self.catalog.measured(sizes)
        self.counts["damaged"] += len(damaged)
        self.counts["damaged_removed"] += removed
        self.counts["superseded"] += len(losers)
        results: list[OSError | None] = []
        self.files.erase_all((self.path(part, entry) for part, entry in losers), results)
        for (_, entry), error in zip(losers, results, strict=True):
            if error is None:
                self.catalog.erased(entry)
        for found in newest.values():
            if self.root.now - found.modified < _SETTLED_S:  # who knows whether it was synced
                self.note(found.path)
        return [found.stored for found in newest.values()]

    def close(self) -> None:
        """End the threads and close the directory, once no thread uses it. Idempotent."""
        self.pool.close(self._leave)

    def _leave(self) -> None:
        for root in self._made:
            root.close()

    # ------------------------------------------------------------------ work

    async def spread(self, count: int, one: Callable[[int, Strand], Awaitable[None]]) -> None:
        """Run ``one(number, strand)`` for each number, as many at once as there are threads.

        Raises:
            ClosedError: if the tier was given up meanwhile.

        Cancellation: re-raised once every call under way has ended; the others are not made.
        """
        self._calls += 1
        try:
            if count == 1:
                await one(0, Strand(self.pool))
            elif count:
                await self._spread(count, one)
        finally:
            self._calls -= 1
            if not self._calls and self._quiet is not None:
                self._quiet.set()

    async def _spread(self, count: int, one: Callable[[int, Strand], Awaitable[None]]) -> None:
        numbers = iter(range(count))
        failed: list[Exception] = []

        async def lane() -> None:
            strand = Strand(self.pool)
            try:
                for number in numbers:
                    await one(number, strand)
            except Exception as error:  # noqa: BLE001 - raised below, when no lane runs any more
                failed.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(min(count, self.pool.size)):
                group.start_soon(lane)
        if failed:
            raise failed[0]

    async def idle(self) -> None:
        """Wait until no batch is under way."""
        while self._calls:
            self._quiet = Signal()
            await self._quiet.wait()

    def note(self, path: str) -> None:
        """A file was put in its place: the next flush has to sync it."""
        if self._sync == "none":
            return
        if self._sync == "flush":
            self._dirty_files.add(path)
        directory = os.path.dirname(path)
        self._dirty_directories.update((directory, os.path.dirname(directory), "."))

    def note_erased(self, path: str) -> None:
        """A file was removed: the next flush has to sync its directory only."""
        self._dirty_files.discard(path)
        self._dirty_directories.add(os.path.dirname(path))

    async def flush(self) -> None:
        """Sync what changed: files, then directories.

        Raises:
            OSError: if the medium refuses now, or did so before.
        """
        async with self._syncing:  # who comes second must not return before the first is done
            if self._sync_error is not None:
                raise self._sync_error
            if self._sync != "none":
                await self._sync_all()

    async def _sync_all(self) -> None:
        files, self._dirty_files = self._dirty_files, set()
        directories, self._dirty_directories = self._dirty_directories, set()
        try:
            for names in (sorted(files), sorted(directories)):
                await self.spread(min(self.pool.size, len(names)), partial(self._sync_some, names))
        except BaseException as error:
            self._dirty_files |= files
            self._dirty_directories |= directories
            if isinstance(error, OSError):
                self._sync_error = error
            raise

    async def _sync_some(self, names: list[str], slot: int, strand: Strand) -> None:
        await strand.call(self.files.sync, names[slot :: self.pool.size])


def _order(found: scan.Found) -> tuple[int, float, bytes]:
    return found.entry.generation, found.modified, found.entry.nonce
