"""The asynchronous face of the ``file`` tier."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from tierkv.abc import OK, Backend, BackendStats, IoResult, IoStatus
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv_backends.file.batches import Batches
from tierkv_backends.file.catalog import PAGE, Entry, charge, pages, usable_bytes
from tierkv_backends.file.records import RECORD_ROOM, encode
from tierkv_backends.file.root import bits_for
from tierkv_backends.file.store import Store
from tierkv_backends.file.strand import Pool
from tierkv_backends.file.transfer import ReadJob, WriteJob
from tierkv_backends.options import check_choice, check_disk, check_options
from tierkv_backends.results import FULL, MISSING, SHORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import ReadRequest, StoredPart, Threads, WriteItem
    from tierkv.blocks import PartId
    from tierkv.config import Tier

__all__ = ["FileBackend"]

_log = logging.getLogger("tierkv.file")
_MIN_CAPACITY: Final = 128 << 10
_MAX_THREADS: Final = 64
_CLOSE_S: Final = 5.0
_SYNCS: Final = ("flush", "none", "write")


class _Settings(NamedTuple):
    path: str
    capacity: int
    sync: str
    threads: int


class FileBackend(Backend):
    """One file a frame under a directory, local or mounted, that several processes may share.

    Options: ``sync`` says when data is synced: ``"flush"`` (by :meth:`flush`), ``"write"`` (before
    a write is acknowledged) or ``"none"`` (never: a crash of the machine may lose or cut files,
    which are then misses, and :meth:`flush` promises nothing); ``threads`` (default 4) is the
    number of files that are read or written at once.

    A process sees what was there when it opened the directory and what it wrote since. What
    another process deletes or replaces meanwhile is MISSING. The capacity holds for what this
    process knows: several processes that write into one directory may take several times as much,
    until one of them opens it again and deletes what exceeds its own capacity.

    All I/O goes through aiofiles and the page cache (no O_DIRECT), on threads of its own. One batch
    takes as many hops as there are threads at most, one more if it replaces files, and one more for
    each time that it lets another batch go first.

    Args:
        tier: Settings; ``path`` is required.

    Raises:
        ConfigError: if the path is missing, the capacity too small, or an option is unknown or
            malformed.
    """

    kind: ClassVar[str] = "file"
    durable: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(self, tier: Tier) -> None:
        check_options(tier, ("sync", "threads"))
        root = check_disk(tier, _MIN_CAPACITY)
        sync = check_choice(tier, "sync", _SYNCS)
        threads = tier.options.get("threads", 4)
        number = int(threads) if str(threads).isdecimal() else 0
        if not 1 <= number <= _MAX_THREADS:
            raise ConfigError(
                f"tier {tier.name!r}: threads must be a number from 1 to {_MAX_THREADS}, not "
                f"{threads!r}"
            )
        self.name = tier.name
        self._settings = _Settings(root, tier.capacity_bytes, sync, number)
        self._store: Store | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "closed" if self._store is None else f"{len(self._store.catalog)} parts"
        return f"<FileBackend {self.name!r} at {self._settings.path!r}: {state}>"

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Enter the directory and return every whole part in it.

        Removes what dead writers left and what a newer generation has superseded; puts damaged
        files aside.

        Raises:
            BackendError: if the directory is not a root of this version, is open to other users,
                or cannot be used.
        """
        if self._store is not None:
            raise BackendError(self.name, "it is open already")
        settings = self._settings
        pool = Pool(settings.threads, f"{self.name}-file")
        store = Store(self.name, settings.path, settings.capacity, settings.sync, pool)
        try:
            parts = await store.open()
        except BaseException:
            store.close()
            raise
        self._store, self._pid = store, os.getpid()
        return parts

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Read byte ranges of frames; see :meth:`tierkv.abc.Backend.read`.

        A file that vanished is MISSING and forgotten; one of another length is SHORT. A range of
        the padding behind a frame is zeros.

        Cancellation: re-raised once no thread touches the buffers any more.
        """
        store = self._opened()
        results = [OK] * len(requests)
        jobs: list[ReadJob] = []
        for item, (request, target) in enumerate(zip(requests, into, strict=True)):
            part, generation, offset, length = request
            entry = store.catalog.find(part, generation)
            if entry is None:
                results[item] = MISSING
                continue
            inside = offset >= 0 and 0 <= length <= max(PAGE, pages(entry.nbytes)) - offset
            if not inside or len(target) != length:
                results[item] = SHORT
                continue
            wanted = max(0, min(length, entry.nbytes - offset))
            if wanted < length:  # less than a page
                target[wanted:] = bytes(length - wanted)
            jobs.append(ReadJob(item, part, entry, offset, target[:wanted]))
        await Batches(store).read(jobs, results)
        return results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Write frames; see :meth:`tierkv.abc.Backend.write`.

        Cancellation: re-raised once no thread touches the buffers any more; each frame is then
        stored, or has no file at all.
        """
        store = self._opened()
        results = [OK] * len(items)
        jobs: list[WriteJob] = []
        made: set[str] = set()
        for item in range(len(items)):
            job = self._prepare(store, item, items[item], made)
            if isinstance(job, IoResult):
                results[item] = job
            else:
                jobs.append(job)
        await Batches(store).write(jobs, results)
        return results

    def _prepare(
        self, store: Store, number: int, item: WriteItem, made: set[str]
    ) -> WriteJob | IoResult:
        """Set bytes aside for a file, or tell why there will be none."""
        stored, buffer = item
        catalog = store.catalog
        if catalog.newer(stored.part, stored.generation):
            return MISSING
        if buffer.nbytes < stored.nbytes:
            return SHORT
        try:
            record = encode(stored, store.salt)
        except ValueError as error:
            return IoResult(IoStatus.ERROR, error)
        size = stored.nbytes + len(record)
        nonce = store.naming.nonce()
        path = store.naming.path(stored.part, stored.generation, nonce)
        directory = os.path.dirname(path)
        charged = self.charge(stored.nbytes)
        disk = pages(size) + PAGE * catalog.missing_directories(directory, made)
        if not catalog.reserve(charged, disk):
            return FULL
        temporary = f"{directory}/{store.root.unfinished.name()}"
        views = (buffer.memory[: stored.nbytes], memoryview(record))
        return WriteJob(number, stored, nonce, temporary, path, views, size, charged, disk)

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts; see :meth:`tierkv.abc.Backend.delete`.

        Raises:
            BackendError: if a file cannot be removed; its part is then still there.

        Cancellation: re-raised once no thread removes anything any more.
        """
        store = self._opened()
        doomed: list[tuple[PartId, Entry]] = []
        for part, generation in parts:
            entry = store.catalog.find(part, generation)
            if entry is not None and store.catalog.remove(part, entry):
                doomed.append((part, entry))
        refused = await Batches(store).delete(doomed)
        if refused:
            raise BackendError(
                self.name, f"{len(refused)} file(s) cannot be removed: {refused[0]}"
            ) from refused[0]

    async def flush(self) -> None:
        """Sync files, then directories, as far as ``sync`` asks for it.

        Raises:
            BackendError: if the medium refuses; a tier whose sync failed once stays failed until
                it is opened again, because nobody can tell any more what reached the medium.

        Cancellation: re-raised once no thread syncs any more; the next call does it all.
        """
        store = self._opened()
        try:
            await store.flush()
        except OSError as error:
            raise BackendError(
                self.name, f"cannot sync {self._settings.path!r}: {error}"
            ) from error

    async def aclose(self) -> None:
        """Sync, and end the threads. Idempotent.

        Waits for batches under way, but at most 5 s: whoever still waits for one then gets
        ClosedError; a file that hangs is written no further when the medium comes back.
        """
        store, self._store = self._store, None
        if store is None:
            return
        try:
            if os.getpid() == self._pid:
                await self._drain(store)
        finally:
            store.close()

    async def _drain(self, store: Store) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await store.idle()
        except TimeoutError:
            _log.error("tier %r: files hang in the medium and are given up", self.name)
            return
        try:
            await store.flush()
        except OSError as error:
            _log.error("tier %r: cannot sync while closing: %s", self.name, error)

    def charge(self, nbytes: int) -> int:
        """Bytes that a frame takes: its own and a page, or whole pages with its record."""
        return charge(nbytes, RECORD_ROOM)

    def longest(self, charged: int) -> int:
        """Most bytes that a frame can have for which ``charged`` bytes are charged. Pure."""
        return charged - PAGE

    def stats(self) -> BackendStats:
        """Snapshot; reads no file, callable from any thread."""
        store, capacity = self._store, self._settings.capacity
        bits = bits_for(capacity) if store is None else store.root.superblock.bits
        details: dict[str, float] = {"usable_bytes": usable_bytes(capacity, bits)}
        if store is None:
            return BackendStats(0, 0, 0, capacity, "closed", details)
        details.update(store.counts)
        return BackendStats(
            entries=len(store.catalog),
            live_bytes=store.catalog.live_bytes,
            disk_bytes=store.catalog.disk_bytes,
            capacity_bytes=capacity,
            mode="buffered",
            details=details,
        )

    def _opened(self) -> Store:
        if self._store is None:
            raise ClosedError(f"tier {self.name!r} is not open")
        if os.getpid() != self._pid:
            raise BackendError(
                self.name, "it was opened by the parent process; open an engine after the fork"
            )
        return self._store
