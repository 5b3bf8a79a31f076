"""Opens nvme backends for the tests of this directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.config import Tier
from tierkv.testing.bench import BackendBench
from tierkv_backends.nvme import NvmeBackend

if TYPE_CHECKING:
    from pathlib import Path


class Nvme(BackendBench):
    """Backends on ``root / "kv"``."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def make(self, root: Path, capacity: int) -> NvmeBackend:
        return NvmeBackend(Tier("nvme", capacity, path=str(root / "kv"), options=self.options))
