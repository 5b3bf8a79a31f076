"""A device that is too small, refuses memory, shrinks, or hides faults: nobody else is harmed."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

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
from tierkv.decisions.types import SkipReason
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Corrupting, Failing, Short

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.anyio
SCALE = float(os.environ.get("TIERKV_SCALE", "1"))
CHAINS = ("device", "device+host", "device+nvme", "device+host+nvme")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", CHAINS)
async def test_a_burst_of_four_times_the_device_harms_nobody(
    chain: str, device: str, tmp_path: Path
) -> None:
    """It ends; capacity and quota hold at each step; blocks that others lease stay."""
    room, quota = 64 * FRAME, 40 * FRAME
    tiers = make_tiers(chain, tmp_path, device, room=room)
    tenants = {"greedy": {"quota": {"device": quota}}}
    async with on_device(tiers, tenants=tenants) as rig:
        decisions = rig.engine.core.decisions
        most = {"used": 0, "held": 0.0, "greedy": 0}

        def look(*_: object) -> None:
            stats = rig.tier.stats()
            most["used"] = max(most["used"], decisions.used(0) + decisions.reserved(0))
            most["held"] = max(most["held"], stats.details["arena_bytes"])
            most["greedy"] = max(most["greedy"], decisions.tenant_bytes("greedy", 0))

        real = decisions.reserve

        def watched(*args: Any, **more: Any) -> Any:
            look()
            try:
                return real(*args, **more)
            finally:
                look()

        decisions.reserve = watched  # type: ignore[method-assign]
        assert (await stored(rig, 1, 12, tenant="quiet")).stored == 12
        async with (
            rig.engine.session("s1", tenant="quiet") as session,
            session.match(said(1, 12)[0]) as match,
        ):
            ids, kv = said(2, 4 * 64)
            async with rig.engine.session("burst", tenant="greedy") as burst:
                result = await burst.store(ids, kv.view)
            look()
            assert result.stored + result.skipped == 4 * 64
            if chain != "device":
                assert result.skipped == 0, "what the device has no room for goes on"
            back = kit.Memory(SPACE.layout, 192)
            assert (await match.load(into=back.view)).tokens == 192
            assert back.same(said(1, 12)[1], 192)
        await rig.settle()
        look()
        assert most["used"] <= room
        assert most["held"] <= room
        assert 0 < most["greedy"] <= quota
        assert await loaded(rig, 1, 12, tenant="quiet") == 192
        async with rig.engine.session("burst", tenant="greedy") as burst:
            count, back = await load(burst, ids)
            assert back.same(kv, count)
            assert count == 4 * 1024 if chain != "device" else count <= quota // FRAME * 16
        await rig.clean()


@pytest.mark.parametrize("chain", CHAINS)
async def test_each_device_allocation_may_fail(chain: str, tmp_path: Path) -> None:
    """No error: that store is skipped, goes on to the next tier, or takes the coldest's place."""
    number, seen = 0, True
    while seen:
        sim = SimDevice(f"sim:{number}", delay=0.0)
        calls = 0

        def nth(_: int, __: int, number: int = number) -> bool:
            nonlocal calls
            calls += 1
            return calls == number + 1

        tiers = make_tiers(chain, tmp_path / str(number), room=32 * FRAME)
        async with on_device(tiers, sim=sim) as rig:
            with sim.fail_allocations(nth):
                results = [await stored(rig, seed, 3) for seed in range(6)]
                await rig.settle()
                seen = calls > number
                assert rig.tier.stats().details["allocation_failures"] == seen
            skipped = [b for r in results for b in r.blocks if b.state == "skipped"]
            assert {b.reason for b in skipped} <= {SkipReason.FULL, SkipReason.NO_PARENT}
            here = [await loaded(rig, seed, 3) for seed in range(6)]  # checks every byte
            if chain == "device":
                lost = 18 - sum(here) // 16
                assert len(skipped) <= lost <= len(skipped) + 3
                assert bool(lost) is seen, "a frame without memory was stored"
            else:
                assert not skipped
                assert here == [48] * 6
            for seed in range(6):
                assert (await stored(rig, seed, 3)).skipped == 0
                assert await loaded(rig, seed, 3) == 48
            await rig.clean()
        number += 1
    assert number >= 3


@pytest.mark.parametrize("chain", CHAINS)
async def test_a_device_without_any_memory_is_a_cache_without_that_tier(
    chain: str, tmp_path: Path
) -> None:
    sim = SimDevice("sim:1", delay=0.0)
    async with on_device(make_tiers(chain, tmp_path), sim=sim) as rig:
        with sim.fail_allocations():
            result = await stored(rig, 1)
            await rig.settle()
            assert not rig.parts(0)
            assert rig.tier.stats().details["allocation_failures"] > 0
            if chain == "device":
                assert result.stored == 0
                assert {b.reason for b in result.blocks} <= {
                    SkipReason.FULL,
                    SkipReason.NO_PARENT,
                }
                assert await loaded(rig, 1) == 0
            else:
                assert result.stored == 4
                assert await loaded(rig, 1) == 64
        await rig.clean()


@pytest.mark.parametrize("chain", ["device", "device+host"])
async def test_allocation_failures_at_random(chain: str, tmp_path: Path) -> None:
    await _at_random(chain, tmp_path, range(3))


@pytest.mark.stress
@pytest.mark.parametrize("chain", CHAINS)
async def test_many_allocation_failures_at_random(chain: str, tmp_path: Path) -> None:
    await _at_random(chain, tmp_path, range(100, 100 + max(1, int(30 * SCALE))))


async def _at_random(chain: str, path: Path, seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        sim = SimDevice(f"sim:{seed}", delay=1e-4)
        tiers = make_tiers(chain, path / str(seed), room=16 * FRAME)
        async with on_device(tiers, sim=sim) as rig:
            with sim.fail_allocations(lambda *_: rng.random() < 0.3):  # noqa: B023 - used inside
                for _ in range(12):
                    await stored(rig, rng.randrange(6), 3)
                    await loaded(rig, rng.randrange(6), 3)
            await rig.clean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chain", CHAINS)
async def test_shrink_gives_memory_back_to_the_model(
    chain: str, device: str, tmp_path: Path
) -> None:
    tiers = make_tiers(chain, tmp_path, device, room=64 * FRAME)
    async with on_device(tiers) as rig:
        for seed in range(10):
            await stored(rig, seed)
        await rig.settle()
        before = rig.tier.stats().details["arena_bytes"]
        rig.engine.shrink("device", 48 * FRAME)
        await rig.settle()
        assert rig.used() <= 16 * FRAME
        assert rig.tier.stats().capacity_bytes == 16 * FRAME
        for seed in range(10):
            count = await loaded(rig, seed)
            assert count in (0, 64) if chain == "device" else count == 64
        for seed in range(20, 60):  # the frames that stand in the way are replaced in time
            await stored(rig, seed)
            assert rig.used() <= 16 * FRAME
        await rig.settle()
        assert rig.tier.stats().details["arena_bytes"] <= 16 * FRAME < before
        assert await loaded(rig, 59) == 64
        rig.engine.resize("device", 64 * FRAME)
        for seed in range(60, 66):
            await stored(rig, seed)
        await rig.settle()
        assert rig.used() > 32 * FRAME


@pytest.mark.parametrize("step", ["store", "load"])
@pytest.mark.parametrize("chain", ["device", "device+host"])
async def test_cancelled_at_each_step(chain: str, step: str, tmp_path: Path) -> None:
    sim = SimDevice("sim:5", delay=1e-3)
    async with on_device(make_tiers(chain, tmp_path), sim=sim) as rig:
        ids, kv = said(1)
        if step == "load":
            await stored(rig, 1)
            await rig.settle()

        async def one() -> None:
            async with rig.engine.session("s1") as session:
                if step == "store":
                    await session.store(ids, kv.view)
                    return
                back = kit.Memory(SPACE.layout, 64)
                try:
                    async with session.match(ids) as match:
                        result = await match.load(into=back.view)
                        assert result.tokens == 64
                        assert back.same(kv, 64)
                finally:  # the memory is the caller's again: nobody writes it any more
                    for layer in back.layers.values():
                        for tensor in layer.values():
                            tensor.fill_(55.0)
                    after.append(back)

        after: list[kit.Memory] = []
        async for run in cancel_at_each_step(one):
            await rig.clean()
            for back in after:
                tensors = [t for layer in back.layers.values() for t in layer.values()]
                assert all(bool((t == 55.0).all()) for t in tensors), run
            count = await loaded(rig, 1)
            assert count == 64 if run.outcome == "completed" else count % 16 == 0
            if step == "store":
                async with rig.engine.session("s1") as session:
                    session.destroy()
                await rig.settle()
                core = rig.engine.core
                core.free(core.decisions.make_room(0, 4 << 20, tenant="", now=core.clock())[0])


@pytest.mark.parametrize("chain", ["device", "device+host", "device+nvme"])
@pytest.mark.parametrize("fault", [Corrupting, Short, Failing], ids=lambda f: f.__name__)
async def test_a_damaged_device_frame_is_a_miss_or_comes_from_below(
    chain: str, fault: type[Any], tmp_path: Path
) -> None:
    bad = Failing("read") if fault is Failing else fault()
    bad.active = False
    async with on_device(make_tiers(chain, tmp_path), faults={"device": [bad]}) as rig:
        await stored(rig, 1)
        await rig.engine.flush()
        await rig.settle()
        bad.active = True
        first = await loaded(rig, 1)  # checks every byte
        assert first < 64 or chain != "device"
        assert bad.seen > 0
        bad.active = False
        again = await loaded(rig, 1)
        assert again == 64 if chain != "device" else again <= 64
        assert (await stored(rig, 1)).skipped == 0
        assert await loaded(rig, 1) == 64
        await rig.clean()
