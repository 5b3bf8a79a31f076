"""Each predictor has something to say on its own benchmark, and the bounds can fail."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks import prefetch

if TYPE_CHECKING:
    import pytest


def test_each_predictor_issues_on_its_own_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefetch.main(["--json", "--scale", "0.2", "--only", "books", "questions"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["benchmark"]) == (1, "prefetch")
    rows = {(row["workload"], row["predictor"]): row for row in document["rows"]}
    for key in (("books", "sequential"), ("books", "chain"), ("questions", "chain")):
        row = rows[key]
        assert row["issued"] > 0
        assert row["used"] > 0
        assert row["stall_ratio"] < 1
    assert rows["books", "none"]["stall_s"] > 0


def test_a_predictor_that_says_nothing_misses_its_bound() -> None:
    bounds = {
        (work.name, name): bound
        for work in prefetch.workloads(0.01)
        for name, bound in work.bounds.items()
    }
    silent: dict[str, Any] = {"issued": 0, "precision": None, "timely": None, "times_off": 0}
    silent |= {"stall_ratio": 1.0, "dequeue_ratio": 1.0}
    own = [key for key in bounds if key[0] != "shuffled" and "chat" not in key[0]]
    assert {name for _, name in own} == {"return_time", "oracle", "sequential", "chain"}
    assert not any(bounds[key](silent) for key in own)
    assert not any(bounds[key](silent | {"issued": 9}) for key in own), "all of it refused"
    slower = silent | {"issued": 9, "stall_ratio": 1.1, "precision": 0.9}
    assert not any(bound(slower) for key, bound in bounds.items() if "chat" not in key[0])
