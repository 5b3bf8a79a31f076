"""What a load or store costs: backend calls, worker hops, jobs; each read is made once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, load, running
from tierkv.decisions.types import SkipReason
from tierkv.errors import SessionBusyError
from tierkv.layout import Layout, Space
from tierkv.session.batches import StoreRequest
from tierkv.testing.faults import Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
BIG = Layout.uniform(2, 8, 64, "float32")  # 128 KiB a block of 16 tokens


def _big_space() -> Space:
    return Space(tierkv.Identity("big", "rev1"), BIG, block_tokens=16)


@pytest.mark.every_loop
async def test_a_small_ram_batch_schedules_nothing() -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    host = [tierkv.Tier("host", "4MiB")]
    async with tierkv.open(tiers=host, space=space, tick=60) as engine, engine.session("a") as a:
        before = engine.stats()
        await a.store(ids, kv.view)
        tokens, _ = await load(a, ids)
        after = engine.stats()
        assert tokens == len(ids)
        assert after.thread_hops == before.thread_hops
        assert after.tasks_spawned == before.tasks_spawned
        assert after.bytes_copied - before.bytes_copied >= 4 * 16 * 3 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("blocks", [8, 64])
async def test_a_larger_ram_batch_takes_one_hop(blocks: int) -> None:
    space = _big_space()
    ids = kit.tokens(blocks)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    host = [tierkv.Tier("host", "64MiB")]
    async with tierkv.open(tiers=host, space=space, tick=60) as engine, engine.session("a") as a:
        before = engine.stats()
        await a.store(ids, kv.view)
        stored = engine.stats()
        assert stored.thread_hops - before.thread_hops == 1
        tokens, back = await load(a, ids)
        loaded = engine.stats()
        assert tokens == len(ids)
        assert back.same(kv, tokens)
        assert loaded.thread_hops - stored.thread_hops == 1
        assert loaded.tasks_spawned == before.tasks_spawned


async def test_a_cold_load_is_one_backend_call(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(8)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("host+nvme", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            calls = rig.calls("nvme", "read")
            jobs = rig.engine.stats().tasks_spawned
            assert (await load(session, ids))[0] == len(ids)
            assert rig.calls("nvme", "read") == calls + 1
            assert rig.backends["nvme"].calls[-1] == ("read", 8)
            assert rig.engine.stats().tasks_spawned == jobs + 1
            assert (await load(session, ids))[0] == len(ids)  # promoted
            assert rig.calls("nvme", "read") == calls + 1
        await rig.at_rest()


async def test_layers_are_at_most_one_backend_call_each(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(8)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("nvme", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            back = kit.Memory(space.layout, len(ids))
            async with session.match(ids) as match:
                layers = match.layers(into=back.view)
                seen = [layer async for layer in layers]
            assert seen == [0, 1, 2]
            assert layers.by_tier == {"nvme": len(ids)}
            assert rig.calls("nvme", "read") == 3
            assert back.same(kv, len(ids))
        await rig.at_rest()


async def test_layers_larger_than_all_staging_memory_still_come(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(24)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("nvme", tmp_path, space=space, staging="64KiB") as rig:
        async with rig.engine.session("a") as session:
            assert (await session.store(ids, kv.view)).stored == 24
            back = kit.Memory(space.layout, len(ids))
            async with asyncio.timeout(30), session.match(ids) as match:
                assert [x async for x in match.layers(into=back.view)] == [0, 1, 2]
            assert back.same(kv, len(ids))
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_many_take_one_hop_and_one_backend_call(kinds: str, tmp_path: Path) -> None:
    space = _big_space()
    count, blocks = 4, 4
    prompts = [kit.tokens(blocks, seed=i) for i in range(count)]
    kvs = [kit.Memory(space.layout, len(prompts[i]), seed=i) for i in range(count)]
    backs = [kit.Memory(space.layout, len(ids)) for ids in prompts]
    async with running(kinds, tmp_path, space=space, capacity="64MiB", tick=60) as rig:
        engine = rig.engine
        sessions = [engine.session(f"s{i}") for i in range(count)]
        for session in sessions:
            await session.__aenter__()
        before = engine.stats().thread_hops
        results = await engine.store_many(
            [
                StoreRequest(session, ids, kv.view)
                for session, ids, kv in zip(sessions, prompts, kvs, strict=True)
            ]
        )
        assert [r.stored for r in results] == [blocks] * count
        if kinds == "nvme":
            assert rig.calls("nvme", "write") == 1
        if kinds == "host":
            assert engine.stats().thread_hops == before + 1
        await engine.flush()
        rig.cool()
        reads = rig.calls("nvme", "read") if "nvme" in kinds else 0
        pairs = list(zip(sessions, prompts, strict=True))
        async with engine.match_many(pairs) as matches:
            assert [m.tokens for m in matches] == [16 * blocks] * count
            loaded = await engine.load_many(
                [(m, back.view) for m, back in zip(matches, backs, strict=True)]
            )
        assert [r.tokens for r in loaded] == [16 * blocks] * count
        assert all(b.same(kv, 16 * blocks) for b, kv in zip(backs, kvs, strict=True))
        if kinds in ("nvme", "host+nvme"):  # else they come out of memory
            assert rig.calls("nvme", "read") == reads + 1
        for session in sessions:
            await session.__aexit__(None, None, None)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_session_cannot_wait_for_itself_in_a_batch() -> None:
    space = kit.space()
    ids = kit.tokens(1)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    host = [tierkv.Tier("host", "4MiB")]
    async with (
        tierkv.open(tiers=host, space=space) as engine,
        engine.session("a") as one,
        engine.session("a") as two,
    ):
        with pytest.raises(SessionBusyError, match="twice"):
            await engine.store_many([StoreRequest(s, ids, kv.view) for s in (one, two)])
        batch = engine.match_many([(one, ids), (two, ids)])
        with pytest.raises(SessionBusyError, match="twice"):
            await batch.__aenter__()
        async with asyncio.timeout(30), one.match(ids):
            pass


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_f054_fifty_loads_of_a_cold_prefix_are_one_read(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(8)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("read")
    async with running(kinds, tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("writer") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
        good = 0

        async def reader(number: int) -> None:
            nonlocal good
            async with rig.engine.session(f"r{number}") as mine:
                tokens, back = await load(mine, ids)
                good += tokens == len(ids) and back.same(kv, tokens)

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(reader, number)
            await gate.arrived()
            gate.open_gate()
        assert good == 50
        assert rig.calls("nvme", "read") == 1
        await rig.at_rest()


@pytest.mark.every_loop
async def test_the_leader_of_a_flight_may_go_away(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(8)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("read")
    async with running("nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as a, rig.engine.session("b") as b:
            await a.store(ids, kv.view)
            spawn = rig.engine.workers.spawn
            follower: tierkv.workers.Job[tuple[int, kit.Memory]] | None = None
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(load, a, ids)
                    await gate.arrived()
                    follower = spawn(load, b, ids)
                    await anyio.wait_all_tasks_blocked()  # it has joined
                    scope.cancel()
            gate.open_gate()
            assert follower is not None
            tokens, back = await follower.wait()
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            assert rig.calls("nvme", "read") == 1
        await rig.at_rest()


@pytest.mark.parametrize("kinds", kit.on_every_loop(COMBINATIONS, "nvme"))
async def test_two_sessions_store_the_same_blocks_at_once(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(6)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("write")
    async with running(kinds, tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        results = []

        async def store(name: str) -> None:
            async with rig.engine.session(name) as session:
                results.append(await session.store(ids, kv.view))

        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(store, name)
            if kinds == "nvme":
                await gate.arrived()
                await asyncio.sleep(0.01)
            gate.open_gate()
        assert sum(r.stored for r in results) == 6
        assert sum(r.present for r in results) == 12
        assert sum(r.skipped for r in results) == 0
        await rig.at_rest()


@pytest.mark.every_loop
async def test_f021_a_store_during_the_promotion_of_the_same_block(tmp_path: Path) -> None:
    """The block is there: it is present, whatever is on its way to the memory tier."""
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("read")
    async with running("host+nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as a, rig.engine.session("b") as b:
            await a.store(ids, kv.view)
            await a.flush()
            rig.cool()
            job = rig.engine.workers.spawn(load, a, ids)
            await gate.arrived()
            async with asyncio.timeout(30):
                result = await b.store(ids, kv.view)
            assert result.present == 4
            gate.open_gate()
            tokens, back = await job.wait()
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_f059_the_write_queue_is_bounded_and_drops_the_tail(tmp_path: Path) -> None:
    space = kit.space()
    gate = Gated("write")
    async with (
        running(
            "host+nvme", tmp_path, space=space, faults={"nvme": [gate]}, write_queue="100KiB"
        ) as rig,
        rig.engine.session("a") as session,
    ):
        for seed in range(6):
            ids = kit.tokens(6, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            assert (await session.store(ids, kv.view)).stored == 6
            assert rig.engine.stats().queued_bytes <= 100 * 1024
            tokens, back = await load(session, ids)
            assert back.same(kv, tokens)
        behind = rig.engine.runtime.behind
        assert behind.dropped > 0
        labels = {"tier": "nvme", "reason": SkipReason.BACKPRESSURE.value}
        counted = rig.engine.metrics.registry.get_sample_value("tierkv_store_skipped_total", labels)
        assert counted == behind.dropped
        gate.open_gate()
        await rig.at_rest()
        # what was not taken is made good by a flush
        assert (await rig.engine.flush()).missing == 0
