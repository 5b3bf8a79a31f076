"""The overhead benchmark runs and reports in the common layout."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import overhead
from benchmarks.report import emit, paired


def test_overhead_reports_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--json", "--blocks", "1000,4000", "--repeats", "3"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["benchmark"] == "overhead"
    rows = document["rows"]
    assert all(set(row) == {"check", "blocks", "value", "unit", "limit", "ok"} for row in rows)
    checks = {row["check"] for row in rows}
    assert {"match", "load", "store", "contains", "memory per part"} <= checks
    assert "store: largest / smallest" in checks
    assert all(row["value"] > 0 for row in rows)


def test_a_missed_limit_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "US_PER_BLOCK", 0.0)
    assert overhead.main(["--blocks", "1000", "--repeats", "2"]) == 1
    assert "overhead" in capsys.readouterr().out


def test_paired_times_both_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now)
    monkeypatch.setattr("benchmarks.report.time", clock)

    def takes(seconds: float, name: str) -> None:
        nonlocal now
        now += seconds
        order.append(name)

    result = paired(lambda: takes(0.004, "a"), lambda: takes(0.001, "b"), 4)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert result.a.median == pytest.approx(0.004)
    assert result.ratio.low == pytest.approx(4)
    assert result.a.low <= result.a.median <= result.a.high


def test_emit_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    emit("demo", [{"name": "x", "value": 1.23456, "ok": True, "limit": None}], False)
    out = capsys.readouterr().out
    assert "demo" in out
    assert "1.235" in out
    assert "yes" in out
