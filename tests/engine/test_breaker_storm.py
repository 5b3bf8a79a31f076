"""One batch in ten fails, in every way: no exception, no wrong byte, everything counted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tierkv.testing.storm import FAULTS, storm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.mark.every_loop
async def test_a_short_storm_harms_nobody(tmp_path: Path) -> None:
    report = await storm(tmp_path, seconds=1.0, share=0.2, seed=1)
    assert report.problems == []
    assert report.tokens > 0
    assert sum(report.injected.values()) > 0


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["nvme", "file"])
async def test_a_long_storm_harms_nobody(kind: str, tmp_path: Path) -> None:
    seconds = max(3.0, 60 * float(os.environ.get("TIERKV_SCALE", "1")))
    report = await storm(tmp_path, seconds=seconds, seed=2, kind=kind)
    assert report.problems == []
    assert report.tokens > 0
    if seconds > 20:
        assert all(report.injected[fault] for fault in FAULTS)
