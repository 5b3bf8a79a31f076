"""Stores of several batches: they overlap, come in order, and hold nothing when cut short."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import load, running, usable
from tierkv import views
from tierkv.decisions.types import SkipReason
from tierkv.layout import Layout, Space
from tierkv.registry import resolve
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Failing, Gated
from tierkv.testing.virtual import Throttled, VirtualDevice, run_virtual

if TYPE_CHECKING:
    from pathlib import Path

_TOKEN_BYTES = 2048
_MB = 1_000_000.0


def _virtual_space() -> Space:
    layout = Layout.uniform(4, 2, 64, "float16")  # 2 KiB a token
    return Space(tierkv.Identity("v", "1"), layout, block_tokens=64)


async def _ratio(tokens: int, device_rate: float | None, medium_rate: float | None) -> float:
    """Time of a store on virtual time, over that of stages that overlap block by block."""
    total = tokens * _TOKEN_BYTES
    tier = tierkv.Tier("host", 2 * total)
    backend = resolve("backends", "host")(tier)
    slow = Throttled(backend, medium_rate) if medium_rate else None
    loop = asyncio.get_running_loop()
    kv = [(torch.zeros(2, tokens, 64, dtype=torch.float16),) * 2 for _ in range(4)]
    async with tierkv.open(
        tiers=[tier], space=_virtual_space(), backends=[slow or backend], tick=1e6, clock=loop.time
    ) as engine:
        stages = []
        if device_rate is not None:
            engine.core.devices.add(VirtualDevice(device_rate))
            stages.append(total / device_rate)
        async with engine.session("a") as session:
            start = loop.time()
            result = await session.store(range(tokens), views.dense(kv))
            took = loop.time() - start
        assert result.stored == tokens // 64
        if slow is not None:
            stages.append(slow.busy_s)
    ideal = max(stages) + (sum(stages) - max(stages)) / (tokens // 64)
    return took / ideal


@pytest.mark.parametrize(
    ("device_rate", "medium_rate"),
    [(50 * _MB, 50 * _MB), (100 * _MB, 50 * _MB), (50 * _MB, 100 * _MB), (None, 50 * _MB)],
)
def test_a_store_takes_little_longer_than_its_slowest_stage(
    device_rate: float | None, medium_rate: float
) -> None:
    for tokens in (8192, 16384):
        assert run_virtual(_ratio(tokens, device_rate, medium_rate)) <= 1.10


# ------------------------------------------------------------------------- counters


@pytest.mark.anyio
async def test_one_byte_is_copied_for_each_byte_stored() -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    tiers = [tierkv.Tier("host", "4MiB")]
    async with (
        tierkv.open(tiers=tiers, space=space, tick=60) as engine,
        engine.session("a") as session,
    ):
        before = engine.stats()
        assert (await session.store(ids, kv.view)).stored == 4
        nbytes = 4 * space.layout.groups[0].raw_bytes(16)
        assert engine.core.bytes_gathered == nbytes
        assert (await session.store(ids, kv.view)).present == 4
        assert engine.core.bytes_gathered == nbytes
        after = engine.stats()
        assert after.thread_hops == before.thread_hops
        assert after.tasks_spawned == before.tasks_spawned
        assert after.staging_used == 0


@pytest.mark.anyio
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_f018_a_partial_block_is_matched_only_as_it_was_declared(
    kinds: str, tmp_path: Path
) -> None:
    space = kit.space()
    ids = kit.tokens(6)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    size = 16
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as a, rig.engine.session("b") as b:
            await a.store(ids[: 5 * size + 8], kv.view)  # 5.5 blocks, no tail asked for
            for tokens in (5 * size + 3, 5 * size + 8, 5 * size + 14):
                assert (await load(a, ids[:tokens]))[0] == 5 * size
            await a.store(ids[: 5 * size + 8], kv.view, tail=True)
            for session, tokens, expected in (
                (a, 5 * size + 3, 5 * size),  # less than the tail
                (a, 5 * size + 8, 5 * size + 8),  # exactly the tail
                (b, 5 * size + 8, 5 * size),  # it is private
            ):
                loaded, back = await load(session, ids[:tokens])
                assert loaded == expected
                assert back.untouched(expected)
        await rig.at_rest()


# ------------------------------------------------------------------------- cut short


def _wide(blocks: int, seed: int = 3) -> tuple[Space, list[int], kit.Memory]:
    """KV that travels in batches of a block: 1 MiB each."""
    layout = Layout.uniform(2, 8, 512, "float32")
    space = Space(tierkv.Identity("wide", "rev1"), layout, block_tokens=16)
    return space, kit.tokens(blocks, seed=seed), kit.Memory(layout, 16 * blocks, seed=seed)


@pytest.mark.anyio
@pytest.mark.parametrize("times", [1, 2, None])
async def test_a_failing_medium_leaves_a_prefix_and_the_next_tier_takes_the_rest(
    times: int | None, tmp_path: Path
) -> None:
    """Later batches are written already when an earlier one fails: they must not appear alone."""
    space, ids, kv = _wide(8)
    fault = Failing("write", times=times)
    options = {"write_through": False}
    async with running(
        "nvme+file", tmp_path, space=space, options=options, faults={"nvme": [fault]}
    ) as rig:
        async with rig.engine.session("a") as session:
            result = await session.store(ids, kv.view)
            assert result.stored == 8
            tiers = [b.tier for b in result.blocks]
            assert tiers[0] == "file"
            assert times is None or "nvme" in tiers
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.anyio
async def test_a_batch_that_is_written_first_appears_after_its_parents(tmp_path: Path) -> None:
    space, ids, kv = _wide(5)
    gate = Gated("write", times=1)
    async with running("nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        decisions = rig.engine.core.decisions
        async with rig.engine.session("a") as session, anyio.create_task_group() as group:
            group.start_soon(session.store, ids, kv.view)
            await gate.arrived()
            inner = rig.backends["nvme"].inner
            async with asyncio.timeout(60):
                while not inner.stats().entries:  # noqa: ASYNC110 - until a later batch is there
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            assert decisions.entries(0) == 0
            gate.open_gate()
        async with rig.engine.session("b") as reader:
            tokens, back = await load(reader, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_two_stores_share_a_staging_window_that_is_too_small_for_both(
    tmp_path: Path,
) -> None:
    """Neither waits for memory while it keeps some that nobody is going to write."""
    space, ids, kv = _wide(8)
    other, other_kv = kit.tokens(8, seed=5), kit.Memory(space.layout, 128, seed=5)
    async with running("nvme", tmp_path, space=space, staging="3MiB") as rig:  # two frames
        rig.engine.core.devices.add(SimDevice("sim:3"))

        async def store(name: str, tokens: list[int], memory: kit.Memory) -> None:
            async with rig.engine.session(name) as session:
                assert (await session.store(tokens, memory.view)).stored == 8

        async with asyncio.timeout(30), anyio.create_task_group() as group:
            group.start_soon(store, "a", ids, kv)
            group.start_soon(store, "b", other, other_kv)
        for tokens, memory in ((ids, kv), (other, other_kv)):
            async with rig.engine.session("reader") as session:
                loaded, back = await load(session, tokens)
            assert loaded == len(tokens)
            assert back.same(memory, loaded)
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_cancelled_while_batches_are_written(tmp_path: Path) -> None:
    """What is being written goes on and appears in order; nothing else stays."""
    space, ids, kv = _wide(8)
    gate = Gated("write")
    async with running("nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        with anyio.CancelScope() as scope:
            async with rig.engine.session("a") as session, anyio.create_task_group() as group:
                group.start_soon(session.store, ids, kv.view)
                await gate.arrived()
                await asyncio.sleep(0.01)
                scope.cancel()
        gate.open_gate()
        await rig.at_rest()
        async with rig.engine.session("b") as reader:
            tokens, back = await load(reader, ids)
        assert 0 < tokens < len(ids)
        assert tokens % 16 == 0
        assert back.same(kv, tokens)
        await usable(rig, space)


@pytest.mark.anyio
@pytest.mark.parametrize("device", [False, pytest.param(True, marks=pytest.mark.every_loop)])
async def test_cancelled_at_each_step_of_several_batches(device: bool, tmp_path: Path) -> None:
    space, _, _ = _wide(5)
    seed = 0
    async with running("nvme", tmp_path, space=space, staging="32MiB") as rig:
        if device:
            rig.engine.core.devices.add(SimDevice("sim:8"))

        async def store() -> int:
            nonlocal seed
            seed += 1
            _, ids, kv = _wide(5, seed)
            async with rig.engine.session(f"s{seed}") as session:
                return (await session.store(ids, kv.view)).stored

        async for run in cancel_at_each_step(store):
            await rig.at_rest()
            _, ids, kv = _wide(5, seed)
            async with rig.engine.session("reader") as reader:
                tokens, back = await load(reader, ids)
            assert back.same(kv, tokens)
            assert run.outcome != "completed" or (run.value == 5 and tokens == len(ids))


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_a_cancelled_store_ends_only_when_the_device_reads_its_memory_no_more(
    tmp_path: Path,
) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("host", tmp_path, space=space) as rig:
        device = SimDevice("sim:2")
        rig.engine.core.devices.add(device)
        busy = threading.Event()
        device.compute.submit(lambda: bool(busy.wait(60)))
        async with rig.engine.session("a") as session:
            scope = anyio.CancelScope()
            task = rig.engine.workers.spawn(_cancelled_store, scope, session, ids, kv)
            await kit.until(lambda: device.counters.stored_bytes)  # submitted, and not yet run
            scope.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            assert rig.engine.core.decisions.reserved(0) > 0
            busy.set()
            assert await task.wait() == "cancelled"
            assert rig.engine.core.decisions.reserved(0) == 0
        await rig.at_rest()
        assert device.counters.hazards == 0


async def _cancelled_store(
    scope: anyio.CancelScope, session: tierkv.Session, ids: list[int], kv: kit.Memory
) -> str:
    with scope:
        await session.store(ids, kv.view)
    return "cancelled" if scope.cancelled_caught else "stored"


@pytest.mark.anyio
async def test_a_session_quota_counts_batches_that_are_still_under_way(tmp_path: Path) -> None:
    space, ids, kv = _wide(8)
    tenants = {"t": {"session_quota": "4MiB"}}
    async with running("nvme", tmp_path, space=space, tenants=tenants) as rig:
        async with rig.engine.session("a", tenant="t") as session:
            result = await session.store(ids, kv.view)
            assert rig.engine.sessions()[0].nbytes <= 4 << 20
            assert 0 < result.stored < 8
            reasons = {b.reason for b in result.blocks if b.state == "skipped"}
            assert reasons <= {SkipReason.SESSION_QUOTA, SkipReason.NO_PARENT}
        await rig.at_rest()
