"""The benchmark of policies runs and reports in the common layout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import policies

if TYPE_CHECKING:
    import pytest


def test_policies_reports_every_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "LIMIT", 1.0)
    argv = ["--json", "--accesses", "3000", "--repeats", "2", "--policies", "lru,arc,fifo"]
    assert policies.main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["benchmark"] == "policies"
    rows = {row["policy"]: row for row in document["rows"]}
    assert list(rows) == ["lru", "arc", "fifo"]
    assert rows["lru"]["cost_of_lru"] == 1.0
    assert all(0.2 < row["hit_ratio"] < 0.9 for row in rows.values())
    assert rows["arc"]["limit"] is None


def test_a_policy_that_is_too_slow_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "LIMIT", float("inf"))
    assert policies.main(["--accesses", "500", "--repeats", "1", "--policies", "fifo"]) == 1
    assert "fifo" in capsys.readouterr().out


def test_the_stream_is_the_same_every_time() -> None:
    assert policies.chat(1_000) == policies.chat(1_000) != policies.chat(1_000, seed=2)
