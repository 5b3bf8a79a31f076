"""SIGKILL in the middle of writing: what was flushed is there, what is visible is right."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierkv.testing import crash
from tierkv.testing.crash import run_crashes

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SCALE = float(os.environ.get("TIERKV_SCALE", "0.1"))
KILLS = max(5, round(50 * SCALE))


def test_f033_sigkill_of_a_writer(tmp_path: Path) -> None:
    report = run_crashes(tmp_path / "kv", KILLS, seed=1)
    assert report.problems == []
    assert report.kills == KILLS
    assert report.hits == report.flushed > 0
    assert report.verified == report.visible > 0


def test_sigkill_and_torn_journals(tmp_path: Path) -> None:
    report = run_crashes(tmp_path / "kv", KILLS, seed=2, tear=True)
    assert report.problems == []
    assert report.torn > 0
    assert report.hits == report.flushed > 0


def test_sigkill_in_a_small_tier(tmp_path: Path) -> None:
    # full most of the time, a checkpoint every few batches
    report = run_crashes(tmp_path / "kv", 3, seed=3, capacity=1 << 20)
    assert report.problems == []
    assert report.verified == report.visible > 0


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part with other bytes than expected is named."""
    monkeypatch.setattr(crash, "contents", lambda stored: bytes(stored.nbytes))
    report = run_crashes(tmp_path / "kv", 1, seed=4)
    assert any("other bytes" in problem for problem in report.problems)
    assert report.hits == report.verified == 0
