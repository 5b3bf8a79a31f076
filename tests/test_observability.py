"""What an operator sees of a live engine: metrics and logs, end to end."""

from __future__ import annotations

import logging
import re
import socket
import urllib.request
from typing import TYPE_CHECKING

import pytest
import torch

import tierkv

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]

LAYOUT = tierkv.Layout.uniform(2, 2, 8, "float32")
SPACE = tierkv.Space(tierkv.Identity("model", "rev"), LAYOUT, block_tokens=16)
TOKENS = list(range(31_337_000, 31_337_000 + 64))


def _kv() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(2, 64, 8), torch.randn(2, 64, 8)) for _ in range(2)]


async def _turns(engine: tierkv.Engine, turns: int) -> None:
    async with engine.session("secret-session", tenant="secret-tenant") as session:
        for _ in range(turns):
            async with session.match(TOKENS) as match:
                loaded = await match.load(into=tierkv.views.dense(_kv()))
            await session.store(TOKENS, tierkv.views.dense(_kv()), start=loaded.tokens)
        await session.flush()


def _tiers(path: Path) -> list[tierkv.Tier]:
    return [tierkv.Tier("host", "4MiB"), tierkv.Tier("nvme", "16MiB", path=str(path))]


async def test_f090_logs_hold_no_tokens_keys_or_names_and_stay_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with tierkv.open(tiers=_tiers(tmp_path), space=SPACE) as engine:
        await _turns(engine, 50)

    ours = [r for r in caplog.records if r.name.startswith("tierkv")]
    text = "\n".join(record.getMessage() for record in ours)
    assert ours, "an engine says at least which tiers it opened"
    assert not re.search(r"313370\d\d", text)
    assert not re.search(r"[0-9a-f]{32}", text)
    assert "secret" not in text
    assert len(ours) <= 10, text


async def test_f087_engines_come_and_go_and_count_for_themselves(tmp_path: Path) -> None:
    pages = []
    for turn in range(3):
        async with tierkv.open(tiers=_tiers(tmp_path / str(turn)), space=SPACE) as engine:
            await _turns(engine, 2)
            pages.append(engine.metrics.scrape().decode())

    for page in pages:
        assert 'tierkv_lookups_total{result="hit",tier="host"} 1.0' in page
        assert 'tierkv_lookups_total{result="miss",tier="all"} 1.0' in page
        assert "tierkv_tokens_matched_total 64.0" in page
        assert "tierkv_tokens_requested_total 128.0" in page
        assert 'tierkv_tier_entries{tier="nvme"} 4.0' in page
        assert "tierkv_sessions_open 0.0" in page
        assert "secret" not in page


async def test_the_port_is_open_while_the_engine_is(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def fetch() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            return bytes(reply.read())

    settings = {"tiers": _tiers(tmp_path), "metrics_port": port}
    async with tierkv.open(settings, space=SPACE) as engine:
        page = await engine.workers.run(fetch)
        assert b"tierkv_build_info{" in page

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
