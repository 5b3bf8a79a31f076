"""The ``file`` tier passes the shipped suite, however it syncs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.backends.file_bench import File
from tierkv.testing.backends import DurableBackendTests

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv_backends.file import FileBackend


@pytest.mark.every_loop
class TestFile(DurableBackendTests):
    def make(self, root: Path, capacity: int) -> FileBackend:
        return File().make(root, capacity)


class TestFileThatSyncsWrites(DurableBackendTests):
    """Only its threads do anything else, which no loop can see."""

    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, Any]]:
        return "asyncio", {"use_uvloop": False}

    def make(self, root: Path, capacity: int) -> FileBackend:
        return File(sync="write", threads=1).make(root, capacity)
