"""State of an engine at one moment, as gauges show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.decisions.guarding import Promotions
from tierkv.decisions.predict import PrefetchFigures

__all__ = ["EngineSnapshot", "TierSnapshot", "TrafficSnapshot"]

_NO_PROMOTIONS: Final = Promotions(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TrafficSnapshot:
    """What is known of reading from, or writing to, one tier.

    Attributes:
        direction: ``"read"`` or ``"write"``.
        latency_seconds: What a batch takes whatever its size.
        bandwidth: Bytes a second of large batches; 0 while unknown.
        batches: Batches it was learned from.
        breaker_open: Whether the tier is left out for now, because it failed or hung.
    """

    direction: str
    latency_seconds: float = 0.0
    bandwidth: float = 0.0
    batches: int = 0
    breaker_open: bool = False


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """State of one tier at one moment, in bytes as its backend charges them.

    ``traffic`` has one entry a direction; ``chain`` is the codec chain of new frames, and
    ``chains`` all that it may become; ``promotions`` are those into this tier, on a hit.
    """

    name: str
    used_bytes: int
    peak_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    entries: int
    traffic: tuple[TrafficSnapshot, ...] = (TrafficSnapshot("read"), TrafficSnapshot("write"))
    chain: str = "raw"
    chains: tuple[str, ...] = ("raw",)
    promotions: Promotions = _NO_PROMOTIONS


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of an engine at one moment; the engine hands it out from any thread.

    Attributes:
        tiers: Fastest first.
        sessions: Sessions that are open.
        session_bytes: Bytes that sessions refer to, each part once per session.
        leases: Leases that are out.
        write_queue_bytes: Bytes that wait for a slower tier.
        write_queue_oldest_seconds: How long the oldest of them have waited.
        tasks: Engine-owned jobs started so far.
        thread_hops: Calls handed to worker threads so far.
        prefetch: What each predictor's prefetches came to; ``arrival`` counts those that callers
            asked for, too.
        hints_heeded: Classes of sessions' hints that order evictions.
        hints_unheeded: Classes that tell nothing, or of which not enough is known yet.
    """

    tiers: tuple[TierSnapshot, ...] = ()
    sessions: int = 0
    session_bytes: int = 0
    leases: int = 0
    write_queue_bytes: int = 0
    write_queue_oldest_seconds: float = 0.0
    tasks: int = 0
    thread_hops: int = 0
    prefetch: tuple[PrefetchFigures, ...] = (PrefetchFigures("arrival"),)
    hints_heeded: int = 0
    hints_unheeded: int = 0
