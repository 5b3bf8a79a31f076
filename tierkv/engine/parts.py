"""The parts of a running engine, and snapshots of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.errors import ClosedError, ConfigError
from tierkv.layout import Space
from tierkv.metrics import EngineSnapshot, TierSnapshot

if TYPE_CHECKING:
    from tierkv.config import EngineConfig
    from tierkv.metrics import MetricsServer
    from tierkv.mover.core import Core
    from tierkv.session import SessionInfo, SessionTable
    from tierkv.session.table import Runtime

__all__ = ["NOT_OPEN", "Parts", "check_space"]

NOT_OPEN = "the engine is not open: use it inside 'async with tierkv.open(...) as engine'"


def check_space(space: object) -> Space:
    """Take a space given by a caller.

    Raises:
        ConfigError: if it is none.
    """
    if not isinstance(space, Space):
        raise ConfigError(f"space= takes a tierkv.Space(identity, layout), not {space!r:.80}")
    return space


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
            session_bytes=sum(self._sessions.info(s).nbytes for s in self._sessions if s.handles),
        )
