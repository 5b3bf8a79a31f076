"""The parts of a running engine, and snapshots of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import ClosedError, ConfigError
from tierkv.layout import Space
from tierkv.metrics import EngineSnapshot, TierSnapshot, TrafficSnapshot

if TYPE_CHECKING:
    from tierkv.config import EngineConfig
    from tierkv.decisions.predict import PrefetchFigures
    from tierkv.metrics import MetricsServer
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.session import SessionInfo, SessionTable
    from tierkv.session.table import Runtime

__all__ = ["NOT_OPEN", "Parts", "check_space", "traffic"]

NOT_OPEN = "the engine is not open: use it inside 'async with tierkv.open(...) as engine'"


def check_space(space: object) -> Space:
    """Take a space given by a caller.

    Raises:
        ConfigError: if it is none.
    """
    if not isinstance(space, Space):
        raise ConfigError(f"space= takes a tierkv.Space(identity, layout), not {space!r:.80}")
    return space


def traffic(core: Core, level: Level) -> tuple[TrafficSnapshot, ...]:
    """What is known of reading from and writing to a tier."""
    out = []
    for direction in ("read", "write"):
        line = core.decisions.costs.line(level.index, direction)
        is_open = not core.decisions.costs.breaker(level.index, direction).closed
        out.append(TrafficSnapshot(direction, line.latency, line.bandwidth, line.count, is_open))
    return tuple(out)


class Parts:
    """What an engine is made of, once it is open.

    Attributes:
        config: Its configuration.
        default_space: Space of its sessions that name none.
    """

    _core: Core | None = None  # of the class: __del__ also sees engines whose making failed

    def __init__(self, config: EngineConfig, space: Space | None) -> None:
        self.config = config
        self.default_space = None if space is None else check_space(space)
        self._runtime: Runtime | None = None
        self._table: SessionTable | None = None
        self._server: MetricsServer | None = None
        self._limits: dict[int, int] = {}  # capacities of tiers that were resized
        self._usable: dict[int, int] = {}  # those that they were opened with

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

    @property
    def metrics_port(self) -> int | None:
        """Loopback port on which ``/metrics`` is served; None if it is not."""
        return None if self._server is None else self._server.port

    @property
    def core(self) -> Core:
        """Decisions, tiers and movers of the running engine.

        Raises:
            ClosedError: if the engine was not opened.
        """
        if self._core is None:
            raise ClosedError(NOT_OPEN)
        return self._core

    @property
    def runtime(self) -> Runtime:
        """What sessions need of the engine."""
        if self._runtime is None:
            raise ClosedError(NOT_OPEN)
        return self._runtime

    @property
    def _sessions(self) -> SessionTable:
        if self._table is None:
            raise ClosedError(NOT_OPEN)
        return self._table

    def _configured(self, tier: int) -> int:
        return self.config.tiers[tier].capacity_bytes

    def sessions(self) -> list[SessionInfo]:
        """Snapshot of every session."""
        return [self._sessions.info(state) for state in self._sessions]

    def _prefetched(self) -> tuple[PrefetchFigures, ...]:
        if self._runtime is None:  # while it is opened; every series is there from the start
            return EngineSnapshot().prefetch
        return self._runtime.prefetcher.books.figures(self._runtime.core.clock())

    def snapshot(self) -> EngineSnapshot:
        """What the metrics page shows as gauges."""
        core = self._core
        if core is None:
            return EngineSnapshot()
        d = core.decisions
        behind = self.runtime.behind if self._runtime is not None else None
        heeded = [found.heeded for found in d.hint_classes()]
        return EngineSnapshot(
            tiers=tuple(
                TierSnapshot(
                    name=x.name,
                    used_bytes=d.used(x.index),
                    capacity_bytes=self._limits.get(x.index, self._configured(x.index)),
                    peak_bytes=core.peaks[x.index],
                    reserved_bytes=d.reserved(x.index),
                    entries=d.entries(x.index),
                    traffic=traffic(core, x),
                    chain=x.chain,
                    chains=(x.chain,) if x.candidate is None else ("raw", x.candidate),
                    promotions=d.promotions(x.index),
                )
                for x in core.levels
            ),
            write_queue_bytes=behind.queued_bytes if behind is not None else 0,
            write_queue_oldest_seconds=behind.oldest_seconds if behind is not None else 0.0,
            tasks=core.workers.tasks_spawned,
            thread_hops=core.workers.thread_hops,
            sessions=sum(bool(state.handles) for state in self._sessions),
            leases=d.leases(),
            prefetch=self._prefetched(),
            hints_heeded=sum(heeded),
            hints_unheeded=len(heeded) - sum(heeded),
            session_bytes=sum(self._sessions.info(s).nbytes for s in self._sessions if s.handles),
        )
