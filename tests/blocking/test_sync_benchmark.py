"""The benchmark of the synchronous face runs and tells what it promises to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import tierkv
from benchmarks import sync

if TYPE_CHECKING:
    import pytest


def test_one_row_per_kind_of_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_thread_leaks: None
) -> None:
    tiny = sync.Case("tiny", tierkv.Layout.uniform(1, 1, 8, "float16"), prefix=1, turns=1)
    monkeypatch.setattr(sync, "CASES", (tiny,))
    monkeypatch.setattr(sync, "CAPACITY", "8MiB")
    # times of so short a run prove nothing: the limit is met by longer ones, not here
    monkeypatch.setattr(sync, "LIMIT", 0.0)

    assert sync.main(["--json", "--repeats", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["benchmark"]) == (1, "sync")
    (row,) = document["rows"]
    assert row["turn"] == "tiny"
    assert 0 < row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
    assert row["engine_us"] > 0
    assert row["manager_us"] > 0
    assert row["ok"] is True
