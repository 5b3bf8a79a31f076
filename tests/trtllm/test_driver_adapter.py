"""tierkv's TensorRT-LLM adapter passes the suite that every adapter passes, over the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.trtllm.running import Made, configure
from tierkv.testing.adapters import AdapterTests, Served
from tierkv.testing.trtllm import MODES
from tierkv.testing.trtllm.served import ServedReplay

if TYPE_CHECKING:
    from pathlib import Path


class TestTierKVIsAnAdapter(AdapterTests):
    mode: ClassVar[str] = "flat-overlap"

    @pytest.fixture(autouse=True)
    def _settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def stored_files(self, root: Path) -> list[Path]:
        return [
            path
            for path in super().stored_files(root)
            if path.name.startswith(("segment-", "journal-"))
        ]

    def make(self, root: Path) -> Served:
        root.mkdir(parents=True, exist_ok=True)
        configure(root, self.monkeypatch, disk=True)
        return ServedReplay(Made().replay(MODES[self.mode]))
