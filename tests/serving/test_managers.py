"""Managers of ranks: lent, opened, found, and closed when the interpreter ends."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tierkv.blocking import CacheManager
from tierkv.config import EngineConfig, Tier
from tierkv.errors import AttachError, ConfigError
from tierkv_adapters.serving import registry
from tierkv_adapters.serving.managers import is_lossy, open_manager, rank_config

if TYPE_CHECKING:
    from pathlib import Path


def settings(root: str, **more: object) -> EngineConfig:
    tiers = (
        Tier("host", "1MiB"),
        Tier("nvme", "8MiB", path=root),
        Tier("file", "8MiB", path="/shared"),
        Tier("nvme", "8MiB", path="/fast/{worker}/kv", name="third"),
    )
    return EngineConfig(tiers=tiers, **more)  # type: ignore[arg-type]


def test_each_rank_has_roots_of_its_own() -> None:
    config = settings(
        "/data/kv", metrics_port=9000, decision_log="/log/d.jsonl.zst", trace="t", name="kv"
    )
    second = rank_config(config, 1, 2)
    paths = [tier.path for tier in second.tiers]
    assert paths == [None, "/data/kv/rank1", "/shared", "/fast/rank1/kv"]
    assert second.metrics_port == 9001
    assert second.decision_log == "/log/d.rank1.jsonl.zst"
    assert second.trace == "t.rank1"
    assert second.name == "kv-rank1"
    assert rank_config(config, 0, 1) is config


def test_a_port_that_is_picked_or_off_stays_so() -> None:
    assert rank_config(settings("/d", metrics_port=0), 1, 2).metrics_port == 0
    assert rank_config(settings("/d"), 1, 2).metrics_port is None


def test_lossy_is_seen() -> None:
    assert not is_lossy(EngineConfig(tiers=(Tier("host", "1MiB", codec="zstd"),)))
    assert is_lossy(
        EngineConfig(tiers=(Tier("host", "1MiB"), Tier("host", "1MiB", name="b", codec="int8")))
    )


def test_a_lent_manager_is_taken_and_stays_its_lenders() -> None:
    with CacheManager(tiers=[Tier("host", "1MiB")], metrics=False) as manager:
        token = registry.lend(manager)
        opened = open_manager(None, token, 0, 1)
        assert opened == (manager, False)
        registry.withdraw(token)
        registry.withdraw(token)
        assert registry.borrowed(token) is None


def test_a_token_of_another_process_is_refused_and_says_why() -> None:
    with pytest.raises(AttachError, match="in another process: set VLLM_ENABLE_V1"):
        open_manager(None, "manager:elsewhere", 0, 1)


def test_without_a_token_the_settings_make_an_engine() -> None:
    source = {"tiers": [{"kind": "host", "capacity": "1MiB"}], "metrics": False}
    opened = open_manager(source, None, 0, 1)
    try:
        assert opened.owned
        assert opened.manager.health()["status"] == "open"
    finally:
        opened.manager.close()
    with pytest.raises(ConfigError):
        open_manager(None, None, 0, 1)


def _borrowed(token: str) -> bool:
    return registry.borrowed(token) is not None


def test_a_forked_child_finds_nothing() -> None:
    with CacheManager(tiers=[Tier("host", "1MiB")], metrics=False) as manager:
        token = registry.lend(manager)
        try:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                assert pool.apply(_borrowed, (token,)) is False
            assert _borrowed(token)
        finally:
            registry.withdraw(token)


SCRIPT = """
import sys
from tierkv.blocking import CacheManager
from tierkv_adapters.serving.leaving import at_exit, not_at_exit

class Owner:
    def __init__(self, name):
        self.name = name
        self.manager = CacheManager(
            tiers=[{"kind": "host", "capacity": "1MiB"}], metrics=False
        ).open()
        at_exit(self.close)

    def close(self):
        self.manager.close()
        print("closed", self.name, flush=True)

def broken(self):
    raise ValueError("broken")

one, two, three = Owner("one"), Owner("two"), Owner("three")
not_at_exit(two.close)
two.close()
Bad = type("Bad", (), {"close": broken})
bad = Bad()
at_exit(bad.close)
"""


def test_what_is_open_is_closed_at_the_end(tmp_path: Path) -> None:
    # while the pools of threads are there; one that raises keeps nobody else from it
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["closed", "two", "closed", "one", "closed", "three"]
    assert done.returncode == 0
    assert "never closed" not in done.stderr
