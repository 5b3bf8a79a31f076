"""What the engine did, for Prometheus: plain ints on the hot path, read when scraped.

Every engine has its own ``CollectorRegistry``, so several live in one process and closing one
leaves nothing behind. Every label combination exists from the start at 0, label values come from
closed sets (tier names and the enums of :mod:`tierkv.decisions.types`), and no session, tenant,
key or path is ever a label. Ratios are left to the query: export counts, divide in PromQL.
"""

from __future__ import annotations

from tierkv.metrics.null import NullObserver
from tierkv.metrics.observer import BUCKETS, MetricsObserver
from tierkv.metrics.server import MetricsServer, serve
from tierkv.metrics.snapshot import EngineSnapshot, TierSnapshot, TrafficSnapshot

__all__ = [
    "BUCKETS",
    "EngineSnapshot",
    "MetricsObserver",
    "MetricsServer",
    "NullObserver",
    "TierSnapshot",
    "TrafficSnapshot",
    "serve",
]
