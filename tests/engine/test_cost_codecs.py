"""Codec "auto" on a live engine: tried, taken up where it pays, given up where it does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, wrap
from tierkv.errors import ConfigError
from tierkv.testing.clock import VirtualClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio
LAYOUT = tierkv.Layout.uniform(2, 2, 64, "float32")
SPACE = tierkv.Space(tierkv.Identity("model", "rev"), LAYOUT, block_tokens=16)


def _kv(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """KV that planes can halve: few exponents, and mantissas with zeros at their end."""
    generator = torch.Generator().manual_seed(seed)

    def one() -> torch.Tensor:
        return torch.randint(-8, 8, (2, 64, 64), generator=generator).float()

    return [(one(), one()) for _ in range(2)]


async def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited 10 s in vain")


async def test_a_chain_is_taken_up_where_it_pays_and_frames_of_both_kinds_are_read(
    tmp_path: Path,
) -> None:
    clock = VirtualClock(100.0)
    tiers = [
        tierkv.Tier("host", "4MiB"),
        tierkv.Tier("nvme", "16MiB", path=str(tmp_path / "nvme"), codec="auto"),
    ]
    backends = wrap(tiers)
    async with tierkv.open(
        tiers=tiers, space=SPACE, backends=list(backends.values()), clock=clock, tick=0.005
    ) as engine:
        rig, core = Rig(engine, backends), engine.core
        nvme, costs = core.levels[1], core.decisions.costs
        assert engine.stats().chains == {"host": "raw", "nvme": "raw"}
        async with engine.session("a") as session:
            for seed in range(2):
                await session.store(kit.tokens(4, seed=seed), tierkv.views.dense(_kv(seed)))
            await engine.runtime.behind.drain()
            # what the chain saves and costs is found by trying it on a frame in memory
            await until(lambda: costs.codec("planes").ratio > 1.2)
            assert costs.codec("planes").decode > 0
            assert nvme.chain == "raw", "the tier itself is not measured yet"
            for size in (4096, 65536) * 4:
                core.decisions.sample(1, "read", size, size / 1000, clock())
            await until(lambda: nvme.chain == "planes")
            assert engine.stats().chains["nvme"] == "planes"
            await session.store(kit.tokens(4, seed=2), tierkv.views.dense(_kv(2)))
            await engine.runtime.behind.drain()
            assert session.explain(kit.tokens(4, seed=0))[0].chain == "raw"
            await until(lambda: not core.decisions.leases())  # a trial holds the part it tries
            rig.cool()
            assert session.explain(kit.tokens(4, seed=0))[0].chain == "raw or planes"
            used = [core.decisions.state(p, clock()).nbytes[0] for p in core.decisions.known()]
            assert len(set(used)) > 1, "frames of both kinds are in the tier"
            for seed in range(3):
                back = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in _kv(seed)]
                async with session.match(kit.tokens(4, seed=seed)) as match:
                    result = await match.load(into=tierkv.views.dense(back))
                assert result.tokens == 64
                for (k, v), (mine, its) in zip(_kv(seed), back, strict=True):
                    assert torch.equal(k, mine)
                    assert torch.equal(v, its)
            for size in (4096, 65536) * 200:  # a much faster disk: decoding would hold it up
                core.decisions.sample(1, "read", size, size / 1e12, clock())
            await until(lambda: nvme.chain == "raw")
        page = engine.metrics.scrape().decode()
        assert 'tierkv_tier_chain_active{chain="raw",tier="nvme"} 1.0' in page
        assert 'tierkv_tier_chain_active{chain="planes",tier="nvme"} 0.0' in page
        await rig.at_rest()


async def test_nothing_changes_while_a_batch_counts_on_the_chain(tmp_path: Path) -> None:
    tiers = [
        tierkv.Tier("host", "4MiB"),
        tierkv.Tier("nvme", "16MiB", path=str(tmp_path / "nvme"), codec="auto:zstd"),
    ]
    async with tierkv.open(tiers=tiers, space=SPACE, tick=0.005) as engine:
        core, now = engine.core, engine.core.clock
        for size in (4096, 65536) * 4:
            core.decisions.sample(1, "read", size, size / 1000, now())
        for _ in range(20):
            core.decisions.coded("zstd", 3 << 20, 1 << 20, 1e-6, now())
        from tierkv.blocks import part_id
        from tierkv.decisions.types import StoreItem

        root = SPACE.root("", b"")
        held = core.reserve(core.levels[1], [StoreItem(part_id(root, 0), None, root, 8192)])
        await asyncio.sleep(0.05)
        assert core.levels[1].chain == "raw"
        from tierkv.decisions.types import SkipReason

        core.rollback(held.id, [0], SkipReason.CLOSED)
        await until(lambda: core.levels[1].chain == "zstd")


async def test_a_lossy_chain_never_comes_by_itself(tmp_path: Path) -> None:
    tiers = [tierkv.Tier("nvme", "1MiB", path=str(tmp_path), codec="auto:int8")]
    with pytest.raises(ConfigError, match="lossy by itself"):
        async with tierkv.open(tiers=tiers, space=SPACE):
            pass


async def test_the_start_up_line_names_path_and_codec(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F074: one line says which way bytes take to each tier."""
    caplog.set_level("INFO", "tierkv")
    tiers = [
        tierkv.Tier("host", "1MiB"),
        tierkv.Tier("nvme", "1MiB", path=str(tmp_path / "a"), codec="auto"),
        tierkv.Tier("nvme", "1MiB", path=str(tmp_path / "b"), codec="zstd", name="cold"),
    ]
    async with tierkv.open(tiers=tiers, space=kit.space()):
        pass
    (line,) = [r.getMessage() for r in caplog.records if "host=memory" in r.getMessage()]
    assert "nvme=" in line
    assert "(raw, planes where it pays)" in line
    assert line.endswith("(zstd)")


async def test_a_load_still_works_with_every_setting(tmp_path: Path) -> None:
    tiers = [tierkv.Tier("nvme", "4MiB", path=str(tmp_path), codec="auto")]
    space = kit.space()
    async with tierkv.open(tiers=tiers, space=space) as engine, engine.session("a") as session:
        kv = kit.Memory(space.layout, 64, seed=1)
        await session.store(kit.tokens(4), kv.view)
        tokens, back = await load(session, kit.tokens(4))
        assert tokens == 64
        assert back.same(kv, 64)
