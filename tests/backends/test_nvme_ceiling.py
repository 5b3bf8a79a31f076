"""The comparison with raw O_DIRECT: it measures what it says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.disk import direct_works, rows

if TYPE_CHECKING:
    from pathlib import Path


def test_rows(tmp_path: Path) -> None:
    if not direct_works(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    found = rows(str(tmp_path), sizes=(128 << 10,), repeats=2, batch=512 << 10)
    assert [(row["op"], row["frames"]) for row in found] == [("nvme read", 4), ("nvme write", 4)]
    for row in found:
        assert row["mode"] == "o_direct"
        assert row["buffered_bytes"] == 0
        assert row["hops_per_batch"] == 1
        assert isinstance(row["ratio_to_odirect"], float)
        assert row["ratio_to_odirect"] > 0
    assert os.listdir(tmp_path) == []


def test_the_probe_is_raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError("no O_DIRECT here")
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refusing)
    assert not direct_works(tmp_path)
    assert rows(str(tmp_path), sizes=(4096,), repeats=1) == []
