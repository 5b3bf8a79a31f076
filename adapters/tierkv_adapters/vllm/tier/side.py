"""What every method of the tier does, in words of no version of vLLM.

All methods are called by vLLM's scheduler thread, and none of them waits for I/O: lookups read an
index in memory that the engine keeps up to date, jobs are handed to the engine's loop, and what
came of them is taken from a queue. What the engine reports late or not at all is a miss; vLLM
never hears an exception.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, ConfigError, TierKVError
from tierkv_adapters.remote.feeds import LocalFeed
from tierkv_adapters.serving.eras import Eras
from tierkv_adapters.serving.leaving import at_exit, not_at_exit
from tierkv_adapters.serving.limited_log import LimitedLog
from tierkv_adapters.serving.managers import is_lossy, open_manager
from tierkv_adapters.serving.negative import NegativeCache
from tierkv_adapters.serving.replicas import ReplicaIndex
from tierkv_adapters.vllm.tier.counters import TierCounters
from tierkv_adapters.vllm.tier.engine import RowsLoaded, RowsStored, TierEngine
from tierkv_adapters.vllm.tier.jobs import Job, JobBook
from tierkv_adapters.vllm.tier.keys import KeyMap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import BlockKey
    from tierkv.layout import Space
    from tierkv_adapters.vllm.tier.jobs import EndedJob
    from tierkv_adapters.vllm.tier.settings import TierSettings

__all__ = ["Answer", "TierResult", "TierSide"]

_log = logging.getLogger("tierkv.vllm.tier")

Answer = Literal["hit", "miss", "retry"]
"""Of a lookup. There is no fourth: what is on its way to this tier is still in vLLM's own."""

_SNAPSHOT_S: Final = 30.0  # for which the start waits until the index knows what is stored
_DRAIN_S: Final = 10.0  # beyond the deadline of loads, for which a reset waits
_SHARE: Final = 0.5  # of vLLM's CPU tier that stores under way may hold

_COUNTED: Final = {
    MissReason.DAMAGED.value: "corrupt_chunks",
    MissReason.DEADLINE.value: "late_chunks",
    MissReason.FAILED.value: "failed_chunks",
}


class TierResult(NamedTuple):
    """A job that is over, as vLLM wants to hear of it.

    Attributes:
        number: vLLM's number of it.
        success: Whether all of its chunks came, or were stored.
        keys: Of a load: chunks that came; of a store: None.
        seconds: From its order to its end.
        nbytes: Bytes that were copied.
    """

    number: int
    success: bool
    keys: tuple[bytes, ...] | None
    seconds: float
    nbytes: int


class TierSide:
    """The tier. Opening it opens the engine and waits until its content is known.

    Args:
        space: Whose chunks; see :func:`~tierkv_adapters.vllm.tier.keys.row_layout`.
        rows: vLLM's CPU tier ``[chunks, bytes]``.
        settings: What the user said.
        number: Number of this replica among all, for roots that have one owner.
        replicas: How many there are.
        clock: Tells the time in seconds.

    Raises:
        ConfigError: if there is no tier, a setting cannot be honoured, or a codec chain loses
            bits: nobody knows what the bytes of a row mean.
        BackendError: if a tier cannot be used.
    """

    def __init__(
        self,
        space: Space,
        rows: memoryview,
        settings: TierSettings,
        *,
        number: int = 0,
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = TierCounters()
        self._clock = clock
        self._deadline = settings.load_deadline
        self._row_bytes = rows.nbytes // max(1, len(rows))
        self._most_held = max(1, int(len(rows) * _SHARE))
        self._held = 0  # chunks that stores under way keep in vLLM's CPU tier
        self._space = space
        self._weights_are_fixed = settings.weights_are_fixed
        self._keys = KeyMap(space)
        self._negative = NegativeCache(settings.retry_after)
        self._limited = LimitedLog(_log)
        opened = open_manager(settings.config, settings.manager, number, replicas)
        self.manager, self._owned = opened
        try:
            if is_lossy(self.manager.config):
                raise ConfigError(
                    "the chunks of vLLM's OffloadingConnector are bytes of unknown meaning, which "
                    "only lossless codecs may touch (lz4, zstd, planes); use TierKVConnector for "
                    "lossy ones"
                )
            self._index = ReplicaIndex(1)
            self._feed = LocalFeed(self.manager, self._index, 0)
            self._patient = not self._feed.start(_SNAPSHOT_S)
            self._patience_ends = self._clock() + (self._deadline or _SNAPSHOT_S)
            self._engine = TierEngine(
                self.manager, space, rows, ttl=settings.ttl, clock=self._clock
            )
        except BaseException:
            if self._owned:
                self.manager.close()
            raise
        self._jobs = JobBook(self.manager, self._clock)
        self._closed = False
        at_exit(self.close)  # vLLM may end without telling its tiers

    def __repr__(self) -> str:
        return f"<TierSide: {self.chunks} chunks, {len(self._jobs)} jobs>"

    @property
    def chunks(self) -> int:
        """Parts in the engine's tiers now, those of other spaces included."""
        return self._index.parts(0)

    def lookup(self, key: bytes) -> Answer:
        """Whether a chunk could be loaded now. Memory alone; some microseconds.

        ``"retry"`` only while the engine still finds out what is stored, which the start waits
        for; for as long as a load may take, at most.
        """
        if len(self._negative) and self._negative.blocked(_named(key), self._clock()):
            self.counters.blocked_lookups += 1
            return "miss"
        if self._index.tiers(0, self._keys.part(key)):
            return "hit"
        if self._patient:
            self._patient = not self._index.is_complete() and self._clock() < self._patience_ends
            if self._patient:
                return "retry"
        return "miss"

    def submit_load(self, number: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begin to bring chunks into rows."""
        until = None if self._deadline is None else self._clock() + self._deadline
        rows = RowsLoaded()

        async def work(job: Job) -> None:
            await self._engine.load(job.keys, chunks, until, rows)

        self._jobs.begin(number, keys, rows, work)

    def submit_store(self, number: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begin to keep rows. Dropped where earlier stores hold half of vLLM's CPU tier already.

        vLLM pins a chunk until its store has ended, and answers lookups with a miss when all are
        pinned: a slow tier must not take its CPU tier away.
        """
        rows = RowsStored()
        if self._held and self._held + len(keys) > self._most_held:
            self.counters.stores_shed += 1
            rows.skipped = len(keys)
            self._jobs.begin(number, keys, rows, None)
            return

        async def work(job: Job) -> None:
            await self._engine.store(job.keys, chunks, rows)

        job = self._jobs.begin(number, keys, rows, work)
        if job.pending is not None:
            self._held += len(keys)

    def finished(self) -> list[TierResult]:
        """Jobs that have ended since the last call, each exactly once."""
        out = []
        for ended in self._jobs.ended():
            rows = ended.job.rows
            if isinstance(rows, RowsLoaded):
                out.append(self._loaded(ended, rows))
            else:
                out.append(self._stored(ended, rows))
        return out

    def _loaded(self, ended: EndedJob, rows: RowsLoaded) -> TierResult:
        counters, job = self.counters, ended.job
        came = set(rows.keys)
        failed = [key for key in job.keys if key not in came]
        why = MissReason.FAILED.value
        for key in failed:
            name = _COUNTED.get(rows.reasons.get(key, why), "gone_chunks")
            setattr(counters, name, getattr(counters, name) + 1)
        # whatever the reason: asked again at once, the same answer would make a circle
        self._negative.failed(map(_named, failed), self._clock())
        self._complain("a promotion", ended)
        counters.loads += 1
        counters.loads_short += bool(failed)
        counters.loaded_chunks += len(came)
        counters.loaded_bytes += len(came) * self._row_bytes
        counters.load_seconds += ended.seconds
        keys = tuple(key for key in job.keys if key in came)
        nbytes = len(keys) * self._row_bytes
        return TierResult(job.number, not failed, keys, ended.seconds, nbytes)

    def _stored(self, ended: EndedJob, rows: RowsStored) -> TierResult:
        counters, job = self.counters, ended.job
        if job.pending is not None:
            self._held -= len(job.keys)
        kept = len(rows.stored) + rows.present
        for key in rows.stored:
            self._negative.came_back(_named(key))
        self._complain("a store", ended)
        counters.stores += 1
        counters.stored_chunks += len(rows.stored)
        counters.stored_bytes += len(rows.stored) * self._row_bytes
        counters.present_chunks += rows.present
        counters.skipped_chunks += len(job.keys) - kept
        counters.store_seconds += ended.seconds
        nbytes = len(rows.stored) * self._row_bytes
        return TierResult(job.number, kept == len(job.keys), None, ended.seconds, nbytes)

    def _complain(self, what: str, ended: EndedJob) -> None:
        if ended.error is None:
            return
        if not isinstance(ended.error, TierKVError):
            self.counters.errors += 1
        self._limited.warning(f"{what} failed", repr(ended.error))

    def busy(self) -> bool:
        """Whether a job has not been told of as finished."""
        return bool(len(self._jobs))

    def drain(self) -> None:
        """Wait until no job touches a row; bounded, see :meth:`JobBook.drain`.

        vLLM asks for it when it resets its caches, and leaves what its tiers hold alone. But other
        weights may be in place from then on, which changes neither a file nor a key: unless the
        user rules that out, what was stored before is found again by the next process at the
        earliest, and what is stored since by this one alone.

        Raises:
            TierKVError: if a cancelled copy does not end; vLLM must not use the rows again then.
        """
        self._jobs.drain((self._deadline or 0.0) + _DRAIN_S)
        if self._weights_are_fixed:
            return
        space = Eras().within(self._space, secrets.token_bytes(16))
        self._keys = KeyMap(space)
        with contextlib.suppress(ClosedError):  # nothing is found or stored any more
            self.manager.call(self._engine.move, space)

    def close(self) -> None:
        """End all jobs and let go of vLLM's memory. Idempotent.

        What was acknowledged by the engine is as durable as it ever was: nothing waits for this.

        Raises:
            TierKVError: if a copy does not end: vLLM keeps the memory then.
        """
        if self._closed:
            return
        self._jobs.drain(_DRAIN_S)
        self._closed = True
        not_at_exit(self.close)
        try:
            self._feed.close()
            self.manager.call(self._engine.close)
        except TierKVError as error:
            _log.warning("while the tier was closed: %s", error)
        finally:
            self._engine.let_go()
            if self._owned:
                self.manager.close()


def _named(key: bytes) -> BlockKey:
    return key  # type: ignore[return-value] # the cache compares keys, and asks no more of them
