"""Engines behind sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.blocking import CacheManager
from tierkv_adapters.remote import RemoteServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(no_thread_leaks: None) -> Iterator[CacheManager]:
    """An open manager with one space and a RAM tier."""
    with CacheManager(tiers=[tierkv.Tier("host", "8MiB")], space=kit.space()) as open_manager:
        yield open_manager


@pytest.fixture
def server(manager: CacheManager, tmp_path: Path) -> Iterator[RemoteServer]:
    """It, served."""
    with RemoteServer(manager, tmp_path / "s" / "e.sock") as open_server:
        yield open_server
