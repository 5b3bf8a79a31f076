"""For test modules about files only, which no event loop can see."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def one_loop() -> tuple[str, dict[str, Any]]:
    """Plain asyncio alone: ``anyio_backend = one_loop`` in the module."""
    return "asyncio", {"use_uvloop": False}
