"""The observer that counts: plain ints while the engine runs, Prometheus families when scraped."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from tierkv.abc import Observer
from tierkv.decisions.types import EvictReason, MissReason, SkipReason
from tierkv.metrics.gauges import snapshot_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from tierkv.metrics.snapshot import EngineSnapshot

__all__ = ["BUCKETS", "MetricsObserver"]

BUCKETS: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the duration histograms, in seconds."""

_ANY: Final = "all"  # value of the label `tier` where no single tier applies
_OTHER: Final = "other"  # value that keeps a label set closed
_DIRECTIONS: Final = ("read", "write", "delete")
_OUTCOMES: Final = ("ok", "failed")
_TIER_OPS: Final = ("load",)  # these know the tier they came from; the others do not
_ENGINE_OPS: Final = ("match", "store", "flush", "prefetch", _OTHER)
_BREAKER: Final = ("open", "half_open", "closed")
_RECODINGS: Final = ("converted", "kept", "put_off", "failed")
_CORRUPTIONS: Final = ("checksum", "header", "short", _OTHER)


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        rows, running = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows


class MetricsObserver(Observer):
    """Counts what the engine did and offers it to Prometheus.

    The methods run on the event loop, cost about a microsecond and never raise: a label value
    outside its closed set is counted as ``other`` (a tier as ``all``). Scrapes may come from any
    thread at any time, before the first request and after the engine is closed.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        snapshot: Callable[[], EngineSnapshot],
        *,
        version: str,
        workers: Sequence[str] = (),
        chains: Sequence[str] = (),
    ) -> None:
        """Start at zero.

        Args:
            tiers: Names of the tiers, fastest first.
            snapshot: Returns the present state; called by scrapes, from any thread.
            version: Version of the package, for ``tierkv_build_info``.
            workers: Names of the background workers.
            chains: Codec chains that the rules of compression name.
        """
        self.tiers = tuple(tiers)
        self._snapshot = snapshot
        self._version = version
        scopes = (*self.tiers, _ANY)
        self._lookups = _zeros(scopes, ("hit", "miss"))
        self._misses = _zeros([r.value for r in MissReason])
        self._tokens = {"requested": 0, "matched": 0, "reusable": 0}
        self._io_bytes = _zeros(self.tiers, _DIRECTIONS)
        self._io_operations = _zeros(self.tiers, _DIRECTIONS, _OUTCOMES)
        self._evictions = _zeros(self.tiers, [r.value for r in EvictReason])
        self._evicted_bytes = dict(self._evictions)
        self._corruption = _zeros(self.tiers, _CORRUPTIONS)
        self._skipped = _zeros(self.tiers, [r.value for r in SkipReason])
        self._restarts = _zeros((*workers, _OTHER))
        self._breakers = _zeros(self.tiers, _BREAKER)
        self._recodings = _zeros(self.tiers, (*chains, _OTHER), _RECODINGS)
        self._recoded_bytes = _zeros(self.tiers)
        self._refused = _zeros(self.tiers)
        self._saved = 0.0
        self._lag = _Histogram()
        timed = [*_zeros(_DIRECTIONS, self.tiers), *_zeros(_TIER_OPS, scopes)]
        timed += _zeros(_ENGINE_OPS, (_ANY,))
        self._durations = {key: _Histogram() for key in timed}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Scrape(self))

    def scrape(self) -> bytes:
        """The metrics page: text exposition format, UTF-8."""
        return generate_latest(self.registry)

    def lookup(
        self,
        *,
        requested: int,
        reusable: int,
        matched: int,
        by_tier: dict[str, int],
        reason: str | None,
    ) -> None:
        """Count one match under the slowest tier that it needs."""
        tier = _ANY
        for name in self.tiers:
            if by_tier.get(name):
                tier = name
        self._lookups[tier, "hit" if matched else "miss"] += 1
        if reason is not None and (reason,) in self._misses:
            self._misses[(reason,)] += 1
        self._tokens["requested"] += requested
        self._tokens["reusable"] += reusable
        self._tokens["matched"] += matched

    def io(
        self,
        *,
        tier: str,
        direction: str,
        nbytes: int,
        operations: int,
        seconds: float,
        failed: int,
    ) -> None:
        """Count one backend batch."""
        if (tier, direction) not in self._io_bytes:
            return
        self._io_bytes[tier, direction] += nbytes
        self._io_operations[tier, direction, "ok"] += operations - failed
        self._io_operations[tier, direction, "failed"] += failed
        self._durations[direction, tier].observe(seconds)

    def evicted(self, *, tier: str, reason: str, nbytes: int) -> None:
        """Count one part that left a tier."""
        if (tier, reason) in self._evictions:
            self._evictions[tier, reason] += 1
            self._evicted_bytes[tier, reason] += nbytes

    def corrupted(self, *, tier: str, kind: str) -> None:
        """Count one damaged copy."""
        if tier in self.tiers:
            self._corruption[tier, kind if kind in _CORRUPTIONS else _OTHER] += 1

    def skipped(self, *, tier: str, reason: str, parts: int) -> None:
        """Count parts that a store did not put into a tier."""
        if (tier, reason) in self._skipped:
            self._skipped[tier, reason] += parts

    def operation(self, *, op: str, tier: str, seconds: float) -> None:
        """Count one operation and how long it took."""
        if op in _TIER_OPS:
            key = (op, tier if tier in self.tiers else _ANY)
        else:
            key = (op if op in _ENGINE_OPS else _OTHER, _ANY)
        self._durations[key].observe(seconds)

    def loop_lag(self, *, seconds: float) -> None:
        """Count how late the event loop ran a timer."""
        self._lag.observe(seconds)

    def restarted(self, *, worker: str) -> None:
        """Count one restart of a background worker."""
        self._restarts[(worker,) if (worker,) in self._restarts else (_OTHER,)] += 1

    def breaker(self, *, tier: str, to: str) -> None:
        """Count one change of a breaker."""
        if (tier, to) in self._breakers:
            self._breakers[tier, to] += 1

    def recoded(self, *, tier: str, chain: str, result: str, saved: int, refused: int) -> None:
        """Count one copy that was to be converted where it is."""
        known = (tier, chain, result) in self._recodings
        key = (tier, chain if known else _OTHER, result)
        if key in self._recodings:
            self._recodings[key] += 1
            self._recoded_bytes[(tier,)] += saved
            self._refused[(tier,)] += refused

    def saved(self, *, seconds: float) -> None:
        """Count seconds of prefill that a load saved."""
        self._saved += max(seconds, 0.0)

    def families(self) -> Iterator[Metric]:
        """Every family with its present values, in a fixed order."""
        yield from _counters(self._counter_tables())
        tokens = (
            ("requested", "Tokens that lookups asked for."),
            ("matched", "Tokens of the prefixes that lookups found."),
            ("reusable", "Tokens of lookups that their session had shown before."),
        )
        for name, text in tokens:
            yield CounterMetricFamily(f"tierkv_tokens_{name}", text, value=self._tokens[name])
        durations = HistogramMetricFamily(
            "tierkv_operation_duration_seconds",
            "Duration of user-visible operations and of backend batches.",
            labels=("op", "tier"),
        )
        for key, histogram in self._durations.items():
            durations.add_metric(key, histogram.buckets(), histogram.total)
        yield durations
        lag = HistogramMetricFamily(
            "tierkv_event_loop_lag_seconds", "How late the event loop ran a timer.", labels=()
        )
        lag.add_metric((), self._lag.buckets(), self._lag.total)
        yield lag
        yield from snapshot_families(self._snapshot())
        yield CounterMetricFamily(
            "tierkv_recompute_seconds_saved",
            "Seconds of prefill that loads saved, beyond their own time.",
            value=self._saved,
        )
        build = GaugeMetricFamily(
            "tierkv_build_info", "Constant 1, labelled with the version.", labels=("version",)
        )
        build.add_metric((self._version,), 1)
        yield build

    def _counter_tables(self) -> Iterable[_Table]:
        tier_reason = ("tier", "reason")
        return (
            ("lookups", "Lookups by slowest tier used.", ("tier", "result"), self._lookups),
            ("misses", "First missing blocks of lookups.", ("reason",), self._misses),
            ("io_bytes", "Bytes moved by backends.", ("tier", "direction"), self._io_bytes),
            (
                "io_operations",
                "Frames or ranges moved by backends.",
                ("tier", "direction", "outcome"),
                self._io_operations,
            ),
            ("evictions", "Copies that left a tier.", tier_reason, self._evictions),
            ("evicted_bytes", "Bytes that left a tier.", tier_reason, self._evicted_bytes),
            ("corruption", "Copies found damaged.", ("tier", "kind"), self._corruption),
            ("store_skipped", "Parts not put into a tier.", tier_reason, self._skipped),
            (
                "breaker_transitions",
                "Changes of the breakers of tiers.",
                ("tier", "to"),
                self._breakers,
            ),
            (
                "recodings",
                "Copies that were to be converted to another codec chain where they are.",
                ("tier", "chain", "result"),
                self._recodings,
            ),
            (
                "recoding_saved_bytes",
                "Bytes that tiers got back through conversions.",
                ("tier",),
                self._recoded_bytes,
            ),
            (
                "recoding_refused_sections",
                "Sections whose values a lossy codec refused; they stay lossless.",
                ("tier",),
                self._refused,
            ),
            ("worker_restarts", "Background workers restarted.", ("worker",), self._restarts),
        )


_Table = tuple[str, str, tuple[str, ...], dict[tuple[str, ...], int]]


class _Scrape(Collector):
    # a class of its own: the registry must not see the observer's methods as a collector's
    def __init__(self, observer: MetricsObserver) -> None:
        self._observer = observer

    def collect(self) -> Iterable[Metric]:
        return self._observer.families()


def _zeros(*sets: Sequence[str]) -> dict[tuple[str, ...], int]:
    keys: list[tuple[str, ...]] = [()]
    for values in sets:
        keys = [(*key, value) for key in keys for value in values]
    return dict.fromkeys(keys, 0)


def _counters(tables: Iterable[_Table]) -> Iterator[Metric]:
    for name, text, labels, values in tables:
        family = CounterMetricFamily(f"tierkv_{name}", text, labels=labels)
        for key, value in values.items():
            family.add_metric(key, value)
        yield family
