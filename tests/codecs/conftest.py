"""What holds for the codecs in every test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tierkv_codecs import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _samples_are_of_the_kinds_that_codecs_use() -> Iterator[None]:
    """Else a loop runs as plain Python, which is right, and slow."""
    yield
    loops = [loop for loop in kernels.kernel._known.values() if loop is not None]
    assert [loop for loop in loops if loop.told] == []
