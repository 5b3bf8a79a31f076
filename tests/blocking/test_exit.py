"""Managers that are still closing when the interpreter exits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tierkv
from tests import kit
from tests.blocking.test_lifetime import FORGOTTEN
from tierkv.blocking import CacheManager, portal

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


def test_f055_a_manager_dropped_at_the_end_is_closed_in_full(
    script: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Its close goes on in the background: the interpreter lets it end, and nothing is logged."""
    text = FORGOTTEN.replace(
        '"4MiB")', f'"4MiB"), tierkv.Tier("nvme", "64MiB", path={str(tmp_path)!r})'
    )
    done = script("import logging\nlogging.basicConfig()\n" + text + "del manager\n")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was never closed") == 1
    assert "WARNING:" not in done.stderr, "a tier that could not be synced, say"
    with CacheManager(tiers=kit.tiers("host+nvme", tmp_path)) as again:
        assert again.health()["status"] == "open"


def test_what_has_ended_is_not_waited_for() -> None:
    manager = CacheManager(tiers=[tierkv.Tier("host", "1MiB")]).open()
    assert manager._loop not in portal._ending
    for _ in range(2):
        manager.close()
        assert manager._loop not in portal._ending
