"""Copies that are cut short at any point, and parts that rise when they are used."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.ways import (
    FRAME,
    SPACE,
    copied_to,
    demote,
    loaded,
    move,
    opened,
    small,
    store,
    tiers,
)
from tierkv.decisions.types import EvictReason
from tierkv.mover.copies import Copy
from tierkv.mover.copying import copy_batch
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Failing, Short

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


def _copies(rig: Rig, source: int, target: int) -> list[Copy]:
    level = rig.engine.core.levels[source]
    return [
        Copy(part, generation, level.backend.longest(nbytes), source, target, space=SPACE)
        for part, generation, nbytes in rig.engine.core.decisions.parts(source)
    ]


def _forget(rig: Rig, tier: int) -> None:
    core = rig.engine.core
    left = [(p, g) for p, g, _ in core.decisions.parts(tier)]
    while left:
        core.free(core.decisions.dropped(left, tier, EvictReason.CAPACITY, core.clock()))
        left = [(p, g) for p, g, _ in core.decisions.parts(tier)]


@pytest.mark.parametrize("ways", ["host+nvme", "sim+nvme", "sim+host", "nvme+file"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_a_copy_cut_at_any_step_leaves_nothing_behind(
    ways: str, codec: str, tmp_path: Path
) -> None:
    """By a scope and natively; the source stays, and the copy can be made afterwards."""
    async with opened(small(ways, tmp_path, codec=["raw", codec])) as rig:
        core, turns = rig.engine.core, rig.engine.runtime.behind.turns
        await store(rig, 1)
        await rig.settle()

        async def copy() -> int:
            _forget(rig, 1)
            copies = _copies(rig, 0, 1)
            left = await copy_batch(core, copies, turns)
            assert left == 0
            assert all(c.made for c in copies)
            return left

        outcomes = set()
        async for step in cancel_at_each_step(copy):
            outcomes.add(step.outcome)
            await rig.at_rest()
            assert core.decisions.entries(0) == 4
            assert core.decisions.entries(1) in (0, 4)
            assert all(turn.waiting == 0 for turn in turns)
        assert {"cancelled", "completed"} <= outcomes
        assert len(await copied_to(rig, 1)) == 4
        assert await loaded(rig, 1) == 64


@pytest.mark.parametrize("ways", ["sim+host", "sim+nvme", "device+host"])
async def test_a_copy_into_a_device_cut_at_any_step_leaves_nothing_behind(
    ways: str, tmp_path: Path
) -> None:
    async with opened(small(ways, tmp_path)) as rig:
        core, turns = rig.engine.core, rig.engine.runtime.behind.turns
        await store(rig, 1)
        await rig.settle()
        await move(rig, 1)

        async def copy() -> int:
            _forget(rig, 0)
            return await copy_batch(core, _copies(rig, 1, 0), turns)

        outcomes = set()
        async for step in cancel_at_each_step(copy):
            outcomes.add(step.outcome)
            await rig.at_rest()
            assert core.decisions.entries(1) == 4
            assert core.decisions.entries(0) in (0, 4)
        assert {"cancelled", "completed"} <= outcomes
        assert len(await copied_to(rig, 0)) == 4
        assert await loaded(rig, 1) == 64


@pytest.mark.parametrize("fault", [Failing("read", times=1), Short(times=1)])
async def test_a_source_that_fails_for_good_is_forgotten(fault: Any, tmp_path: Path) -> None:
    fault.active = False
    async with opened(small("nvme+file", tmp_path), {"nvme": [fault]}) as rig:
        await store(rig, 1)
        core = rig.engine.core
        fault.active = True
        assert await copy_batch(core, _copies(rig, 0, 1), rig.engine.runtime.behind.turns) == 4
        assert core.decisions.entries(0) == core.decisions.entries(1) == 0
        fault.seen = 0
        fault.active = False
        assert await loaded(rig, 1) == 0
        await rig.at_rest()


async def test_a_frame_larger_than_the_staging_memory_is_let_go(tmp_path: Path) -> None:
    """It can never leave for a tier with another codec; room must be made all the same."""
    chain = tiers(
        "host+nvme",
        tmp_path,
        [2 * FRAME, "4MiB"],
        codec=["raw", "zstd"],
        write_through=[True, False],
    )
    async with opened(chain, staging="8KiB") as rig:
        core = rig.engine.core
        await store(rig, 1, blocks=2)
        assert len(await demote(rig)) > 0
        await rig.settle()
        assert core.decisions.entries(1) == 0
        assert core.decisions.entries(0) < 2
        await rig.at_rest()


@pytest.mark.parametrize("ways", ["device+host+nvme", "sim+host+nvme", "device+nvme"])
async def test_what_a_load_brings_from_below_rises_to_the_device(ways: str, tmp_path: Path) -> None:
    async with opened(small(ways, tmp_path)) as rig:
        core = rig.engine.core
        await store(rig, 1)
        await rig.settle()
        await move(rig, len(rig.backends) - 1)
        assert core.decisions.entries(0) == 0
        assert await loaded(rig, 1) == 64
        await rig.settle()
        assert core.decisions.entries(0) == 4
        await copied_to(rig, 0)
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


async def test_a_prefetch_takes_the_next_tier_where_the_first_is_full_of_hotter_parts(
    tmp_path: Path,
) -> None:
    async with opened(small("device+host+nvme", tmp_path)) as rig:
        core = rig.engine.core
        await store(rig, 1)
        await rig.settle()
        await move(rig, 2)
        for seed in (2, 3):  # the device takes two conversations
            await store(rig, seed)
            assert await loaded(rig, seed) == 64
        await rig.settle()
        hot = {part for part, _, _ in core.decisions.parts(0)}
        job = await rig.engine.prefetch(tokens=kit.tokens(4, seed=1))
        assert await job.wait() == 4
        await rig.settle()
        assert {part for part, _, _ in core.decisions.parts(0)} == hot
        assert rig.engine.explain(kit.tokens(4, seed=1))[0].tier == "host"
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


async def test_a_burst_of_hits_does_not_fill_the_queue(tmp_path: Path) -> None:
    """Hits in the second tier are offered to the first again and again, and copied once."""
    async with opened(small("device+host+nvme", tmp_path)) as rig:
        core, behind = rig.engine.core, rig.engine.runtime.behind
        await store(rig, 1)
        await rig.settle()
        await move(rig, 1)
        parts = await copied_to(rig, 1)
        for _ in range(100):
            behind.promote(core.levels[1], parts, SPACE)
            assert behind.pending <= len(parts)
        async with asyncio.timeout(30):
            await rig.settle()
        assert core.decisions.entries(0) == 4
        await rig.at_rest()


async def test_a_prefetch_brings_parts_from_one_medium_to_a_faster_one(tmp_path: Path) -> None:
    async with opened(small("nvme+file", tmp_path)) as rig:
        core = rig.engine.core
        await store(rig, 1)
        await rig.settle()
        await move(rig, 1)
        assert core.decisions.entries(0) == 0
        job = await rig.engine.prefetch(tokens=kit.tokens(4, seed=1))
        assert await job.wait() == 4
        assert len(await copied_to(rig, 0)) == 4
        reads = rig.calls("file", "read")
        assert await loaded(rig, 1) == 64
        assert rig.calls("file", "read") == reads
        await rig.at_rest()


@pytest.mark.parametrize("ways", ["device+host", "sim+nvme"])
async def test_a_device_without_memory_leaves_the_parts_below(ways: str, tmp_path: Path) -> None:
    refuse = Failing("write")
    refuse.active = False
    first = ways.split("+")[0]
    async with opened(small(ways, tmp_path), {first: [refuse]}) as rig:
        core, turns = rig.engine.core, rig.engine.runtime.behind.turns
        await store(rig, 1)
        await rig.settle()
        await move(rig, 1)
        refuse.active = True
        assert await copy_batch(core, _copies(rig, 1, 0), turns) == 4
        assert core.decisions.entries(0) == 0
        assert core.decisions.entries(1) == 4
        await rig.at_rest()
        refuse.active = False
        assert await copy_batch(core, _copies(rig, 1, 0), turns) == 0
        assert core.decisions.entries(0) == 4
        assert await loaded(rig, 1) == 64
        await rig.at_rest()
