"""SIGKILL in the middle of writing: what was flushed is there, what is visible is right."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierkv.testing import crash
from tierkv.testing.crash import run_crashes

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tierkv.testing.crash import CrashReport

SCALE = float(os.environ.get("TIERKV_SCALE", "0.1"))
KILLS = max(5, round(50 * SCALE))


def crashed(root: Path, kills: int, **options: Any) -> CrashReport:
    """Kill writers until some have written and flushed: a busy machine leaves them little time."""
    for attempt in range(20):
        report = run_crashes(root / str(attempt), kills, **options)
        done = report.flushed and report.visible and (report.torn or not options.get("tear"))
        if done or report.problems:
            break
    return report


def test_f033_sigkill_of_a_writer(tmp_path: Path) -> None:
    report = crashed(tmp_path, KILLS, seed=1)
    assert report.problems == []
    assert report.kills == KILLS
    assert report.hits == report.flushed > 0
    assert report.verified == report.visible > 0


def test_sigkill_and_torn_journals(tmp_path: Path) -> None:
    report = crashed(tmp_path, KILLS, seed=2, tear=True)
    assert report.problems == []
    assert report.torn > 0
    assert report.hits == report.flushed > 0


def test_sigkill_in_a_small_tier(tmp_path: Path) -> None:
    # full most of the time, a checkpoint every few batches
    report = crashed(tmp_path, 3, seed=3, capacity=1 << 20)
    assert report.problems == []
    assert report.verified == report.visible > 0


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part with other bytes than expected is named; the first kill that leaves one ends it."""
    monkeypatch.setattr(crash, "contents", lambda stored: bytes(stored.nbytes))
    report = run_crashes(tmp_path / "kv", 60, seed=4)
    assert any("other bytes" in problem for problem in report.problems)
    assert report.hits == report.verified == 0
