"""Engines over a device tier: round trips, both ways between tiers, watermarks, restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.device_rig import (
    DEVICES,
    FRAME,
    SPACE,
    loaded,
    make_tiers,
    on_device,
    said,
    stored,
)
from tests.engine.rig import load

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.device_rig import DeviceRig

pytestmark = pytest.mark.anyio

CHAINS = ("device", "device+host", "device+nvme", "device+file", "device+host+nvme")
LOWER = CHAINS[1:]
DURABLE = ("device+nvme", "device+file", "device+host+nvme")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


async def eventually(rig: DeviceRig, wanted: str, done: Any) -> None:
    """Wait until the background work has brought something about."""
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.002)
            await rig.settle()
    assert done(), wanted


@pytest.mark.parametrize("layout", sorted(kit.LAYOUTS))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", CHAINS)
async def test_round_trip(chain: str, device: str, layout: str, tmp_path: Path) -> None:
    space = kit.space(layout)
    ids, kv = kit.tokens(5, seed=3), kit.Memory(space.layout, 80, seed=3)
    async with on_device(make_tiers(chain, tmp_path, device), space=space) as rig:
        async with rig.engine.session("chat") as session:
            assert (await session.store(ids, kv.view)).stored == 5
            count, back = await load(session, ids)
            assert count == 80
            assert back.same(kv, 80)
        await rig.clean()
        assert rig.tier.stats().entries == len(rig.parts())
        assert rig.parts(), "nothing is on the device"


@pytest.mark.parametrize("layout", ["full", "sliding", "state"])
@pytest.mark.parametrize("device", DEVICES)
async def test_layer_by_layer(device: str, layout: str, tmp_path: Path) -> None:
    space = kit.space(layout)
    ids, kv = kit.tokens(5, seed=3), kit.Memory(space.layout, 80, seed=3)
    async with on_device(make_tiers("device+host", tmp_path, device), space=space) as rig:
        async with rig.engine.session("chat") as session:
            await session.store(ids, kv.view)
            back = kit.Memory(space.layout, 80)
            async with session.match(ids) as match:
                seen = [layer async for layer in match.layers(into=back.view)]
            assert sorted(seen) == sorted(x.index for g in space.layout.groups for x in g.layers)
            assert back.same(kv, 80)
        await rig.clean()


@pytest.mark.parametrize("codec", ["planes", "zstd", "int8"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", ["device", "device+host"])
async def test_coded_frames_on_the_device(
    chain: str, device: str, codec: str, tmp_path: Path
) -> None:
    tiers = make_tiers(chain, tmp_path, device)
    tiers[0] = replace(tiers[0], codec=codec)
    async with on_device(tiers) as rig:
        assert (await stored(rig, 1)).stored == 4
        for part, generation, _ in rig.engine.core.decisions.parts(0):
            found = rig.tier.borrow(part, generation)
            assert found is not None
            assert found.header.folded
            assert {section.chain for section in found.header.sections} <= {codec, "raw"}
        fidelity = "lossy" if codec == "int8" else "exact"
        async with rig.engine.session("s1", fidelity=fidelity) as session:
            count, back = await load(session, said(1)[0])
            assert count == 64
            assert back.same(said(1)[1], 64) is (codec != "int8")
        await rig.clean()


@pytest.mark.parametrize("device", DEVICES)
async def test_tails_and_branches(device: str, tmp_path: Path) -> None:
    ids, kv = kit.tokens(3.5, seed=4), kit.Memory(SPACE.layout, 56, seed=4)
    async with on_device(make_tiers("device+host", tmp_path, device)) as rig:
        async with rig.engine.session("trunk") as session:
            result = await session.store(ids, kv.view, tail=True)
            assert result.stored == 4
            count, back = await load(session, ids)
            assert count == 56
            assert back.same(kv, 56)
            async with session.fork("branch") as branch:
                count, back = await load(branch, ids)
                assert count >= 48
                assert back.same(kv, count)
        await rig.clean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", LOWER)
async def test_what_the_device_gives_up_is_in_the_next_tier(
    chain: str, device: str, tmp_path: Path
) -> None:
    tiers = make_tiers(chain, tmp_path, device, room=10 * FRAME)
    async with on_device(tiers) as rig:
        for seed in range(8):  # three times what fits
            assert (await stored(rig, seed)).skipped == 0
            assert rig.used() <= tiers[0].capacity_bytes
        await rig.settle()
        for seed in range(8):
            assert await loaded(rig, seed) == 64, seed
        assert rig.tier.stats().details["arena_bytes"] <= tiers[0].capacity_bytes
        await rig.clean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", LOWER)
async def test_what_is_used_again_comes_back_to_the_device(
    chain: str, device: str, tmp_path: Path
) -> None:
    async with on_device(make_tiers(chain, tmp_path, device)) as rig:
        await stored(rig, 1)
        await rig.engine.flush()
        await rig.settle()
        rig.cool()
        assert not rig.parts(0)
        assert len(rig.parts(1)) == 4
        assert await loaded(rig, 1) == 64
        await eventually(rig, "a copy on the device", lambda: len(rig.parts(0)) == 4)
        assert await loaded(rig, 1) == 64
        result = rig.engine.session("s1")
        async with result as session, session.match(said(1)[0]) as match:
            back = kit.Memory(SPACE.layout, 64)
            assert (await match.load(into=back.view)).by_tier == {"device": 64}
            assert back.same(said(1)[1], 64)
        await rig.clean()


@pytest.mark.parametrize("chain", DURABLE)
@pytest.mark.parametrize("device", DEVICES)
async def test_a_restart_finds_all_but_the_device(chain: str, device: str, tmp_path: Path) -> None:
    tiers = make_tiers(chain, tmp_path, device)
    async with on_device(tiers) as rig:
        for seed in range(3):
            await stored(rig, seed)
        await rig.engine.flush()
    async with on_device(tiers) as rig:
        assert not rig.parts(0)
        assert rig.tier.stats().details["arena_bytes"] == 0
        for seed in range(3):
            assert await loaded(rig, seed) == 64
        await rig.clean()


@pytest.mark.parametrize("chain", ["device", "device+host"])
async def test_watermarks_keep_room_free(chain: str, tmp_path: Path) -> None:
    tiers = make_tiers(chain, tmp_path, room=20 * FRAME)
    async with on_device(tiers, tick=0.01) as rig:
        for seed in range(6):
            await stored(rig, seed)
        low = int(tiers[0].low * tiers[0].capacity_bytes)
        await eventually(rig, "room below the mark", lambda: rig.used() <= low)
        assert rig.used() > low - 2 * FRAME, "no more than that goes"
        await rig.clean()


async def test_start_up_says_what_stands_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierkv")
    tiers = [tierkv.Tier("device", "4MiB", device="cpu")]
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        assert engine.stats().tiers["device"].mode == "device cpu"
    assert "device=device cpu" in caplog.text


async def test_two_engines_share_no_device_memory(tmp_path: Path) -> None:
    one, other = (make_tiers("device", tmp_path, f"sim:{n}") for n in (1, 2))
    async with on_device(one) as a, on_device(other) as b:
        await stored(a, 1)
        await stored(b, 2)
        assert await loaded(a, 1) == 64
        assert await loaded(b, 2) == 64
        assert await loaded(a, 2) == 0
        assert a.tier.device is not b.tier.device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", ["device", "device+host+nvme"])
async def test_the_loop_is_never_blocked(
    chain: str, device: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with on_device(make_tiers(chain, tmp_path, device, room=40 * FRAME)) as rig:
        await stored(rig, 0)  # imports what is imported on first use
        request.getfixturevalue("no_blocking")
        for seed in range(1, 6):
            await stored(rig, seed, 12)
            assert await loaded(rig, seed, 12) == 192
        await rig.engine.prefetch(session="s1")
        await rig.engine.flush()
        rig.engine.shrink("device", 8 * FRAME)
        await rig.settle()
        rig.engine.resize("device", 40 * FRAME)
        await rig.clean()
