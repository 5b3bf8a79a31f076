"""Copies between any two tiers: down when room is needed, up when it pays, never in neither."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.ways import (
    FRAME,
    SPACE,
    WAYS,
    copied_to,
    demote,
    loaded,
    move,
    opened,
    parts_of,
    small,
    store,
    tiers,
)
from tierkv.abc import IoStatus
from tierkv.decisions.types import MissReason
from tierkv.mover.copies import Copy
from tierkv.testing.faults import Corrupting, Failing, Gated

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


@pytest.mark.parametrize("ways", WAYS)
async def test_what_has_no_room_moves_down_and_nothing_is_lost(ways: str, tmp_path: Path) -> None:
    async with opened(small(ways, tmp_path)) as rig:
        count = 20 if ways.startswith("nvme") else 8
        for seed in range(count):
            await store(rig, seed)
        await rig.settle()
        used = rig.engine.stats().used
        assert used[ways.split("+")[1]] > 0
        for tier in range(len(rig.backends)):
            await copied_to(rig, tier)
        assert [await loaded(rig, seed) for seed in range(count)] == [64] * count
        await rig.at_rest()


@pytest.mark.parametrize("ways", WAYS)
async def test_parts_are_promoted_up_the_same_way(ways: str, tmp_path: Path) -> None:
    async with opened(small(ways, tmp_path)) as rig:
        core, behind = rig.engine.core, rig.engine.runtime.behind
        await store(rig, 1)
        await rig.settle()
        for slower in range(len(rig.backends) - 1, 0, -1):
            await move(rig, slower)
            assert core.decisions.entries(0) == 0
            parts = await copied_to(rig, slower)
            assert len(parts) == 4
            behind.promote(core.levels[slower], parts, SPACE)
            await rig.settle()
            assert core.decisions.entries(0) == 4
            again = {p.part: p for p in await copied_to(rig, 0)}
            for stored in parts:
                assert again[stored.part].generation == stored.generation
            if core.levels[0].resident is not None:  # a device can check them itself
                for stored in parts:
                    found = core.levels[0].resident.borrow(stored.part, stored.generation)
                    assert found is not None
                    assert found.header.folded
            assert await loaded(rig, 1) == 64
        await rig.at_rest()


@pytest.mark.parametrize("ways", ["host+nvme", "device+host+nvme", "nvme+file"])
@pytest.mark.parametrize("codecs", [("raw", "zstd", "raw"), ("zstd", "planes", "zstd")])
async def test_frames_get_the_codec_of_the_tier_that_they_move_to(
    ways: str, codecs: Sequence[str], tmp_path: Path
) -> None:
    names = codecs[: len(ways.split("+"))]
    if ways.startswith("device"):
        names = ["raw", *codecs[1:]]
    async with opened(small(ways, tmp_path, codec=list(names))) as rig:
        count = 20 if ways.startswith("nvme") else 8
        for seed in range(count):
            await store(rig, seed)
        await rig.settle()
        for tier in range(len(rig.backends)):
            await copied_to(rig, tier)
        assert [await loaded(rig, seed) for seed in range(count)] == [64] * count
        await rig.at_rest()


@pytest.mark.parametrize("ways", ["device+host", "nvme+file", "host+nvme"])
async def test_a_damaged_source_is_not_handed_on(ways: str, tmp_path: Path) -> None:
    flip = Corrupting(0.6)
    flip.active = False
    first = ways.split("+")[0]
    async with opened(small(ways, tmp_path), {first: [flip]}) as rig:
        await store(rig, 1)
        await rig.settle()
        core = rig.engine.core
        flip.active = True
        copies = [
            Copy(p, g, core.levels[0].backend.longest(n), 0, 1)
            for p, g, n in core.decisions.parts(0)
        ]
        rig.engine.runtime.behind.add(copies)
        await rig.settle()
        assert core.decisions.entries(1) == 0
        assert core.decisions.entries(0) == 0
        flip.active = False
        assert await loaded(rig, 1) == 0
        async with rig.engine.session("s1") as session:
            (report, *_) = session.explain(kit.tokens(4, seed=1))
            assert report.reason is MissReason.DAMAGED
        await rig.at_rest()


@pytest.mark.parametrize("ways", ["device+nvme", "nvme+file"])
async def test_a_source_that_cannot_be_read_now_is_kept(ways: str, tmp_path: Path) -> None:
    """The medium says that it may come back: then nothing is lost, and the copy is made later."""
    first, last = ways.split("+")
    gone = Failing("read", status=IoStatus.ERROR)
    gone.error = tierkv.errors.BackendError(first, "not now", retryable=True)  # type: ignore[assignment]
    gone.active = False
    async with opened(small(ways, tmp_path), {first: [gone]}) as rig:
        await store(rig, 1)
        core = rig.engine.core
        gone.active = True
        assert await demote(rig)
        await rig.settle()
        assert core.decisions.entries(0) == 4
        assert core.decisions.entries(1) == 0
        gone.active = False
        demotes = await demote(rig)
        await rig.settle()
        assert core.decisions.entries(1) == len(demotes) > 0
        assert await loaded(rig, 1) == 64
        await rig.at_rest()
        assert rig.engine.stats().used[last] > 0


@pytest.mark.parametrize("ways", WAYS)
async def test_watermarks_empty_every_tier(ways: str, tmp_path: Path) -> None:
    count = len(ways.split("+"))
    marks = {"high": [0.6] * count, "low": [0.3] * count}
    async with opened(small(ways, tmp_path, **marks), tick=0.005) as rig:
        many = 14 if ways.startswith("nvme") else 6
        for seed in range(many):
            await store(rig, seed)
        core = rig.engine.core
        limit = core.decisions.capacity(0) * 0.6
        for _ in range(400):
            await rig.settle()
            if core.decisions.used(0) <= limit:
                break
            await asyncio.sleep(0.005)
        assert core.decisions.used(0) <= limit
        assert [await loaded(rig, seed) for seed in range(many)] == [64] * many
        await rig.at_rest()


@pytest.mark.parametrize("ways", WAYS)
async def test_a_tier_may_shrink_while_it_is_full(ways: str, tmp_path: Path) -> None:
    async with opened(small(ways, tmp_path)) as rig:
        for seed in range(2):
            await store(rig, seed)
        core = rig.engine.core
        await rig.settle()
        drops, demotes = core.decisions.set_capacity(0, 2 * FRAME, core.clock())
        core.free(drops)
        rig.engine.runtime.behind.demote(demotes)
        for _ in range(200):  # a chain is moved from its end on, as leaves become free
            await rig.settle()
            if core.decisions.used(0) <= 2 * FRAME:
                break
            drops, demotes = core.decisions.tick(core.clock())
            core.free(drops)
            rig.engine.runtime.behind.demote(demotes)
        assert core.decisions.used(0) <= 2 * FRAME
        assert [await loaded(rig, seed) for seed in range(2)] == [64, 64]
        await rig.at_rest()


async def test_parts_of_a_space_that_nobody_opened_yet_move_down(tmp_path: Path) -> None:
    chain = small("nvme+file", tmp_path)
    async with opened(chain) as rig:
        await store(rig, 1)
        await rig.engine.flush()
    async with opened(chain, space=None) as rig:
        core = rig.engine.core
        assert core.spaces == {}
        demotes = await demote(rig)
        await rig.settle()
        assert core.decisions.entries(1) == len(demotes) > 0
    async with opened(chain) as rig:
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


@pytest.mark.parametrize("ways", ["device+host", "device+nvme", "host+nvme", "nvme+file"])
async def test_closing_in_the_middle_of_a_copy_leaves_the_source(ways: str, tmp_path: Path) -> None:
    first, last = ways.split("+")
    # from a device the bytes land in host memory itself: no write to stop them at
    gate = Gated("read" if last == "host" else "write")
    where = first if last == "host" else last
    async with opened(small(ways, tmp_path), {where: [gate]}, close_timeout=0.05) as rig:
        await store(rig, 1)
        core = rig.engine.core
        demotes = await demote(rig)
        async with asyncio.timeout(30):
            await gate.arrived()
        state = core.decisions.state(demotes[0].part, core.clock())
        assert (state.tiers, state.pending) == ((0,), (1,))
        report = await rig.engine.aclose()
        assert report.unwritten == len(demotes)
        core.decisions.check()
        assert core.decisions.state(demotes[0].part, core.clock()).tiers == (0,)
        assert core.decisions.reserved(1) == 0
        assert core.staging.used == 0


async def test_a_promotion_evicts_nothing_hotter(tmp_path: Path) -> None:
    async with opened(small("device+nvme", tmp_path)) as rig:
        for seed in range(5):
            await store(rig, seed)
        await rig.settle()
        core, behind = rig.engine.core, rig.engine.runtime.behind
        before = {part for part, _, _ in core.decisions.parts(0)}
        cold = [p for p in await copied_to(rig, 1) if p.part not in before]
        assert cold
        free = core.decisions.capacity(0) - core.decisions.used(0)
        assert free < FRAME
        behind.promote(core.levels[1], cold, SPACE)
        await rig.settle()
        assert {part for part, _, _ in core.decisions.parts(0)} == before
        await rig.at_rest()


async def test_f060_a_full_queue_leaves_no_hole_in_a_chain(tmp_path: Path) -> None:
    gate = Gated("write")
    chain = tiers("host+nvme", tmp_path, ["4MiB", "8MiB"])
    async with opened(chain, {"nvme": [gate]}, write_queue=8 * FRAME) as rig:
        for seed in range(3):
            await store(rig, seed, blocks=6)
        gate.open_gate()
        await rig.settle()
        assert rig.engine.runtime.behind.dropped > 0
        core = rig.engine.core
        for seed in range(3):
            there = [
                1 in core.decisions.state(part, core.clock()).tiers
                for part in parts_of(kit.tokens(6, seed=seed))
            ]
            assert there == sorted(there, reverse=True)  # a beginning of the chain, no hole in it
        await rig.at_rest()


@pytest.mark.parametrize("ways", WAYS)
async def test_new_parts_are_copied_to_every_tier_that_wants_them(
    ways: str, tmp_path: Path
) -> None:
    """Write-through from any tier to any slower one; then the faster copies are clean."""
    count = len(ways.split("+"))
    chain = tiers(ways, tmp_path, ["2MiB"] * count)
    async with opened(chain) as rig:
        for seed in range(3):
            await store(rig, seed)
        await rig.settle()
        core = rig.engine.core
        for tier in range(count):
            assert len(await copied_to(rig, tier)) == 12
        drops, demotes = core.decisions.make_room(
            0, core.decisions.capacity(0), tenant="", now=core.clock()
        )
        core.free(drops)
        assert drops
        assert not demotes
        assert [await loaded(rig, seed) for seed in range(3)] == [64] * 3
        assert (await rig.engine.flush()).missing == (12 if ways == "device+host" else 0)
        await rig.at_rest()
