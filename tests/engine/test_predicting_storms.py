"""Storms over engines whose predictors are at work: nothing is wrong, leaked or left unreplayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, usable, wrap
from tests.engine.storm_world import Sometimes
from tests.engine.storming import Storm
from tierkv.decisions.log import replay
from tierkv.decisions.prefetch_log import PREFETCH_LINE, replay_prefetching
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.engine.predicting import make_prefetching
from tierkv.testing.faults import Corrupting, Failing, Short, Slow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
FRAME = 12 * 1024


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


def config_of(kinds: str, path: Path, seed: int) -> tierkv.EngineConfig:
    tiers = [
        tierkv.Tier(
            kind,
            20 * FRAME if number == 0 else 160 * FRAME,
            device="sim:3" if kind == "device" else None,
            path=str(path / kind) if kind in ("nvme", "file") else None,
        )
        for number, kind in enumerate(kinds.split("+"))
    ]
    return tierkv.EngineConfig(
        tiers=tiers,
        decision_log=str(path / "log"),
        staging="256KiB",
        tick=0.005,
        prefetch="arrival,chain:blocks=4,sequential:first=2,return_time:chance=0",
        prefetch_budget="1MiB" if seed % 2 else None,
        prefetch_floor=0.1,
    )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.stress)])
@pytest.mark.parametrize(
    ("kinds", "layout"),
    [("host+nvme", "full"), ("host+file", "sliding"), ("device+host+nvme", "state")],
)
async def test_a_storm_with_predictors(
    kinds: str, layout: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    config = config_of(kinds, tmp_path, seed)
    faults = [Failing("read"), Failing("write"), Short(), Corrupting(0.7), Slow(0.002, "read")]
    last = config.tiers[-1].name
    backends = wrap(config.tiers, {last: [Sometimes(f, n) for n, f in enumerate(faults)]})
    space = kit.space(layout)
    async with tierkv.open(config, space=space, backends=list(backends.values())) as engine:
        sizes = {config.tiers[0].name: (5 * FRAME, 8 * FRAME)}
        storm = Storm(Rig(engine, backends), space, seed, sizes=sizes)
        await storm.run(4, 40)
        backends[last].faults.clear()
        await storm.check()
        books = engine.runtime.prefetcher.books
        assert not books._planned, "a plan was never finished"
        assert not books._flying
        for figures in engine.stats().prefetch.values():
            ends = figures.used + figures.late + figures.wasted + figures.refused
            assert figures.issued == ends + figures.out
            assert figures.out >= 0
            assert not figures.broken
        await usable(storm.rig, space)
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    mine = [line for line in lines if line.startswith(PREFETCH_LINE)]
    assert list(replay_prefetching(lines, make_prefetching(config))) == mine
    assert any(b'"op":"prefetch.grant"' in line for line in mine)
    fresh = make_decisions(config, make_levels(config, list(wrap(config.tiers).values())))
    assert list(replay(lines, fresh)) == lines
