"""Open managers over small spaces, and scripts in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def manager(no_thread_leaks: None) -> Iterator[CacheManager]:
    """An open manager with one space and a RAM tier."""
    with CacheManager(tiers=[tierkv.Tier("host", "8MiB")], space=kit.space()) as open_manager:
        yield open_manager


@pytest.fixture
def script() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a script in a process of its own, bounded in time."""

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "default", "-c", text],
            capture_output=True,
            text=True,
            check=False,
            timeout=110,  # less than pytest's own; a busy machine takes long to import torch
        )

    return run
