"""The asynchronous face of the ``nvme`` tier."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from tierkv.abc import Backend, BackendStats
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.units import format_bytes, parse_bytes
from tierkv_backends.nvme.space import reserve_bytes
from tierkv_backends.nvme.store import Settings, Store
from tierkv_backends.nvme.transfer import PAGE
from tierkv_backends.options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import IoResult, ReadRequest, StoredPart, Threads, WriteItem
    from tierkv.blocks import PartId
    from tierkv.config import Tier

__all__ = ["NvmeBackend"]

_T = TypeVar("_T")
_log = logging.getLogger("tierkv.nvme")
_MIN_CAPACITY: Final = 192 << 10
_INLINE: Final = 64 << 10
_CLOSE_S: Final = 5.0
_MODES: Final = ("auto", "buffered", "direct")


class NvmeBackend(Backend):
    """Frames in preallocated segment files under one root directory of a local file system.

    Options: ``segment`` (size of a segment file of a new root; default a 1/8 of the capacity, at
    most 64 MiB, at least 1/256 of the capacity) and ``io`` (``"auto"``: O_DIRECT where the file
    system takes it; ``"direct"``: or refuse to open; ``"buffered"``: through the page cache).

    Whatever :meth:`flush` acknowledged survives a crash of the machine; what was merely written
    survives the end of the process. Everything under the root, as ``du`` counts it, stays within
    the capacity; ``stats().details["usable_bytes"]`` is what frames can count on.

    One batch takes one worker hop, and one system call for each run of adjacent extents.

    Args:
        tier: Settings; ``path`` is required.

    Raises:
        ConfigError: if the path is missing, the capacity too small, or an option is unknown or
            malformed.
    """

    kind: ClassVar[str] = "nvme"
    durable: ClassVar[bool] = True

    def __init__(self, tier: Tier) -> None:
        check_options(tier, ("io", "segment"))
        if tier.root is None:
            raise ConfigError(f"tier {tier.name!r}: an 'nvme' tier needs a path")
        capacity = tier.capacity_bytes
        if capacity < _MIN_CAPACITY:
            raise ConfigError(
                f"tier {tier.name!r}: capacity {format_bytes(capacity)} is too small for an 'nvme' "
                f"tier; use at least {format_bytes(_MIN_CAPACITY)}"
            )
        mode = tier.options.get("io", "auto")
        if mode not in _MODES:
            raise ConfigError(f"tier {tier.name!r}: io must be one of {_MODES}, not {mode!r}")
        default = max(min(64 << 20, capacity // 8), capacity // 256)
        segment = parse_bytes(tier.options.get("segment", default)) // PAGE
        if not 1 <= segment < 2**32:
            raise ConfigError(f"tier {tier.name!r}: a segment has at least {PAGE} bytes")
        self.name = tier.name
        step = min(max(capacity // 128, 16 << 10), 256 << 10) // PAGE * PAGE
        self._settings = Settings(tier.name, tier.root, capacity, segment, mode, step)
        self._store: Store | None = None
        self._threads: Threads | None = None
        self._pid = os.getpid()
        self._calls = 0
        self._idle = asyncio.Event()
        self._inside = 0
        self._inside_lock = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self._store is None else f"{len(self._store.catalog)} parts"
        return f"<NvmeBackend {self.name!r} at {self._settings.path!r}: {state}>"

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Take the root, recover its index and return every part in it.

        Raises:
            RootLockedError: if another engine owns the root.
            BackendError: if the directory is not a root of this version, or cannot be used; it is
                never changed or removed then.
        """
        if self._store is not None:
            raise BackendError(self.name, "it is open already")
        made: list[Store] = []
        try:
            parts = await threads.run(self._open_store, made)
        except BaseException:
            if made:  # cancelled while the thread opened it: nobody else could give it up
                made[0].close()
            raise
        (store,) = made
        self._store, self._threads = store, threads
        self._pid = os.getpid()
        if store.refused:
            _log.warning(
                "tier %r: the file system of %r refuses O_DIRECT; reads and writes go through the "
                "page cache",
                self.name,
                self._settings.path,
            )
        return parts

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Read byte ranges of frames; see :meth:`tierkv.abc.Backend.read`.

        Not before the worker thread is done with the buffers does this return or raise.
        """
        store = self._open()
        plan = store.plan(requests, into)
        try:
            small = plan.nbytes <= _INLINE
            if plan.pieces and not (small and store.read_cached(plan)):
                await self._hop(store.read, plan)
        finally:
            store.end_read(plan)
        return plan.results

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Write frames; see :meth:`tierkv.abc.Backend.write`.

        A cancelled call whose thread was under way may have stored its frames.
        """
        return await self._hop(self._open().write, items) if items else []

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        """Forget parts; see :meth:`tierkv.abc.Backend.delete`."""
        if parts:
            await self._hop(self._open().delete, parts)

    async def flush(self) -> None:
        """Sync the data, then the journal.

        Raises:
            BackendError: if the medium refuses; a tier whose sync failed once stays failed until
                it is opened again, because nobody can tell any more what reached the medium.
        """
        try:
            await self._hop(self._open().flush)
        except OSError as error:
            message = f"cannot sync {self._settings.path!r}: {error}"
            raise BackendError(self.name, message) from error

    async def aclose(self) -> None:
        """Sync, close all files and give the root up. Idempotent.

        Waits for batches under way, but at most 5 s: files that a hanging thread may still write
        to then stay open until the process ends.
        """
        store, self._store = self._store, None
        if store is None:
            return
        if self._calls:
            self._idle.clear()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._idle.wait()
            except TimeoutError:
                _log.error("tier %r: batches hang in the medium; its files stay open", self.name)
        if self._inside or os.getpid() != self._pid:
            return
        assert self._threads is not None
        try:
            await self._threads.run(self._finish, store)
        except ClosedError:  # the threads are gone already
            self._finish(store)

    def charge(self, nbytes: int) -> int:
        """Bytes that a frame takes: whole 4 KiB pages."""
        return max(1, -(-nbytes // PAGE)) * PAGE

    def stats(self) -> BackendStats:
        """Snapshot; reads no file, callable from any thread."""
        store = self._store
        capacity = self._settings.capacity
        details: dict[str, float] = {"usable_bytes": capacity - reserve_bytes(capacity)}
        if store is None:
            return BackendStats(0, 0, 0, capacity, "closed", details)
        details.update(store.counts)
        details["checkpoints"] = store.catalog.checkpoints
        details["journal_bytes"] = store.catalog.journal_bytes
        details["segments"] = store.segments
        return BackendStats(
            entries=len(store.catalog),
            live_bytes=store.catalog.live_bytes,
            disk_bytes=store.disk_bytes,
            capacity_bytes=capacity,
            mode="o_direct" if store.direct else "buffered",
            details=details,
        )

    def _open(self) -> Store:
        if self._store is None:
            raise ClosedError(f"tier {self.name!r} is not open")
        if os.getpid() != self._pid:
            raise BackendError(
                self.name, "it was opened by the parent process; open an engine after the fork"
            )
        return self._store

    def _open_store(self, made: list[Store]) -> list[StoredPart]:
        made.append(Store(self._settings))
        return made[0].catalog.parts()

    async def _hop(self, fn: Callable[..., _T], *args: object) -> _T:
        assert self._threads is not None
        self._calls += 1
        try:
            return await self._threads.run(self._in_thread, fn, args)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _in_thread(self, fn: Callable[..., _T], args: Sequence[object]) -> _T:
        # counted here and not by the caller: a thread that hangs may be given up by its caller
        with self._inside_lock:
            self._inside += 1
        try:
            return fn(*args)
        finally:
            with self._inside_lock:
                self._inside -= 1

    def _finish(self, store: Store) -> None:
        try:
            store.flush()
        except OSError as error:
            _log.error("tier %r: cannot sync while closing: %s", self.name, error)
        store.close()
