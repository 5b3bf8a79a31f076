"""Prefetch: engine-owned, bounded, never at the cost of hotter parts, and no use of its own."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv.testing.faults import Failing, Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(4)
KV = kit.Memory(SPACE.layout, 64, seed=1)
FRAME = 12 * 1024


async def test_what_was_prefetched_is_a_memory_hit(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await session.flush()
        for options in ({"session": "a"}, {"tokens": IDS}, {"session": "a", "tokens": IDS[:40]}):
            rig.cool()
            job = await rig.engine.prefetch(**options)
            assert await job.wait() == (2 if len(options) == 2 else 4)
            assert rig.engine.explain(IDS)[0].tier == "host"
        assert await (await rig.engine.prefetch(session="a")).wait() == 2  # the others are there
        reads = rig.calls("nvme", "read")
        async with rig.engine.session("b") as session:
            tokens, back = await load(session, IDS)
            assert tokens == 64
            assert back.same(KV, 64)
        assert rig.calls("nvme", "read") == reads
        await rig.at_rest()


async def test_a_prefetch_makes_and_changes_no_session(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a", salt=b"s") as session:
            await session.store(IDS, KV.view)
            await session.flush()
            rig.cool()
            assert await (await rig.engine.prefetch(session="nobody")).wait() == 0
            assert await (await rig.engine.prefetch(tokens=IDS)).wait() == 0  # another salt
            assert await (await rig.engine.prefetch(tokens=IDS, salt=b"s")).wait() == 4
            rig.cool()
            assert await (await rig.engine.prefetch(session="a")).wait() == 4
            assert session.token_ids == IDS
        assert [info.id for info in rig.engine.sessions()] == ["a"]
        await rig.at_rest()


async def test_p6_a_guess_evicts_nothing_hotter_and_reads_nothing_in_vain(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, capacity=4 * FRAME) as rig:
        cold, hot = await _cold_and_hot(rig)
        reads = rig.calls("nvme", "read")
        assert await (await rig.engine.prefetch(session="cold", guess=True)).wait() == 0
        assert rig.calls("nvme", "read") == reads
        assert rig.engine.explain(hot)[0].tier == "host"
        assert rig.engine.explain(cold)[0].tier == "nvme"
        await rig.at_rest()


async def test_a_request_that_is_there_pushes_out_what_was_used_before(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, capacity=4 * FRAME) as rig:
        cold, hot = await _cold_and_hot(rig)
        assert await (await rig.engine.prefetch(session="cold")).wait() == 4
        assert rig.engine.explain(cold)[0].tier == "host"
        assert rig.engine.explain(hot)[0].tier == "nvme"
        async with rig.engine.session("cold") as session, session.match(cold):
            # leased: not even a request that is there gets its room
            assert await (await rig.engine.prefetch(session="hot")).wait() == 0
        await rig.at_rest()


async def _cold_and_hot(rig: Rig) -> tuple[list[int], list[int]]:
    """Two sessions of which the host has room for the second one alone."""
    both = kit.tokens(4, seed=1), kit.tokens(4, seed=2)
    for name, ids in zip(("cold", "hot"), both, strict=True):
        async with rig.engine.session(name) as session:
            await session.store(ids, KV.view)
            await session.flush()
            assert (await load(session, ids))[0] == 64
    assert rig.engine.explain(both[0])[0].tier == "nvme"
    return both


@pytest.mark.every_loop
async def test_a_load_that_joins_a_prefetch_gets_its_bytes(tmp_path: Path) -> None:
    gate = Gated("read")
    async with running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await session.flush()
            rig.cool()
            job = await rig.engine.prefetch(session="a")
            await gate.arrived()
            loading = rig.engine.workers.spawn(load, session, IDS)
            await asyncio.sleep(0.01)
            gate.open_gate()
            tokens, back = await loading.wait()
            assert tokens == 64
            assert back.same(KV, 64)
            assert await job.wait() == 4
        assert rig.calls("nvme", "read") == 1
        await rig.at_rest()


async def test_f046_many_prefetches_end_and_give_everything_back(tmp_path: Path) -> None:
    count = int(10_000 * float(os.environ.get("TIERKV_SCALE", "0.05")))
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await session.flush()
        for number in range(count):
            if number % 10 == 0:
                await rig.settle()  # those of before hold leases
                rig.cool()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await (await rig.engine.prefetch(tokens=IDS)).wait()
            await asyncio.sleep(0)
        await rig.at_rest()
        rig.cool()
        assert await (await rig.engine.prefetch(session="a")).wait() == 4
        await rig.at_rest()


async def test_it_goes_wrong_quietly(tmp_path: Path) -> None:
    fault = Failing("read", times=1)
    async with running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await session.flush()
            rig.cool()
            assert await (await rig.engine.prefetch(session="a")).wait() == 0
            assert (await load(session, IDS))[0] == 0
        await rig.at_rest()


async def test_without_a_faster_tier_there_is_nothing_to_do(tmp_path: Path) -> None:
    tiers = kit.tiers("nvme", tmp_path)
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        async with engine.session("a") as session:
            await session.store(IDS, KV.view)
        assert await (await engine.prefetch(session="a")).wait() == 0
        await Rig(engine, {}).at_rest()


@pytest.mark.parametrize("kind", ["host", "host+nvme"])
async def test_predictors_without_a_slower_tier_are_told_to_do_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(kind, tmp_path, space=SPACE, prefetch="arrival"):
        pass
    assert ("no slower tier to fetch from" in caplog.text) is (kind == "host")
