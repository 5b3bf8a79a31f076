"""The replay benchmark runs on whatever traces there are, and reports in the common layout."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from benchmarks import replay

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small trace in the place of a public one."""
    rng = random.Random(1)
    rows = []
    for number in range(60):
        keys = [0, 1 + rng.randrange(8), *(100 * number + i for i in range(3, rng.randrange(3, 9)))]
        row = {"timestamp": 40 * number, "input_length": 512 * len(keys), "output_length": 1}
        rows.append(json.dumps(row | {"hash_ids": keys}))
    (tmp_path / replay.FILES["conversation"][0]).write_text("\n".join(rows))
    monkeypatch.setattr(replay, "AT", 20)
    monkeypatch.setattr(replay, "LIVE_REQUESTS", 20)
    return tmp_path


def test_every_check_is_a_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay.main(["--json", "--traces", str(folder)])
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["benchmark"]) == (1, "replay")
    rows = document["rows"]
    assert {row["trace"] for row in rows} == {"conversation"}
    assert all(set(row) == {"check", "trace", "value", "bound", "limit", "ok"} for row in rows)
    checks = " ".join(row["check"] for row in rows)
    for part in ("Belady", "gap closed", "figure 9", "at arrival", "CPU second", "of the replay"):
        assert part in checks
    error = next(row for row in rows if row["check"] == "live: error of the replay")
    assert error["ok"]


def test_a_missed_bound_is_a_finding(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "PER_CPU_S", 1.0)
    assert replay.main(["speed", "--traces", str(folder)]) == 0
    monkeypatch.setattr(replay, "PER_CPU_S", 1e12)
    assert replay.main(["speed", "--traces", str(folder)]) == 1
    for wrong in (["nonsense"], ["hints", "--traces", str(folder)]):  # no agentic trace is there
        with pytest.raises(SystemExit):
            replay.main(wrong)
    assert "no trace in" in capsys.readouterr().err
