"""Storms over every tier and layout, and what they brought to light.

Callers store, load, prefetch, fork, destroy, flush and resize at random, cancelled at random, while
tiers fail; decisions check themselves after every call, and their log replays byte for byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running, usable, wrap
from tests.engine.storm_world import Sometimes
from tests.engine.storming import Storm
from tierkv.abc import IoResult, IoStatus
from tierkv.decisions.log import replay
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.errors import BackendError
from tierkv.testing.faults import Corrupting, Failing, Short, Slow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv.abc import WriteItem

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024
SCALE = float(os.environ.get("TIERKV_SCALE", "1"))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


def refuse_one(rig: Rig, tier: str, number: int) -> None:
    """Let the next write fail for one of its items only."""
    backend = rig.backends[tier].inner
    write = backend.write

    async def once(items: Sequence[WriteItem]) -> list[IoResult]:
        backend.write = write  # type: ignore[method-assign]
        results = await write([*items[:number], *items[number + 1 :]])
        results.insert(number, IoResult(IoStatus.ERROR, BackendError(tier, "one bad extent")))
        return results

    backend.write = once  # type: ignore[method-assign]


@pytest.mark.parametrize("tier", ["nvme", "file"])
async def test_k2_what_was_written_behind_a_failure_is_deleted(tier: str, tmp_path: Path) -> None:
    """Parts A, B, C are written at once and B fails: C is of no use, and takes no room."""
    async with running(tier, tmp_path, space=SPACE) as rig:
        refuse_one(rig, tier, 1)
        async with rig.engine.session("a") as session:
            ids, kv = kit.tokens(3), kit.Memory(SPACE.layout, 48, seed=1)
            result = await session.store(ids, kv.view)
            assert [b.state for b in result.blocks] == ["stored", "skipped", "skipped"]
            assert (await load(session, ids))[0] == 16
        await rig.at_rest()


@dataclass(frozen=True)
class Weather:
    """One storm."""

    kinds: str
    layout: str
    codec: str | None = None
    room: int = 20
    failing: bool = False
    tenants: bool = False
    staging: str = "256KiB"
    write_through: bool = True

    def __str__(self) -> str:
        return f"{self.kinds}-{self.layout}-{self.codec}"

    def tiers(self, path: Path) -> list[tierkv.Tier]:
        """Its tiers, fastest first."""
        return [
            tierkv.Tier(
                kind,
                self.room * FRAME
                if number == 0 and kind != "nvme"
                else max(self.room, 160) * FRAME,
                device="sim:3" if kind == "device" else None,
                path=str(path / kind) if kind in ("nvme", "file") else None,
                codec=self.codec if kind in ("nvme", "file") else None,
                write_through=self.write_through,
            )
            for number, kind in enumerate(self.kinds.split("+"))
        ]


STORMS = (
    Weather("host", "state", room=8),
    Weather("nvme", "full", failing=True),
    Weather("file", "sliding", "zstd", failing=True),
    Weather("host+nvme", "mixed", "int8", tenants=True),
    Weather("host+nvme+file", "latent", "planes", failing=True, write_through=False),
    Weather("nvme+file", "sliding", "auto", tenants=True),
    Weather("device+host+nvme", "full", room=8, failing=True),
    Weather("device+file", "state", "zstd", room=8, tenants=True),
)


async def blow(weather: Weather, path: Path, seed: int, rounds: int) -> Storm:
    """Let it blow over an engine, and look what it left."""
    tiers = weather.tiers(path)
    names = [tier.name for tier in tiers]
    limits: dict[str, Any] = {
        "a": {"quota": {names[0]: 6 * FRAME}, "reserved": {names[-1]: 5 * FRAME}},
        "b": {"session_quota": 10 * FRAME},
    }
    config = tierkv.EngineConfig(
        tiers=tiers,
        tenants=limits if weather.tenants else {},
        decision_log=str(path / "log"),
        staging=weather.staging,
        tick=0.005,
    )
    kinds = [
        Failing("read"),
        Failing("write"),
        Failing("write", status=IoStatus.FULL),
        Short(),
        Corrupting(0.7),
        Slow(0.005, "read", "write", "delete"),
    ]
    last = [Sometimes(fault, number) for number, fault in enumerate(kinds)]
    backends = wrap(tiers, {names[-1]: last if weather.failing else []})
    space = kit.space(weather.layout)
    async with tierkv.open(config, space=space, backends=list(backends.values())) as engine:
        storm = Storm(
            Rig(engine, backends),
            space,
            seed,
            tenants=("a", "b", "c") if weather.tenants else ("",),
            lossy=0.1 if weather.codec == "int8" else 0.0,
            sizes={names[0]: (5 * FRAME, 8 * FRAME)},
        )
        await storm.run(4, rounds)
        backends[names[-1]].faults.clear()
        await storm.check()
        async with engine.session("slow") as session:
            session.computed(1, 1e6)  # whatever a load takes, it pays
        await usable(storm.rig, space)
    lines = (path / "log").read_bytes().splitlines(keepends=True)
    fresh = make_decisions(config, make_levels(config, list(wrap(tiers).values())))
    assert list(replay(lines, fresh)) == lines
    return storm


@pytest.mark.parametrize("weather", STORMS, ids=str)
async def test_a_storm_costs_hits_and_nothing_else(
    weather: Weather, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    # a state is of use to a prompt that goes on from the very token behind which it was kept
    due = {"stored"} if weather.layout == "state" else {"stored", "tokens"}
    seen: set[str] = set()
    for seed in range(1, 11):  # how calls interleave is the machine's affair: one may find nothing
        (tmp_path / str(seed)).mkdir()
        storm = await blow(weather, tmp_path / str(seed), seed, 30)
        seen |= {name for name in due if storm.counts.get(name)}
        if seen == due:
            break
    assert seen == due


@pytest.mark.stress
@pytest.mark.parametrize("weather", STORMS, ids=str)
async def test_many_storms(
    weather: Weather, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    for seed in range(100, 100 + max(1, int(40 * SCALE))):
        (tmp_path / str(seed)).mkdir()
        await blow(weather, tmp_path / str(seed), seed, 40)
