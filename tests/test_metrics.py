from __future__ import annotations

import logging
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from tierkv.decisions.guarding import Promotions
from tierkv.decisions.types import EvictReason, MissReason, SkipReason
from tierkv.errors import ConfigError
from tierkv.metrics import (
    BUCKETS,
    EngineSnapshot,
    MetricsObserver,
    NullObserver,
    TierSnapshot,
    TrafficSnapshot,
    serve,
)

if TYPE_CHECKING:
    from tierkv.abc import Observer

SNAPSHOT = EngineSnapshot(
    (TierSnapshot("host", 10, 20, 5, 100, 3), TierSnapshot("nvme", 30, 30, 0, 900, 9)), 2, 77, 4
)

FAMILIES = [
    "breaker_open",
    "breaker_transitions",
    "build_info",
    "corruption",
    "event_loop_lag_seconds",
    "evicted_bytes",
    "evictions",
    "hint_classes",
    "io_bytes",
    "io_operations",
    "leases",
    "lookups",
    "misses",
    "operation_duration_seconds",
    "prefetch_bytes",
    "prefetch_enabled",
    "prefetch_issued",
    "prefetch_outcomes",
    "promotion_outcomes",
    "promotions",
    "recoding_refused_sections",
    "recoding_saved_bytes",
    "recodings",
    "recompute_seconds_saved",
    "session_bytes",
    "sessions_open",
    "store_skipped",
    "tasks",
    "thread_hops",
    "tier_bandwidth_bytes_per_second",
    "tier_capacity_bytes",
    "tier_chain_active",
    "tier_entries",
    "tier_latency_seconds",
    "tier_reserved_bytes",
    "tier_used_bytes",
    "tier_used_peak_bytes",
    "tokens_matched",
    "tokens_requested",
    "tokens_reusable",
    "worker_restarts",
    "write_queue_bytes",
    "write_queue_oldest_seconds",
]


@pytest.fixture
def observer() -> MetricsObserver:
    return MetricsObserver(
        ["host", "nvme"], lambda: SNAPSHOT, version="1.2", workers=["writer"], chains=["int8"]
    )


def _samples(observer: MetricsObserver) -> dict[tuple[str, ...], float]:
    return {
        (s.name.removeprefix("tierkv_"), *(v for _, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(observer.scrape().decode())
        for s in family.samples
    }


def _everything(observer: Observer) -> None:
    observer.lookup(
        requested=64, reusable=48, matched=32, by_tier={"host": 16, "nvme": 16}, reason="evicted"
    )
    observer.lookup(requested=10, reusable=0, matched=0, by_tier={}, reason="never_stored")
    observer.lookup(requested=8, reusable=8, matched=8, by_tier={"host": 8}, reason=None)
    observer.io(tier="nvme", direction="read", nbytes=4096, operations=3, seconds=0.002, failed=1)
    observer.evicted(tier="host", reason="capacity", nbytes=512)
    observer.corrupted(tier="nvme", kind="checksum")
    observer.skipped(tier="host", reason="full", parts=7)
    observer.operation(op="load", tier="nvme", seconds=0.3)
    observer.operation(op="match", tier="host", seconds=0.0001)
    observer.loop_lag(seconds=40.0)
    observer.restarted(worker="writer")
    observer.breaker(tier="nvme", to="open")
    observer.saved(seconds=1.5)
    observer.recoded(tier="host", chain="int8", result="converted", saved=4096, refused=1)


def test_f086_every_family_is_there_before_any_traffic(observer: MetricsObserver) -> None:
    families = list(text_string_to_metric_families(observer.scrape().decode()))

    assert sorted(f.name.removeprefix("tierkv_") for f in families) == FAMILIES
    assert all(f.samples and f.documentation for f in families)
    counters = [s for f in families if f.type in ("counter", "histogram") for s in f.samples]
    assert {s.value for s in counters} == {0.0}


def test_every_reason_is_a_series_from_the_start(observer: MetricsObserver) -> None:
    samples = _samples(observer)

    assert {k[1] for k in samples if k[0] == "misses_total"} == {r.value for r in MissReason}
    for name, reasons in (
        ("evictions_total", EvictReason),
        ("evicted_bytes_total", EvictReason),
        ("store_skipped_total", SkipReason),
    ):
        found = {k[1:] for k in samples if k[0] == name}
        assert found == {(r.value, tier) for r in reasons for tier in ("host", "nvme")}


def test_what_happened_is_counted(observer: MetricsObserver) -> None:
    _everything(observer)

    samples = _samples(observer)
    told = {k: v for k, v in samples.items() if v and k[0].endswith("_total")}
    assert told == {
        ("lookups_total", "hit", "nvme"): 1,  # the slowest tier it needs
        ("lookups_total", "hit", "host"): 1,
        ("lookups_total", "miss", "all"): 1,
        ("misses_total", "evicted"): 1,
        ("misses_total", "never_stored"): 1,
        ("tokens_requested_total",): 82,
        ("tokens_matched_total",): 40,
        ("tokens_reusable_total",): 56,
        ("io_bytes_total", "read", "nvme"): 4096,
        ("io_operations_total", "read", "ok", "nvme"): 2,
        ("io_operations_total", "read", "failed", "nvme"): 1,
        ("evictions_total", "capacity", "host"): 1,
        ("evicted_bytes_total", "capacity", "host"): 512,
        ("corruption_total", "checksum", "nvme"): 1,
        ("store_skipped_total", "full", "host"): 7,
        ("worker_restarts_total", "writer"): 1,
        ("breaker_transitions_total", "nvme", "open"): 1,
        ("recompute_seconds_saved_total",): 1.5,
        ("recodings_total", "int8", "converted", "host"): 1,
        ("recoding_saved_bytes_total", "host"): 4096,
        ("recoding_refused_sections_total", "host"): 1,
    }


def test_durations_fall_into_the_right_buckets(observer: MetricsObserver) -> None:
    _everything(observer)
    observer.operation(op="load", tier="nvme", seconds=0.25)  # a bound belongs to its bucket

    samples = _samples(observer)
    name = "operation_duration_seconds"
    load = {
        k[1]: v
        for k, v in samples.items()
        if k[0] == f"{name}_bucket" and k[2:] == ("load", "nvme")
    }
    assert len(load) == len(BUCKETS) + 1
    assert (load["0.1"], load["0.25"], load["0.5"], load["+Inf"]) == (0, 1, 2, 2)
    assert samples[f"{name}_sum", "load", "nvme"] == pytest.approx(0.55)
    assert samples[f"{name}_count", "match", "all"] == 1
    assert samples[f"{name}_count", "read", "nvme"] == 1
    assert samples["event_loop_lag_seconds_bucket", "30.0"] == 0
    assert samples["event_loop_lag_seconds_count",] == 1


def test_gauges_are_read_when_scraped() -> None:
    state = [EngineSnapshot((TierSnapshot("host", 1, 1, 0, 9, 1),))]
    observer = MetricsObserver(["host"], lambda: state[0], version="1")
    before = _samples(observer)
    state[0] = SNAPSHOT

    after = _samples(observer)

    assert before["tier_used_bytes", "host"] == 1
    assert before["sessions_open",] == 0
    assert {
        k[0]: v for k, v in after.items() if k[1:] == ("nvme",) and k[0].startswith("tier_")
    } == {
        "tier_used_bytes": 30,
        "tier_used_peak_bytes": 30,
        "tier_reserved_bytes": 0,
        "tier_capacity_bytes": 900,
        "tier_entries": 9,
    }
    singles = ("sessions_open", "session_bytes", "leases")
    assert [after[(name,)] for name in singles] == [2, 77, 4]
    assert after["build_info", "1"] == 1


def test_labels_stay_in_closed_sets_whatever_is_told(observer: MetricsObserver) -> None:
    before = set(_samples(observer))
    observer.lookup(requested=1, reusable=1, matched=1, by_tier={"who": 1}, reason="session-42")
    observer.io(tier="who", direction="read", nbytes=1, operations=1, seconds=1, failed=0)
    observer.io(tier="host", direction="sideways", nbytes=1, operations=1, seconds=1, failed=0)
    observer.evicted(tier="who", reason="capacity", nbytes=1)
    observer.evicted(tier="host", reason="acme", nbytes=1)
    observer.corrupted(tier="who", kind="checksum")
    observer.corrupted(tier="host", kind="secret")
    observer.skipped(tier="host", reason="x", parts=1)
    observer.operation(op="secret", tier="secret", seconds=1)
    observer.operation(op="load", tier="secret", seconds=1)
    observer.restarted(worker="secret")
    observer.breaker(tier="secret", to="open")
    observer.breaker(tier="host", to="secret")

    after = _samples(observer)
    assert set(after) == before
    assert after["corruption_total", "other", "host"] == 1
    assert after["operation_duration_seconds_count", "other", "all"] == 1
    assert after["operation_duration_seconds_count", "load", "all"] == 1
    assert after["worker_restarts_total", "other"] == 1


def test_what_is_known_of_a_tier_is_shown() -> None:
    ways = (TrafficSnapshot("read", 0.01, 5e8, 9), TrafficSnapshot("write", breaker_open=True))
    tier = TierSnapshot("nvme", 1, 1, 0, 9, 1, ways, "planes", ("raw", "planes"))
    state = EngineSnapshot((tier,), write_queue_bytes=7, write_queue_oldest_seconds=1.5)
    samples = _samples(MetricsObserver(["nvme"], lambda: state, version="1"))

    assert samples["tier_latency_seconds", "read", "nvme"] == 0.01
    assert samples["tier_bandwidth_bytes_per_second", "read", "nvme"] == 5e8
    assert samples["breaker_open", "read", "nvme"] == 0
    assert samples["breaker_open", "write", "nvme"] == 1
    assert samples["tier_chain_active", "planes", "nvme"] == 1
    assert samples["tier_chain_active", "raw", "nvme"] == 0
    assert samples["write_queue_bytes",] == 7
    assert samples["write_queue_oldest_seconds",] == 1.5


def test_what_became_of_promotions_and_hints_is_shown() -> None:
    tier = TierSnapshot("host", 1, 1, 0, 9, 1, promotions=Promotions(9, 5, 2, 7))
    state = EngineSnapshot((tier,), hints_heeded=1, hints_unheeded=3)
    samples = _samples(MetricsObserver(["host"], lambda: state, version="1"))

    assert samples["promotions_total", "host"] == 9
    outcomes = {k[1]: v for k, v in samples.items() if k[0] == "promotion_outcomes_total"}
    assert outcomes == {"used": 5, "wasted": 2, "refused": 7}
    assert samples["hint_classes", "yes"] == 1
    assert samples["hint_classes", "no"] == 3


def test_names_keep_to_the_conventions(observer: MetricsObserver) -> None:
    # what `promtool check metrics` refuses: other units, camel case, _total on gauges, no help,
    # and *_created series, which would double the page
    text = observer.scrape().decode()

    for family in text_string_to_metric_families(text):
        assert family.name.startswith("tierkv_")
        assert family.name == family.name.lower()
        assert not family.name.endswith(("_ms", "_count", "_gauge", "_created", "_percent"))
        if family.type == "gauge":
            assert not family.name.endswith("_total")
    assert "_created" not in text
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 600


def test_f087_engines_do_not_collide() -> None:
    observers = [MetricsObserver(["host"], EngineSnapshot, version="1") for _ in range(3)]
    observers[0].restarted(worker="x")

    values = [_samples(o)["worker_restarts_total", "other"] for o in observers]
    assert values == [1, 0, 0]
    assert not [f.name for f in REGISTRY.collect() if f.name.startswith("tierkv_")]


def test_f086_it_works_in_multiprocess_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    observer = MetricsObserver(["host"], EngineSnapshot, version="1")
    observer.evicted(tier="host", reason="expired", nbytes=5)

    assert _samples(observer)["evicted_bytes_total", "expired", "host"] == 5


def test_no_observer_method_is_left_out() -> None:
    _everything(NullObserver())


@pytest.mark.usefixtures("no_thread_leaks", "no_fd_leaks")
def test_the_page_is_served_on_loopback_only_until_closed(
    observer: MetricsObserver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = serve(observer.registry, 0)
    where = f"metrics at http://127.0.0.1:{server.port}/metrics"
    assert [record.getMessage() for record in caplog.records] == [where]
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            assert reply.read() == observer.scrape()
        assert repr(server) == f"<MetricsServer 127.0.0.1:{server.port} open>"
        for path in ("", "/", "/metrics/x", "/favicon.ico"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(url.removesuffix("/metrics") + path, timeout=60)
            refused.value.close()
        with pytest.raises(ConfigError, match="metrics_port"):
            serve(observer.registry, server.port)
    finally:
        server.close()
        server.close()

    assert "closed" in repr(server)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)
    again = serve(observer.registry, server.port)
    again.close()
