"""State of an engine at one moment, as gauges show it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineSnapshot", "TierSnapshot"]


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """State of one tier at one moment, in bytes as its backend charges them."""

    name: str
    used_bytes: int
    peak_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of an engine at one moment; the engine hands it out from any thread.

    Attributes:
        tiers: Fastest first.
        sessions: Sessions that are open.
        session_bytes: Bytes that sessions refer to, each part once per session.
        leases: Leases that are out.
    """

    tiers: tuple[TierSnapshot, ...] = ()
    sessions: int = 0
    session_bytes: int = 0
    leases: int = 0
