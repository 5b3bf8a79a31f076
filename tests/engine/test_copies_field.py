"""Cases from the field about copies in the background: F045, F057, F058, F059, F077."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running, wrap
from tests.engine.ways import FRAME, SPACE, loaded, opened, store, tiers
from tierkv.decisions.types import EvictReason
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Failing, Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


class EveryThird(Failing):
    """Every third call fails."""

    def __init__(self) -> None:
        super().__init__("write")
        self.failed = 0

    def refuse(self, operation: str) -> Any:
        """The failure, or nothing."""
        if self.seen % 3:
            return None
        self.failed += 1
        return super().refuse(operation)


async def test_f045_a_write_that_fails_now_and_then_stops_nothing(tmp_path: Path) -> None:
    count = max(30, int(1000 * float(os.environ.get("TIERKV_SCALE", "0.05"))))
    fault = EveryThird()
    chain = tiers("host+nvme", tmp_path, ["16MiB", "64MiB"])
    async with opened(chain, {"nvme": [fault]}) as rig:
        core, behind = rig.engine.core, rig.engine.runtime.behind
        for seed in range(count):
            await store(rig, seed, blocks=1)
            await rig.settle()
        assert fault.failed >= count // 3 - 1
        assert behind.failed == fault.failed
        assert core.decisions.entries(1) == count - fault.failed
        labels = {"worker": "write-behind"}
        registry = rig.engine.metrics.registry
        assert registry.get_sample_value("tierkv_worker_restarts_total", labels) == 0
        labels = {"tier": "nvme", "direction": "write", "outcome": "failed"}
        assert registry.get_sample_value("tierkv_io_operations_total", labels) == fault.failed
        fault.active = False
        assert (await rig.engine.flush()).missing == 0  # what was left behind is made good
        assert core.decisions.entries(1) == count
        await rig.at_rest()


async def test_f058_few_buffers_and_many_stores_cost_room_never_bytes(tmp_path: Path) -> None:
    chain = [tierkv.Tier("host", 4 * FRAME), tierkv.Tier("nvme", "8MiB", path=str(tmp_path / "n"))]
    async with opened(chain, staging=4 * FRAME) as rig:

        async def put(seed: int) -> int:
            kv = kit.Memory(SPACE.layout, 32, seed)
            async with rig.engine.session(f"s{seed}") as session:
                result = await session.store(kit.tokens(2, seed=seed), kv.view)
                assert result.stored + result.skipped == 2
                return result.stored

        jobs = [rig.engine.workers.spawn(put, seed) for seed in range(64)]
        async with asyncio.timeout(60):
            stored = [await job.wait() for job in jobs]
        assert sum(stored) > 0
        await rig.settle()
        hits = [await loaded(rig, seed, blocks=2) for seed in range(64)]  # each is compared
        assert sum(hits) > 0
        await rig.at_rest()


async def test_f059_a_slow_tier_bounds_the_queue_and_stops_no_reader(tmp_path: Path) -> None:
    gate = Gated("write")
    chain = tiers("host+nvme", tmp_path, ["32MiB", "64MiB"])
    limit = 20 * FRAME
    async with opened(chain, write_queue=limit, faults={"nvme": [gate]}) as rig:
        behind = rig.engine.runtime.behind
        for seed in range(60):
            await store(rig, seed, blocks=2)
            assert behind.queued_bytes <= limit
            assert await loaded(rig, seed, blocks=2) == 32
        assert behind.dropped > 0
        gate.open_gate()
        await rig.at_rest()
        assert [await loaded(rig, seed, blocks=2) for seed in range(60)] == [32] * 60


async def test_f077_a_queue_that_does_not_move_shows_its_age(tmp_path: Path) -> None:
    clock, gate = VirtualClock(100.0), Gated("write")
    chain = tiers("host+nvme", tmp_path, ["4MiB", "8MiB"])
    async with opened(chain, {"nvme": [gate]}, clock=clock) as rig:
        behind = rig.engine.runtime.behind
        assert behind.oldest_seconds == 0.0
        await store(rig, 1)
        async with asyncio.timeout(30):
            await gate.arrived()
        clock.advance(5)
        assert behind.oldest_seconds == 5.0  # it is under way, and has not arrived
        await store(rig, 2)
        clock.advance(1.5)
        assert behind.oldest_seconds == 6.5
        gate.open_gate()
        await rig.settle()
        assert behind.oldest_seconds == 0.0
        await rig.at_rest()


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.stress
async def test_f057_memory_stays_flat_over_many_evictions(tmp_path: Path) -> None:
    """The last quarter of 100,000 puts with eviction and demotion takes no more than 2 %."""
    rounds = max(400, int(100_000 * float(os.environ.get("TIERKV_SCALE", "0.05"))) // 8)
    async with running("host+nvme", tmp_path, space=SPACE, capacity="2MiB", history=1000) as rig:
        for _ in range(2):
            await _churn(rig, rounds // 4, 0)
        before = await _settled_rss(rig)
        await _churn(rig, rounds // 4, rounds)
        between = await _settled_rss(rig)
        await _churn(rig, rounds // 4, 2 * rounds)
        after = await _settled_rss(rig)
        assert after <= max(between, before) * 1.02
        await rig.at_rest()


async def _settled_rss(rig: Rig) -> int:
    await rig.settle()
    gc.collect()
    return _rss()


async def _churn(rig: Rig, rounds: int, first: int) -> None:
    kv = kit.Memory(SPACE.layout, 128, 1)
    for number in range(first, first + rounds):
        async with rig.engine.session("one") as session:
            ids = kit.tokens(8, seed=number)
            await session.store(ids, kv.view)
            if number % 8 == 0:
                await load(session, ids)
            session.clear()


async def test_f046_the_budget_comes_back_from_every_cancel(tmp_path: Path) -> None:
    """Prefetches into a device, cancelled with their engine's jobs at any moment."""
    chain = tiers("device+nvme", tmp_path, [64 * FRAME, "8MiB"], write_through=[True, True])
    backends = wrap(chain)
    async with tierkv.open(
        tiers=chain, backends=list(backends.values()), space=SPACE, tick=60
    ) as engine:
        rig = Rig(engine, backends)
        await store(rig, 1)
        await rig.settle()
        core = engine.core
        ids = kit.tokens(4, seed=1)
        for turns in range(60):
            for part, generation, _ in reversed(list(core.decisions.parts(0))):
                core.free(
                    core.decisions.dropped([(part, generation)], 0, EvictReason.CAPACITY, 0.0)
                )
            await engine.prefetch(tokens=ids)
            for _ in range(turns % 12 + 1):
                await asyncio.sleep(0)
            for task in asyncio.all_tasks():
                if task.get_name() == "prefetch":
                    task.cancel()  # a stray one, straight into the job
            await rig.settle()
            assert core.staging.used == 0
            assert core.decisions.reserved(0) == 0
            assert core.decisions.leases() == 0
            assert all(turn.waiting == 0 for turn in engine.runtime.behind.turns)
        await rig.at_rest()
        await (await engine.prefetch(tokens=ids)).wait()
        assert core.decisions.entries(0) == 4
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


async def test_p3_a_flush_does_not_wait_for_a_tier_that_hangs(tmp_path: Path) -> None:
    gate = Gated("write")
    chain = tiers("host+nvme", tmp_path, ["4MiB", "8MiB"])
    async with opened(chain, {"nvme": [gate]}, tier_timeout="50ms", tick=0.02) as rig:
        await store(rig, 1)
        async with asyncio.timeout(60):
            flushed = await rig.engine.flush()
        assert (flushed.durable, flushed.missing) == (0, 4)
        gate.open_gate()
        await rig.settle()
        async with asyncio.timeout(60):
            flushed = await rig.engine.flush()
            while flushed.missing:
                await asyncio.sleep(0.02)  # until a probe has found it alive
                flushed = await rig.engine.flush()
        assert flushed.durable == 4
        await rig.at_rest()
