"""Families that show the state of an engine at the moment of a scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from tierkv.metrics.snapshot import EngineSnapshot

__all__ = ["snapshot_families"]


def snapshot_families(state: EngineSnapshot) -> Iterator[Metric]:
    """Gauges (and the counters that the engine itself keeps) of one snapshot."""
    per_tier = (
        ("used", "Bytes charged for the parts in a tier.", [t.used_bytes for t in state.tiers]),
        ("used_peak", "Most bytes ever charged at once.", [t.peak_bytes for t in state.tiers]),
        ("capacity", "Bytes that a tier may hold.", [t.capacity_bytes for t in state.tiers]),
        ("reserved", "Bytes set aside for stores.", [t.reserved_bytes for t in state.tiers]),
    )
    columns = [(f"tierkv_tier_{name}_bytes", text, values) for name, text, values in per_tier]
    entries = [t.entries for t in state.tiers]
    columns.append(("tierkv_tier_entries", "Parts that a tier holds.", entries))
    for name, text, values in columns:
        family = GaugeMetricFamily(name, text, labels=("tier",))
        for tier, value in zip(state.tiers, values, strict=True):
            family.add_metric((tier.name,), value)
        yield family
    yield from _traffic(state)
    yield from _promotions(state)
    yield from _hints(state)
    yield from _prefetch(state)
    yield GaugeMetricFamily("tierkv_sessions_open", "Sessions open now.", state.sessions)
    yield GaugeMetricFamily(
        "tierkv_session_bytes", "Bytes that open sessions refer to.", state.session_bytes
    )
    yield GaugeMetricFamily("tierkv_leases", "Leases out now.", state.leases)
    yield GaugeMetricFamily(
        "tierkv_write_queue_bytes", "Bytes that wait for a slower tier.", state.write_queue_bytes
    )
    yield GaugeMetricFamily(
        "tierkv_write_queue_oldest_seconds",
        "How long the oldest copy has waited for a slower tier.",
        state.write_queue_oldest_seconds,
    )
    yield CounterMetricFamily("tierkv_tasks", "Engine-owned jobs started.", state.tasks)
    yield CounterMetricFamily(
        "tierkv_thread_hops", "Calls handed to worker threads.", state.thread_hops
    )


def _promotions(state: EngineSnapshot) -> Iterator[Metric]:
    made = CounterMetricFamily(
        "tierkv_promotions", "Parts copied into a tier because they were hit.", labels=("tier",)
    )
    outcomes = CounterMetricFamily(
        "tierkv_promotion_outcomes",
        "What became of them: used again, or wasted (gone for want of room before that); refused"
        " counts the times that the thrash guard let none be made.",
        labels=("tier", "outcome"),
    )
    for tier in state.tiers:
        made.add_metric((tier.name,), tier.promotions.made)
        for outcome in ("used", "wasted", "refused"):
            outcomes.add_metric((tier.name, outcome), getattr(tier.promotions, outcome))
    yield from (made, outcomes)


def _hints(state: EngineSnapshot) -> Iterator[Metric]:
    # how many, not which: a class is named by what callers say
    family = GaugeMetricFamily(
        "tierkv_hint_classes",
        "Classes of hints seen: heeded where they tell when sessions return.",
        labels=("heeded",),
    )
    family.add_metric(("yes",), state.hints_heeded)
    family.add_metric(("no",), state.hints_unheeded)
    yield family


def _prefetch(state: EngineSnapshot) -> Iterator[Metric]:
    issued = CounterMetricFamily(
        "tierkv_prefetch_issued", "Parts that a predictor was granted.", labels=("predictor",)
    )
    nbytes = CounterMetricFamily(
        "tierkv_prefetch_bytes", "Bytes that a predictor was granted.", labels=("predictor",)
    )
    outcomes = CounterMetricFamily(
        "tierkv_prefetch_outcomes",
        "What became of them: used, late (still on the way when asked for), wasted, refused.",
        labels=("predictor", "outcome"),
    )
    enabled = GaugeMetricFamily(
        "tierkv_prefetch_enabled",
        "Whether a predictor plans: 0 while it is off for being wrong too often.",
        labels=("predictor",),
    )
    for figures in state.prefetch:
        name = (figures.name,)
        issued.add_metric(name, figures.issued)
        nbytes.add_metric(name, figures.nbytes)
        enabled.add_metric(name, float(figures.enabled))
        for outcome in ("used", "late", "wasted", "refused"):
            outcomes.add_metric((figures.name, outcome), getattr(figures, outcome))
    yield from (issued, nbytes, outcomes, enabled)


def _traffic(state: EngineSnapshot) -> Iterator[Metric]:
    labels = ("tier", "direction")
    latency = GaugeMetricFamily(
        "tierkv_tier_latency_seconds", "Learned latency of a batch.", labels=labels
    )
    bandwidth = GaugeMetricFamily(
        "tierkv_tier_bandwidth_bytes_per_second",
        "Learned bandwidth of large batches; 0 while unknown.",
        labels=labels,
    )
    broken = GaugeMetricFamily(
        "tierkv_breaker_open",
        "Whether a tier is left out because it failed or hung.",
        labels=labels,
    )
    chains = GaugeMetricFamily(
        "tierkv_tier_chain_active",
        "Codec chain of new frames: 1 for the one in use.",
        labels=("tier", "chain"),
    )
    for tier in state.tiers:
        for way in tier.traffic:
            key = (tier.name, way.direction)
            latency.add_metric(key, way.latency_seconds)
            bandwidth.add_metric(key, way.bandwidth)
            broken.add_metric(key, float(way.breaker_open))
        for chain in tier.chains:
            chains.add_metric((tier.name, chain), float(chain == tier.chain))
    yield from (latency, bandwidth, broken, chains)
