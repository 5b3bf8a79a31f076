"""The connector passes the suite of TensorRT-LLM connectors, also through sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.trtllm.running import Made, configure, warm
from tierkv.testing.trtllm import MODES
from tierkv.testing.trtllm.suite import ConnectorTests
from tierkv.testing.trtllm.suite_copies import LoadTests
from tierkv_adapters.trtllm import links

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tierkv.testing.trtllm import Connector, Mode, Replay


class TestTierKV(ConnectorTests):
    @pytest.fixture(autouse=True)
    def _configured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        configure(tmp_path, monkeypatch)

    def make(self) -> Connector:
        return Made().connector()

    def replay(self, mode: Mode) -> Replay:
        return warm(super().replay(mode))


class TestThroughSockets(LoadTests):
    """Ranks of other processes are asked through their sockets; here those of this one are."""

    modes: ClassVar[Mapping[str, Mode]] = {
        name: MODES[name] for name in ("first-overlap", "flat-chunked-tp2", "windows-tp4")
    }

    @pytest.fixture(autouse=True)
    def _apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        configure(tmp_path, monkeypatch)
        monkeypatch.setattr(links, "running", lambda _: None)

    def make(self) -> Connector:
        return Made().connector()

    def replay(self, mode: Mode) -> Replay:
        return warm(super().replay(mode))
