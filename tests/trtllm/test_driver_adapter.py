"""tierkv's TensorRT-LLM adapter passes the suite that every adapter passes, over the driver."""

from __future__ import annotations

import tempfile
from contextlib import closing
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.trtllm.running import Made, configure
from tierkv.testing.adapters import AdapterTests, Ask, Served
from tierkv.testing.trtllm import MODES
from tierkv.testing.trtllm.served import ServedReplay

if TYPE_CHECKING:
    from pathlib import Path


class TestTierKVIsAnAdapter(AdapterTests):
    mode: ClassVar[str] = "flat-overlap"
    kv_files: ClassVar[tuple[str, ...]] = ("segment-*", "journal-*")

    @pytest.fixture(autouse=True)
    def _settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def make(self, root: Path) -> Served:
        root.mkdir(parents=True, exist_ok=True)
        configure(root, self.monkeypatch, disk=True)
        return ServedReplay(Made().replay(MODES[self.mode]))


def test_nothing_is_left_elsewhere(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets' private folder goes with the connector; all else is below the tiers' roots."""
    root, elsewhere = tmp_path / "root", tmp_path_factory.mktemp("e")  # sockets have short paths
    root.mkdir()
    configure(root, monkeypatch, disk=True)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(elsewhere))
    with closing(ServedReplay(Made().replay(MODES["flat-overlap"]))) as engine:
        engine.answer([Ask(tuple(range(1, 30)))])
        (folder,) = elsewhere.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
    assert list(elsewhere.rglob("*")) == []
    assert {path.name for path in root.iterdir()} == {"kv", "tierkv.toml"}
