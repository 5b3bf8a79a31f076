"""Loads that share reads with others: nobody waits for ever, and nobody gets less for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv.decisions.types import MissReason, SkipReason
from tierkv.errors import ClosedError, LoadIncomplete
from tierkv.mover.fetch import Wanted
from tierkv.testing.faults import Gated
from tierkv.workers import Signal

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.layout import Space

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
FRAME = 12 * 1024


async def _stored(rig: Rig, space: Space, prompts: list[list[int]]) -> kit.Memory:
    kv = kit.Memory(space.layout, max(map(len, prompts)), seed=1)
    for number, ids in enumerate(prompts):
        async with rig.engine.session(f"writer-{number}") as session:
            assert (await session.store(ids, kv.view)).skipped == 0
    return kv


@pytest.mark.parametrize("layout", ["full", "sliding", "state"])
async def test_no_circle_of_loads_that_hold_shared_frames_and_wait_for_more(
    layout: str, tmp_path: Path
) -> None:
    """Four documents fill the staging memory, and each has a second reader who wants more."""
    space = kit.space(layout)
    documents = [kit.tokens(4, seed=n) for n in range(4)]
    longer = [ids[:48] + kit.tokens(1, seed=50 + n) for n, ids in enumerate(documents)]
    gate = Gated("read")
    parts = 4 * len(space.layout.groups)
    settings: dict[str, Any] = {"staging": 4 * parts * FRAME, "faults": {"nvme": [gate]}}
    async with running("nvme", tmp_path, space=space, **settings) as rig:
        kv = await _stored(rig, space, documents + longer)

        async def one(name: str, ids: list[int]) -> None:
            async with rig.engine.session(name) as session:
                tokens, back = await load(session, ids)
                assert tokens == 64
                assert back.same(kv, 64)

        async with asyncio.timeout(60), anyio.create_task_group() as group:
            for number, ids in enumerate(documents):
                group.start_soon(one, f"first-{number}", ids)
            await gate.arrived(4)
            for number, ids in enumerate(longer):
                group.start_soon(one, f"second-{number}", ids)
            await asyncio.sleep(0.05)
            gate.open_gate()
        await rig.at_rest()


async def test_parts_of_one_block_that_several_others_read_are_read_once_more(
    tmp_path: Path,
) -> None:
    """To wait for both would be to hold what the one brought while the other has no memory."""
    space = kit.space("sliding")
    ids = kit.tokens(2)
    gate = Gated("read")
    async with running("nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        kv = await _stored(rig, space, [ids])
        async with rig.engine.session("a") as session:
            async with session.match(ids) as match:
                first = [p for p in match._found.parts if p.block == 0]
                assert len(first) == 2
                root, fetcher = session.state.root, rig.engine.runtime.fetcher
                others = [
                    flight
                    for part in first
                    for flight in fetcher.join([Wanted(part, space, root, None)])
                ]
                assert others[0].number != others[1].number
            job = rig.engine.workers.spawn(load, session, ids)
            await gate.arrived(3)
            assert [flight.users for flight in others] == [1, 1]
            assert rig.engine.stats().in_flight == 6  # two of them apart
            gate.open_gate()
            tokens, back = await job.wait()
            assert tokens == 32
            assert back.same(kv, 32)
        for flight in others:
            flight.leave()
        await rig.at_rest()
        assert rig.engine.stats().in_flight == 0


async def test_what_a_prefetch_does_not_read_is_read_for_whoever_comes_meanwhile(
    tmp_path: Path,
) -> None:
    """A prefetch takes what finds room in RAM; a load that comes then wants all of it."""
    space = kit.space()
    ids, hot = kit.tokens(4), kit.tokens(2, seed=9)
    gate = Gated("read")
    gate.open_gate()
    async with running(
        "host+nvme", tmp_path, space=space, capacity=4 * FRAME, faults={"nvme": [gate]}
    ) as rig:
        kv = await _stored(rig, space, [ids, hot])
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
        rig.cool()
        async with rig.engine.session("b") as session:
            await session.store(hot, kv.view)
            await session.flush()
            tokens, _ = await load(session, hot)
            assert tokens == 32
            assert rig.engine.explain(hot)[0].tier == "host"
            async with session.match(hot):  # what is leased stays: there is room for half of it
                gate.close_gate()
                seen = gate.seen
                job = await rig.engine.prefetch(tokens=ids)
                await gate.arrived(seen + 1)
                async with rig.engine.session("c") as other:
                    loading = rig.engine.workers.spawn(load, other, ids)
                    await asyncio.sleep(0.01)
                    gate.open_gate()
                    tokens, back = await loading.wait()
                assert 0 < await job.wait() < 4
        assert tokens == 64
        assert back.same(kv, 64)
        await rig.at_rest()


async def test_the_engine_closes_over_loads_that_share(tmp_path: Path) -> None:
    gate = Gated("read")
    space, ids = kit.space(), kit.tokens(4)
    async with running("nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        await _stored(rig, space, [ids])
        jobs = []
        for number in range(3):
            session = await rig.engine.session(f"r{number}").__aenter__()
            jobs.append(rig.engine.workers.spawn(load, session, ids))
        await gate.arrived(1)
        async with asyncio.timeout(60):
            await rig.engine.aclose()
            for job in jobs:
                with pytest.raises(ClosedError):
                    await job.wait()


async def test_p3_loads_and_stores_do_not_wait_for_memory_that_another_tier_holds(
    tmp_path: Path,
) -> None:
    space, ids = kit.space(), kit.tokens(4)
    async with running("nvme+file", tmp_path, space=space) as rig:
        kv = await _stored(rig, space, [ids])
        core = rig.engine.core
        await rig.settle()
        core.staging.patience = 0.01
        held = core.staging.acquire_nowait(core.staging.limit)
        assert held is not None
        core.levels[1].stalled.set()  # as if reads of the second tier held all of it
        async with rig.engine.session("a") as session, asyncio.timeout(60):
            async with session.match(ids) as match:
                loaded = await match.load(into=kit.Memory(space.layout, 64).view)
            assert (loaded.tokens, loaded.reason) == (0, MissReason.FAILED)
            async with session.match(ids) as match:
                with pytest.raises(LoadIncomplete, match="staging"):
                    async for _ in match.layers(into=kit.Memory(space.layout, 64).view):
                        pass
            stored = await session.store(kit.tokens(4, seed=5), kv.view)
            reasons = [block.reason for block in stored.blocks]
            assert reasons == [SkipReason.BACKPRESSURE] * 4
        held.release()
        core.levels[1].stalled = Signal()
        async with rig.engine.session("a") as session:
            assert (await load(session, ids))[0] == 64
        await rig.at_rest()
