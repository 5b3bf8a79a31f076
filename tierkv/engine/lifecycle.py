"""The life of an engine: open the tiers, keep house, drain and close."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NoReturn, Self

from tierkv import __version__
from tierkv.buffers import Staging
from tierkv.config import later_rules
from tierkv.engine.compose import describe, make_decisions, make_levels, open_level
from tierkv.engine.log import LogFile
from tierkv.engine.parts import NOT_OPEN, Parts
from tierkv.engine.pinning import Pinning
from tierkv.engine.predicting import make_prefetcher
from tierkv.engine.stats import CloseReport
from tierkv.engine.tracing import TraceFile
from tierkv.engine.warming import Warming
from tierkv.engine.watching import Watching
from tierkv.errors import BackendError, ClosedError
from tierkv.metrics import MetricsObserver, NullObserver, serve
from tierkv.mover.behind import WriteBehind
from tierkv.mover.core import Core
from tierkv.mover.fetch import Fetcher
from tierkv.mover.probing import probe
from tierkv.mover.tuning import Tuner
from tierkv.prefetch import Holder
from tierkv.session import SessionTable
from tierkv.session.table import Runtime
from tierkv.workers import Lane, Signal, Workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from tierkv.abc import Backend, Observer
    from tierkv.config import EngineConfig
    from tierkv.layout import Space
    from tierkv.mover.levels import Level
    from tierkv.workers import Job

__all__ = ["Lifecycle"]

_log = logging.getLogger("tierkv")
_LOOPS = ("write-behind", "housekeeping", "compression")


class Lifecycle(Parts):
    """What opens, keeps house and closes; :class:`~tierkv.engine.Engine` adds what users call."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        space: Space | None = None,
        backends: Sequence[Backend] | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(config, space)
        self._backends = tuple(backends) if backends is not None else None
        self._clock = clock
        self._wall = wall
        self._log_file: LogFile | None = None
        self._logging: Job[None] | None = None
        self._trace_file: TraceFile | None = None
        self.metrics = MetricsObserver(
            [t.name for t in config.tiers],
            self.snapshot,
            version=__version__,
            workers=_LOOPS,
            chains=sorted({r.chain for tier in config.tiers for r in later_rules(config, tier)}),
        )
        self._observer = observer or (self.metrics if config.metrics else NullObserver())
        self.workers = Workers(
            threads=config.threads,
            name=config.name,
            on_restart=lambda worker: self._observer.restarted(worker=worker),
        )
        self._report: CloseReport | None = None
        self._closing: Signal | None = None
        self._pinning: Pinning | None = None
        self._watching: Watching | None = None
        self._holder: Holder | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __del__(self) -> None:
        if self._core is not None and not self._core.closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)

    # ------------------------------------------------------------------ lifecycle

    async def start(self) -> Self:
        """Open the tiers, recover what they hold, start the background loops.

        Raises:
            ConfigError: if a setting cannot be honoured.
            BackendError: if a tier cannot be used; the others are closed again.

        Cancellation: whatever was opened is closed again, then it is re-raised.
        """
        if self._core is not None:
            raise ClosedError("an engine is opened once; make a new one")
        levels = make_levels(self.config, self._backends)
        core = Core(
            decisions=make_decisions(self.config, levels),
            levels=levels,
            workers=self.workers,
            staging=Staging(int(self.config.staging)),
            observer=self._observer,
            clock=self._clock,
            wall=self._wall,
            verify_host=self.config.verify_host,
            timeout=float(self.config.tier_timeout),
        )
        self._loop = asyncio.get_running_loop()
        attempted: list[Level] = []
        try:
            await self.workers.start()
            await self._open(core, attempted)
        except BaseException:
            await self._shut(core, attempted)
            raise
        self._core = core
        _log.info("%s: %s", self.config.name, ", ".join(describe(core, x) for x in levels))
        return self

    async def _open(self, core: Core, attempted: list[Level]) -> None:
        """Open whatever start() promises; ``attempted`` tells which tiers need closing."""
        self._warming = Warming(core, self.config)
        self._warming.begin(self.default_space)
        if self.config.decision_log is not None:
            self._log_file = await self.workers.run(LogFile, self.config.decision_log)
            core.decisions.attach(self._log_file)
        if self.config.trace is not None:
            args = (self.config.trace, core.clock(), core.wall())
            self._trace_file = await self.workers.run(TraceFile, *args)
        for level in core.levels:
            attempted.append(level)
            await open_level(core, level)
            if level.resident is not None:
                core.devices.add(level.resident.device)
        self._usable = {x.index: core.decisions.capacity(x.index) for x in core.levels}
        fetcher = Fetcher(core)
        behind = WriteBehind(core, int(self.config.write_queue))
        fetcher.promoted = behind.promote
        prefetcher = make_prefetcher(self.config, core, fetcher, behind, self._log_file)
        recorder = self._trace_file.recorder if self._trace_file is not None else None
        self._runtime = Runtime(core, fetcher, behind, prefetcher, self.config.busy, recorder)
        self._table = SessionTable(core)
        self._watching, self._holder = Watching(core), Holder(core, prefetcher)
        if self.config.metrics_port is not None:
            self._server = serve(self.metrics.registry, self.config.metrics_port)
        self._tuner = Tuner(core, self.config.threads)
        self._pinning = Pinning(core)
        self.workers.supervise(_LOOPS[0], behind.run, Lane.BACKGROUND)
        self.workers.supervise(_LOOPS[1], self._housekeeping)

    def _keepers(self) -> tuple[Watching, Holder]:
        """Who tells of parts, and who keeps them.

        Raises:
            ClosedError: if the engine was not opened.
        """
        if self._watching is None or self._holder is None:
            raise ClosedError(NOT_OPEN)
        return self._watching, self._holder

    async def _housekeeping(self) -> None:
        pause = float(self.config.tick)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            self._observer.loop_lag(seconds=max(time.monotonic() - before - pause, 0.0))
            core = self.core
            drops, demotes = core.decisions.tick(core.clock())
            core.free(drops)
            self.runtime.behind.demote(demotes)
            self._sessions.expire(core.clock())
            self.runtime.prefetcher.tick()
            for level in core.levels:
                # by themselves: a tier that hangs must not stop the clock of the others
                if level.doomed and level.purging is None:
                    self.workers.spawn(core.purge, level, name="purge", lane=Lane.BACKGROUND)
                probe(core, level)
            self._tuner.tick()
            self._warming.tick()
            self.runtime.behind.recoder.kick()
            if self._pinning is not None:
                self._pinning.begin()
            if self._log_file is not None and (self._logging is None or self._logging.done()):
                # by itself, too: its disk may hang as any other
                self._logging = self.workers.spawn(
                    self.workers.run, self._log_file.flush, name="log", lane=Lane.BACKGROUND
                )
            if self._trace_file is not None and self._trace_file.due(core.clock()):
                run, flush = self.workers.run, self._trace_file.flush
                self.workers.spawn(run, flush, name="trace", lane=Lane.BACKGROUND)

    async def aclose(self) -> CloseReport:
        """Write what is queued (for at most ``close_timeout``), sync and close. Idempotent.

        What is still being loaded or stored then ends at once, with ClosedError or a shorter
        result.

        Returns:
            What did not get to its tier in time; it is also logged.

        Raises:
            ClosedError: if the engine belongs to another event loop, which runs, or process.

        Cancellation: closing goes on to its end, which comes within a small multiple of
        ``close_timeout`` even if tiers hang; then the cancellation is re-raised.
        """
        if self._core is None:
            return CloseReport(0)
        if self._loop is not None and self._loop.is_running():
            self.workers.home.refuse_elsewhere()  # where it has ended, anybody may close
        if self._closing is not None:
            await self._closing.wait()
            return self._report or CloseReport(0)
        self._closing = Signal()
        core, behind = self._core, self.runtime.behind
        core.closing.set()
        for keeper in self._keepers():
            keeper.close()
        try:
            if self.workers.running:
                await self.workers.outlast(self._drain, core, behind)
        finally:
            self._report = CloseReport(behind.pending)
            if behind.pending:
                _log.warning("%s: closed, %d parts not written", self.config.name, behind.pending)
            try:
                await self._shut(core, core.levels)
            finally:
                self._closing.set()
        return self._report

    async def _drain(self, core: Core, behind: WriteBehind) -> None:
        grace = float(self.config.close_timeout)
        try:
            async with asyncio.timeout(grace):
                await behind.drain()
                for level in core.levels:
                    job = self.workers.spawn(core.flush, level, name="flush", lane=Lane.BACKGROUND)
                    await job.wait()
        except (TimeoutError, BackendError, ClosedError) as error:
            _log.warning("%s: closing early: %s", self.config.name, str(error) or "out of time")

    async def _shut(self, core: Core, levels: Sequence[Level]) -> None:
        """End the jobs, then close tiers, files and threads; each step comes, whatever happens."""
        core.closing.set()
        grace = float(self.config.close_timeout)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.workers.aclose, grace)
            stack.push_async_callback(self._close_files, grace)
            if list(core.devices):
                stack.push_async_callback(self._apart, self._close_devices, core)
            for level in levels:
                stack.push_async_callback(self._close_tier, level, grace)
            if self._pinning is not None:
                # before its memory goes; no copy is under way any more
                stack.push_async_callback(self._apart, self._unpin, self._pinning)
            await self.workers.quiesce(grace)

    async def _apart(self, fn: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a step of closing where no cancellation reaches it, if there is such a place."""
        if self.workers.running:
            await self.workers.outlast(fn, *args)
        else:  # somebody cancelled every task of the loop
            await fn(*args)

    async def _unpin(self, pinning: Pinning) -> None:
        await self.workers.run(pinning.undo)

    async def _close_devices(self, core: Core) -> None:
        await self.workers.run(core.devices.close)

    async def _close_tier(self, level: Level, grace: float) -> None:
        if not self.workers.running:
            await level.backend.aclose()
            return
        job = self.workers.spawn(level.backend.aclose, name=f"close {level.name}", closing=True)
        if not await job.ended.outlast(grace):
            _log.error("%s: tier %s hangs and is given up", self.config.name, level.name)
            return
        try:
            await job.wait()
        except Exception:  # noqa: BLE001 - closing goes on, whatever one tier does
            _log.exception("%s: tier %s did not close", self.config.name, level.name)

    async def _close_files(self, grace: float) -> None:
        for thing in (self._server, self._log_file, self._trace_file):
            if thing is None:
                continue
            if not self.workers.running:
                await self.workers.run(thing.close)
                continue
            job = self.workers.spawn(self.workers.run, thing.close, name="close", closing=True)
            if not await job.ended.outlast(grace):
                _log.error("%s: %r hangs and is given up", self.config.name, thing)
                continue
            await job.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __enter__(self) -> NoReturn:
        raise ClosedError(
            "an engine is opened with 'async with', not 'with'; synchronous callers use "
            "tierkv.blocking.CacheManager"
        )

    def __exit__(self, *_: object) -> None:
        """Never called: see :meth:`__enter__`."""
