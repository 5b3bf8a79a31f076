"""Snapshots of an engine: what it holds, and what closing it left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.abc import BackendStats
    from tierkv.decisions.guarding import Promotions
    from tierkv.decisions.hinting import HintClass
    from tierkv.decisions.predict import PrefetchFigures
    from tierkv.metrics import TrafficSnapshot

__all__ = ["CloseReport", "EngineStats"]


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing left behind.

    Attributes:
        unwritten: Parts that were meant for a slower tier and did not get there in time.
    """

    unwritten: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot of an engine.

    Attributes:
        tiers: Snapshot of each backend, by tier name.
        used: Bytes charged in each tier, by tier name.
        sessions: Sessions that exist.
        leases: Leases out.
        queued_bytes: Bytes waiting to be copied to slower tiers.
        in_flight: Reads under way.
        staging_used: Bytes of staging memory in use.
        tasks_spawned: Engine-owned jobs started so far.
        thread_hops: Calls handed to worker threads so far.
        bytes_copied: Bytes copied into callers' views so far.
        bytes_gathered: Bytes copied out of callers' views so far.
        oldest_seconds: How long the oldest of the queued bytes have waited.
        traffic: By tier, what was learned of reading from and writing to it: latency, bandwidth,
            and whether it is left out because it failed or hung.
        chains: By tier, the codec chain of new frames.
        prefill: By space (its fingerprint in hexadecimal), tokens a second of prefill, as told by
            :meth:`tierkv.session.Session.computed`.
        prefetch: By predictor, what its prefetches came to; ``arrival`` counts those that callers
            asked for, too.
        promotions: By tier, what became of the parts that were copied into it on a hit.
        hints: What was learned of each class of hints (:meth:`tierkv.session.Session.hint`).
    """

    tiers: dict[str, BackendStats]
    used: dict[str, int]
    sessions: int
    leases: int
    queued_bytes: int
    in_flight: int
    staging_used: int
    tasks_spawned: int
    thread_hops: int
    bytes_copied: int
    bytes_gathered: int = 0
    oldest_seconds: float = 0.0
    traffic: dict[str, tuple[TrafficSnapshot, ...]] = field(default_factory=dict)
    chains: dict[str, str] = field(default_factory=dict)
    prefill: dict[str, float] = field(default_factory=dict)
    prefetch: dict[str, PrefetchFigures] = field(default_factory=dict)
    promotions: dict[str, Promotions] = field(default_factory=dict)
    hints: tuple[HintClass, ...] = ()

    @property
    def breaker_open(self) -> tuple[str, ...]:
        """Tiers that are left out, for reads or writes, because they failed or hung."""
        return tuple(
            tier for tier, ways in self.traffic.items() if any(way.breaker_open for way in ways)
        )

    def counters(self) -> dict[str, int]:
        """The figures that change with traffic, for comparisons."""
        return {
            "tasks_spawned": self.tasks_spawned,
            "bytes_copied": self.bytes_copied,
            "sessions": self.sessions,
            **{f"used.{name}": nbytes for name, nbytes in self.used.items()},
        }
