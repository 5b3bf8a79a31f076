"""Opens file backends for the tests of this directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.config import Tier
from tierkv.testing.bench import BackendBench
from tierkv_backends.file import FileBackend

if TYPE_CHECKING:
    from pathlib import Path


class File(BackendBench):
    """Backends on ``root / "kv"``."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def make(self, root: Path, capacity: int) -> FileBackend:
        return FileBackend(Tier("file", capacity, path=str(root / "kv"), options=self.options))
