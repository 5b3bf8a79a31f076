"""The shipped backends pass the shipped suites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tierkv.config import Tier
from tierkv.testing.backends import DurableBackendTests, MemoryBackendTests
from tierkv_backends.host import HostBackend
from tierkv_backends.nvme import NvmeBackend

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.every_loop
class TestHost(MemoryBackendTests):
    def make(self, root: Path, capacity: int) -> HostBackend:
        return HostBackend(Tier("host", capacity))


@pytest.mark.every_loop
class TestNvmeDirect(DurableBackendTests):
    @pytest.fixture
    def tmp_path(self, disk_path: Path) -> Path:
        """A disk asks for alignment; memory takes anything."""
        return disk_path

    def make(self, root: Path, capacity: int) -> NvmeBackend:
        return NvmeBackend(Tier("nvme", capacity, path=str(root / "kv")))


class TestNvmeBuffered(DurableBackendTests):
    def make(self, root: Path, capacity: int) -> NvmeBackend:
        options = {"io": "buffered", "segment": "512KiB"}
        return NvmeBackend(Tier("nvme", capacity, path=str(root / "kv"), options=options))
