"""Tiers that change their size while they are in use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv.errors import ClosedError, ConfigError
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.faults import inject
from tierkv_backends.device import DeviceBackend

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024


async def test_a_tier_shrinks_under_use_and_loses_nothing_that_fits_below(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, capacity=64 * FRAME) as rig:
        engine = rig.engine
        async with engine.session("a") as session:
            prompts = {seed: kit.Memory(SPACE.layout, 64, seed=seed) for seed in range(4)}
            for seed, kv in prompts.items():
                await session.store(kit.tokens(4, seed=seed), kv.view)
            await engine.runtime.behind.drain()
            async with session.match(kit.tokens(4, seed=0)) as match:
                above = engine.resize("host", 2 * FRAME)
                assert above == 2 * FRAME, "four leased blocks stay"
                back = kit.Memory(SPACE.layout, 64)
                assert (await match.load(into=back.view)).tokens == 64
                assert back.same(prompts[0], 64)
            async with asyncio.timeout(60):
                while engine.stats().used["host"] > 2 * FRAME:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for seed, kv in prompts.items():
                tokens, back = await load(session, kit.tokens(4, seed=seed))
                assert tokens == 64
                assert back.same(kv, 64)
                assert engine.stats().used["host"] <= 2 * FRAME
            assert engine.resize("host", "128KiB") == 0  # and it grows again
            assert engine.shrink("host", FRAME) == 0
            assert engine.core.decisions.capacity(0) == (128 << 10) - FRAME
            page = engine.metrics.scrape().decode()
            assert f'capacity_bytes{{tier="host"}} {float((128 << 10) - FRAME)}' in page
        await rig.at_rest()


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE, capacity=64 * FRAME) as rig:
        with pytest.raises(ConfigError, match="no tier 'disk'; the engine has host"):
            rig.engine.resize("disk", 1)
        with pytest.raises(ConfigError, match="no tier 'disk'"):
            rig.engine.shrink("disk", 1)
        with pytest.raises(ConfigError, match="cannot grow"):
            rig.engine.resize("host", "1GiB")
        with pytest.raises(ConfigError, match="size"):
            rig.engine.resize("host", "many")
        assert rig.engine.shrink("host", "1GiB") == 0  # down to nothing
        assert rig.engine.core.decisions.capacity(0) == 0
    with pytest.raises(ClosedError):
        rig.engine.resize("host", FRAME)


@pytest.mark.every_loop
async def test_a_device_gives_memory_back_when_a_model_needs_it(tmp_path: Path) -> None:
    tiers = [
        tierkv.Tier("device", 32 * FRAME, device="sim:1"),
        tierkv.Tier("host", 64 * FRAME),
        tierkv.Tier("nvme", 64 * FRAME, path=str(tmp_path / "nvme")),
    ]
    device = SimDevice("sim:1")
    backends = {
        "device": inject(DeviceBackend(tiers[0], device)),
        **{t.name: inject(tierkv.registry.resolve("backends", t.kind)(t)) for t in tiers[1:]},
    }
    async with tierkv.open(tiers=tiers, space=SPACE, backends=list(backends.values())) as engine:
        assert list(engine.core.devices) == [device]
        async with engine.session("a") as session, asyncio.timeout(30):
            ids, kv = kit.tokens(8, seed=1), kit.Memory(SPACE.layout, 128, seed=1)
            await session.store(ids, kv.view)
            await engine.runtime.behind.drain()
            assert engine.stats().used["device"] > 0
            engine.resize("device", 2 * FRAME)
            while engine.stats().used["device"] > 2 * FRAME:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            tokens, back = await load(session, ids)
            assert tokens == 128
            assert back.same(kv, 128)
        await Rig(engine, backends).settle()


@pytest.mark.every_loop
async def test_memory_is_pinned_in_the_background_and_unpinned_at_the_end(tmp_path: Path) -> None:
    """P7: chunk by chunk, off the path of everybody."""
    pinned: list[int] = []
    undone: list[int] = []

    class Pins(SimDevice):
        def pin(self, memory: memoryview) -> bool:
            pinned.append(len(memory))
            return True

        def unpin(self, memory: memoryview) -> None:
            undone.append(len(memory))

    tiers = [tierkv.Tier("device", 32 * FRAME, device="sim:2"), tierkv.Tier("host", "2MiB")]
    backends = [
        DeviceBackend(tiers[0], Pins("sim:2")),
        tierkv.registry.resolve("backends", "host")(tiers[1]),
    ]
    async with tierkv.open(
        tiers=tiers, space=SPACE, backends=backends, staging="100MiB", tick=0.005
    ):
        async with asyncio.timeout(60):
            while len(pinned) < 3:  # noqa: ASYNC110 - the staging memory in two, the host tier
                await asyncio.sleep(0.005)
        assert undone == []
    assert pinned == [64 << 20, 36 << 20, 2 << 20]
    assert sorted(undone) == sorted(pinned)
