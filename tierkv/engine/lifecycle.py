"""The life of an engine: open the tiers, keep house, drain and close."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from tierkv.buffers import Staging
from tierkv.engine.compose import make_decisions, make_levels, open_level
from tierkv.engine.stats import CloseReport
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.metrics import EngineSnapshot, MetricsObserver, NullObserver, TierSnapshot, serve
from tierkv.mover.behind import WriteBehind
from tierkv.mover.core import Core
from tierkv.mover.fetch import Fetcher
from tierkv.prefetch import Prefetcher
from tierkv.session import SessionTable
from tierkv.session.table import Runtime
from tierkv.workers import Signal, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tierkv.abc import Backend, Observer
    from tierkv.config import EngineConfig
    from tierkv.layout import Space
    from tierkv.mover.core import Level
    from tierkv.session import SessionInfo

__all__ = ["Lifecycle"]

_log = logging.getLogger("tierkv")
_LOOPS = ("write-behind", "housekeeping")
_LOG_BUFFER = 1 << 20


class Lifecycle:
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
        self.config = config
        self.default_space = space
        self._backends = tuple(backends) if backends is not None else None
        self._clock = clock
        self._wall = wall
        self._log_file: BinaryIO | None = None
        self.metrics = MetricsObserver(
            [t.name for t in config.tiers],
            self.snapshot,
            version=version("tierkv-engine"),
            workers=_LOOPS,
        )
        self._observer = observer or (self.metrics if config.metrics else NullObserver())
        self.workers = Workers(
            threads=config.threads,
            name=config.name,
            on_restart=lambda worker: self._observer.restarted(worker=worker),
        )
        self._core: Core | None = None
        self._runtime: Runtime | None = None
        self._table: SessionTable | None = None
        self._server: Any = None
        self._report: CloseReport | None = None
        self._closing: Signal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        if self._core is None:
            return f"<Engine {self.config.name}: not open>"
        d = self._core.decisions
        tiers = ", ".join(f"{x.name} {d.used(x.index)} B" for x in self._core.levels)
        state = "closed" if self._core.closed else "open"
        return (
            f"<Engine {self.config.name}: {state} | {tiers} | {len(self._sessions)} sessions, "
            f"{d.leases()} leases, {self.runtime.behind.pending} to write>"
        )

    def __del__(self) -> None:
        if self._core is not None and not self._core.closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)

    # ------------------------------------------------------------------ lifecycle

    async def start(self) -> Self:
        """Open the tiers, recover what they hold, start the background loops.

        Raises:
            ConfigError: if a setting cannot be honoured.
            BackendError: if a tier cannot be used; the others are closed again.
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
        )
        self._loop = asyncio.get_running_loop()
        await self.workers.start()
        opened: list[Level] = []
        try:
            if self.config.decision_log is not None:
                self._log_file = await self.workers.run(_open_log, self.config.decision_log)
                core.decisions.attach(self._log_file)
            for level in levels:
                await open_level(core, level)
                opened.append(level)
        except BaseException:
            for level in reversed(opened):
                await level.backend.aclose()
            await self.workers.aclose(float(self.config.close_timeout))
            self._close_log()
            raise
        self._core = core
        fetcher = Fetcher(core)
        behind = WriteBehind(core, int(self.config.write_queue))
        prefetcher = Prefetcher(core, fetcher)
        self._runtime = Runtime(core, fetcher, behind, prefetcher, self.config.busy)
        self._table = SessionTable(core)
        for name, loop in zip(_LOOPS, (behind.run, self._housekeeping), strict=True):
            self.workers.supervise(name, loop)
        if self.config.metrics_port is not None:
            self._server = serve(self.metrics.registry, self.config.metrics_port)
        _log.info(
            "%s: %s",
            self.config.name,
            ", ".join(f"{x.name}={x.backend.stats().mode}" for x in levels),
        )
        return self

    async def _housekeeping(self) -> None:
        core, behind = self.core, self.runtime.behind
        pause = float(self.config.tick)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            self._observer.loop_lag(seconds=max(time.monotonic() - before - pause, 0.0))
            drops, demotes = core.decisions.tick(core.clock())
            core.free(drops)
            behind.demote(demotes)
            self._sessions.expire(core.clock())
            for level in core.levels:
                await core.purge(level)

    async def aclose(self) -> CloseReport:
        """Write what is queued (for at most ``close_timeout``), sync and close. Idempotent.

        Returns:
            What did not get to its tier in time; it is also logged.
        """
        if self._report is not None:
            return self._report
        if self._core is None:
            self._report = CloseReport(0)
            return self._report
        if self._closing is not None:
            await self._closing.wait()
            assert self._report is not None
            return self._report
        self._closing = Signal()
        core, behind = self._core, self.runtime.behind
        core.closed = True
        try:
            unwritten = await self._drain(core, behind)
            self._report = CloseReport(unwritten)
            if unwritten:
                _log.warning("%s: closed with %d parts not written", self.config.name, unwritten)
        finally:
            if self._report is None:
                self._report = CloseReport(behind.pending)
            await self._shut(core)
            self._closing.set()
        return self._report

    async def _drain(self, core: Core, behind: WriteBehind) -> int:
        grace = float(self.config.close_timeout)
        try:
            async with asyncio.timeout(grace):
                await behind.drain()
                for level in core.levels:
                    await self.workers.spawn(core.flush, level, name="flush").wait()
        except (TimeoutError, BackendError, ClosedError) as error:
            _log.warning("%s: closing early: %s", self.config.name, error)
        return behind.pending

    async def _shut(self, core: Core) -> None:
        grace = float(self.config.close_timeout)
        if self._server is not None:
            self._server.close()
        for level in core.levels:
            try:
                async with asyncio.timeout(grace):
                    await level.backend.aclose()
            except Exception:  # noqa: BLE001 - closing goes on, whatever one tier does
                _log.exception("%s: tier %s did not close", self.config.name, level.name)
        await self.workers.aclose(grace)
        self._close_log()

    def _close_log(self) -> None:
        if self._log_file is not None:
            self._log_file.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------ parts

    @property
    def core(self) -> Core:
        """Decisions, tiers and movers of the running engine.

        Raises:
            ClosedError: if the engine was not opened.
        """
        if self._core is None:
            raise ClosedError("the engine is not open: use 'async with tierkv.open(...)'")
        return self._core

    @property
    def runtime(self) -> Runtime:
        """What sessions need of the engine."""
        if self._runtime is None:
            raise ClosedError("the engine is not open: use 'async with tierkv.open(...)'")
        return self._runtime

    @property
    def _sessions(self) -> SessionTable:
        if self._table is None:
            raise ClosedError("the engine is not open: use 'async with tierkv.open(...)'")
        return self._table

    def sessions(self) -> list[SessionInfo]:
        """Snapshot of every session."""
        return [self._sessions.info(state) for state in self._sessions]

    def snapshot(self) -> EngineSnapshot:
        """What the metrics page shows as gauges."""
        core = self._core
        if core is None:
            return EngineSnapshot()
        d = core.decisions
        return EngineSnapshot(
            tiers=tuple(
                TierSnapshot(
                    name=x.name,
                    used_bytes=d.used(x.index),
                    capacity_bytes=self.config.tiers[x.index].capacity_bytes,
                    peak_bytes=core.peaks[x.index],
                    reserved_bytes=d.reserved(x.index),
                    entries=d.entries(x.index),
                )
                for x in core.levels
            ),
            sessions=sum(bool(state.handles) for state in self._sessions),
            leases=d.leases(),
            session_bytes=sum(i.nbytes for i in self.sessions()),
        )


def _open_log(path: str) -> BinaryIO:
    try:
        return open(path, "ab", buffering=_LOG_BUFFER)
    except OSError as error:
        raise ConfigError(f"decision_log: cannot write {path!r}: {error.strerror}") from error
