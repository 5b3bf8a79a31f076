"""What the tier counts: plain numbers that only grow, touched by the scheduler's thread alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

__all__ = ["TIER_COUNTERS", "TIER_GAUGES", "TierCounters"]

TIER_COUNTERS: Final = {
    "loads": "Promotion jobs that ended.",
    "loads_short": "Promotion jobs that did not bring all of their chunks.",
    "loaded_chunks": "Chunks brought into vLLM's CPU tier, verified.",
    "loaded_bytes": "Bytes of them.",
    "load_seconds": "Seconds from order to end of promotion jobs.",
    "corrupt_chunks": "Chunks not brought because their bytes were damaged.",
    "late_chunks": "Chunks not brought because the deadline was over.",
    "gone_chunks": "Chunks not brought because they had left after they were looked up.",
    "failed_chunks": "Chunks not brought because a tier failed.",
    "stores": "Store jobs that ended.",
    "stores_shed": "Store jobs dropped because earlier ones held too much of vLLM's CPU tier.",
    "stored_chunks": "Chunks newly stored.",
    "stored_bytes": "Bytes of them.",
    "present_chunks": "Chunks of store jobs that were there already.",
    "skipped_chunks": "Chunks of store jobs that were not stored.",
    "store_seconds": "Seconds from order to end of store jobs.",
    "blocked_lookups": "Lookups answered with a miss because the chunk failed a short while ago.",
    "errors": "Jobs that ended in a failure that nobody foresaw.",
}
"""Names and what they mean, for vLLM's Prometheus page."""

TIER_GAUGES: Final = {"chunks": "Chunks in tierkv's tiers."}
"""What goes up and down."""


@dataclass(slots=True)
class TierCounters:
    """Counts since the tier began; see :data:`TIER_COUNTERS`."""

    loads: int = 0
    loads_short: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    corrupt_chunks: int = 0
    late_chunks: int = 0
    gone_chunks: int = 0
    failed_chunks: int = 0
    stores: int = 0
    stores_shed: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    present_chunks: int = 0
    skipped_chunks: int = 0
    store_seconds: float = 0.0
    blocked_lookups: int = 0
    errors: int = 0

    def snapshot(self) -> dict[str, int | float]:
        """All of them by name."""
        return dataclasses.asdict(self)
