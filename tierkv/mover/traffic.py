"""Batches between the engine and its backends: guarded, timed, counted; never an exception."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.abc import IoResult, IoStatus
from tierkv.errors import BackendError
from tierkv.mover.faults import FaultLog
from tierkv.mover.timing import Watch
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tierkv.abc import Observer, ReadRequest, StoredPart, WriteItem
    from tierkv.blocks import PartId
    from tierkv.decisions.core import Decisions
    from tierkv.mover.levels import Level
    from tierkv.workers import Workers

__all__ = ["Traffic"]


class Traffic:
    """The one place where backends are called while the engine runs.

    Whatever a backend raises becomes a result. A call returns when the backend does, however long
    that takes, so that whoever owns the memory goes on owning it; who only waits for it does so
    through :meth:`landed`. While a tier's breaker is open its batches are refused at once.
    """

    def __init__(
        self,
        *,
        decisions: Decisions,
        workers: Workers,
        observer: Observer,
        clock: Callable[[], float],
        timeout: float,
    ) -> None:
        self.decisions = decisions
        self.workers = workers
        self.observer = observer
        self.clock = clock
        self.faults = FaultLog(clock)
        self.watch = Watch(
            decisions, clock=clock, observer=observer, faults=self.faults, timeout=timeout
        )
        self._reading: dict[tuple[int, PartId, int], int] = {}

    # ------------------------------------------------------------------ broken tiers

    def usable(self, level: Level) -> bool:
        """Whether reads of this tier are worth starting: its breaker is closed."""
        return self.watch.usable(level)

    def hangs(self, level: Level) -> bool:
        """Whether nobody should start a write in this tier, or wait for one."""
        return self.watch.hangs(level)

    async def landed(self, level: Level, signal: Signal, *, writing: bool = False) -> bool:
        """Wait for something that a batch of this tier brings about, but not for a tier that hangs.

        Args:
            level: The tier.
            signal: What to wait for.
            writing: Whether a write brings it about.

        Returns:
            Whether ``signal`` is set; False once the tier is found to hang.
        """
        return await self.watch.landed(level, signal, writing=writing)

    # ------------------------------------------------------------------ batches

    async def read(
        self,
        level: Level,
        requests: Sequence[ReadRequest],
        into: Sequence[Any],
        via: Callable[[Any, Any], Awaitable[list[IoResult]]] | None = None,
    ) -> list[IoResult]:
        """One backend read, timed; whatever the backend raises becomes a result.

        Args:
            level: The tier.
            requests: What to read.
            into: Memory views, or what ``via`` takes in their place.
            via: Reads instead of the backend's own ``read``.
        """
        wanted = sum(q.length for q in requests)
        batch = self.watch.begin(level, "read", wanted)
        if isinstance(batch, BackendError):
            return self._refused(level, "read", batch, len(requests))
        reading = [(level.index, q.part, q.generation) for q in requests]
        for key in reading:
            self._reading[key] = self._reading.get(key, 0) + 1
        try:
            results = await (via or level.backend.read)(requests, into)
            _check_length(level, results, len(requests))
        except Exception as error:  # noqa: BLE001 - a third-party backend may raise anything
            results = [IoResult(IoStatus.ERROR, error)] * len(requests)
        except BaseException:
            self.watch.cut(level, batch)
            raise
        finally:
            for key in reading:
                self._reading[key] -= 1
                if not self._reading[key]:
                    del self._reading[key]
        done = sum(q.length for q, r in zip(requests, results, strict=True) if _ok(r))
        self.watch.end(level, batch, done, failed=_dead(results))
        self._observe(level, "read", done, len(requests), batch.start, results)
        return results

    async def write(
        self,
        level: Level,
        items: Sequence[WriteItem] | Sequence[tuple[StoredPart, Any]],
        via: Callable[[Any], Awaitable[list[IoResult]]] | None = None,
    ) -> list[IoResult]:
        """One backend write, timed; whatever the backend raises becomes a result.

        Args:
            level: The tier.
            items: Frames: what each is, and the memory it is in.
            via: Writes instead of the backend's own ``write``.
        """
        stored = [item[0] for item in items]
        batch = self.watch.begin(level, "write", sum(part.nbytes for part in stored))
        if isinstance(batch, BackendError):
            level.failures += 1
            return self._refused(level, "write", batch, len(items))
        names = {(part.part, part.generation) for part in stored}
        again: set[tuple[PartId, int]] = set()
        try:
            await self.purge(level)
            # only what is being read can be left: it is not deleted now that it is wanted again
            again = names.intersection(level.doomed)
            level.doomed = [d for d in level.doomed if d not in again]
            write: Callable[[Any], Awaitable[list[IoResult]]] = via or level.backend.write
            results = await write(items)
            _check_length(level, results, len(items))
        except Exception as error:  # noqa: BLE001 - a third-party backend may raise anything
            results = [IoResult(IoStatus.ERROR, error)] * len(items)
        except BaseException:
            self.watch.cut(level, batch)
            raise
        for part, result in zip(stored, results, strict=True):
            if not _ok(result) and (part.part, part.generation) in again:
                level.doomed.append((part.part, part.generation))
        level.failures = level.failures + 1 if not any(map(_ok, results)) else 0
        done = sum(part.nbytes for part, r in zip(stored, results, strict=True) if _ok(r))
        self.watch.end(level, batch, done, failed=_dead(results))
        self._observe(level, "write", done, len(items), batch.start, results)
        return results

    async def flush(self, level: Level) -> None:
        """Make every completed write to a tier durable. Engine-owned callers only.

        Raises:
            BackendError: if the tier refuses, or is known to hang (the sync then goes on alone).
        """
        if level.stalled.is_set() or level.stuck.is_set():
            raise BackendError(level.name, "cannot sync: it does not answer", retryable=True)
        job = self.workers.spawn(self._sync, level, name="sync")
        if not await self.landed(level, job.ended, writing=True):
            raise BackendError(level.name, "cannot sync: it does not answer", retryable=True)
        await job.wait()

    async def _sync(self, level: Level) -> None:
        try:
            await self.purge(level)
            await level.backend.flush()
        except BackendError as error:
            self.faults.raised(level.name, "sync", error)
            raise
        except Exception as error:
            self.faults.raised(level.name, "sync", error)
            raise BackendError(level.name, f"cannot sync: {error!r}") from error

    async def purge(self, level: Level) -> None:
        """Delete what was forgotten in this tier. Engine-owned callers only.

        A copy that is being read is left for the next time, and so is everything if the backend
        fails; deletes are idempotent.
        """
        while level.purging is not None:
            await level.purging.wait()
        doomed = [d for d in level.doomed if (level.index, *d) not in self._reading]
        if not doomed:
            return
        gone = set(doomed)
        level.doomed = [d for d in level.doomed if d not in gone]
        level.purging = Signal()
        start = self.clock()
        failed = len(doomed)
        try:
            await level.backend.delete(doomed)
            failed = 0
        except Exception as error:
            self.faults.raised(level.name, "delete", error)
            raise
        finally:
            if failed:
                level.doomed = doomed + level.doomed
            done, level.purging = level.purging, None
            done.set()
            self.observer.io(
                tier=level.name,
                direction="delete",
                nbytes=0,
                operations=len(doomed),
                seconds=self.clock() - start,
                failed=failed,
            )

    # ------------------------------------------------------------------ counting

    def _refused(
        self, level: Level, direction: str, error: BackendError, operations: int
    ) -> list[IoResult]:
        self.observer.io(
            tier=level.name,
            direction=direction,
            nbytes=0,
            operations=operations,
            seconds=0.0,
            failed=operations,
        )
        return [IoResult(IoStatus.ERROR, error)] * operations

    def _observe(
        self,
        level: Level,
        direction: str,
        nbytes: int,
        operations: int,
        start: float,
        results: Sequence[IoResult],
    ) -> None:
        self.faults.results(level.name, direction, results)
        self.observer.io(
            tier=level.name,
            direction=direction,
            nbytes=nbytes,
            operations=operations,
            seconds=self.clock() - start,
            failed=sum(not _ok(r) for r in results),
        )


def _ok(result: IoResult) -> bool:
    return result.status is IoStatus.OK


def _dead(results: Sequence[IoResult]) -> bool:
    """Whether the medium failed a batch as a whole; a miss or a full disk is an answer."""
    return bool(results) and all(result.status is IoStatus.ERROR for result in results)


def _check_length(level: Level, results: Sequence[IoResult], wanted: int) -> None:
    if len(results) != wanted:
        raise BackendError(level.name, f"{len(results)} results came back for {wanted} items")
