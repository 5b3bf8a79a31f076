"""Threads by lane: what hangs in one holds up nobody in another, and is not the last thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tierkv.workers import Lane, Workers, current_lane
from tierkv.workers.pools import Pool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.every_loop,
    pytest.mark.usefixtures("no_thread_leaks", "no_task_leaks"),
]


async def test_p5_each_lane_has_threads_of_its_own() -> None:
    """Whatever hangs in the background, what is waited for finds a thread; jobs hand it on."""
    workers = Workers(threads=2)
    await workers.start()
    gate = threading.Event()
    taken: list[str] = []
    arrived = threading.Semaphore(0)

    def hang() -> Lane:
        taken.append(threading.current_thread().name)
        arrived.release()
        gate.wait()
        return current_lane()

    async def backend_call() -> Lane:
        return await workers.run(hang)

    async def nested() -> Lane:
        return await workers.spawn(backend_call).wait()  # a job of a job, as a fetch of a prefetch

    jobs = [workers.spawn(nested, lane=Lane.BACKGROUND) for _ in range(6)]
    jobs += [workers.spawn(backend_call, lane=Lane.PREFETCH) for _ in range(6)]
    async with asyncio.timeout(30):
        for _ in range(2):  # one thread each is all that they have
            await workers.run(arrived.acquire)
        for _ in range(5):
            assert await workers.run(current_lane) is Lane.DEMAND
    gate.set()
    lanes = [await job.wait() for job in jobs]
    assert lanes == [Lane.BACKGROUND] * 6 + [Lane.PREFETCH] * 6
    assert not any("demand" in name for name in taken)
    assert current_lane() is Lane.DEMAND  # a job's lane is its own
    await workers.aclose()


async def test_p3_threads_that_all_hang_are_not_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierkv.workers.runner._STUCK_S", 0.02)
    workers = Workers(threads=2)
    await workers.start()
    gate = threading.Event()

    async def hang() -> bool:
        return await workers.run(gate.wait)

    hanging = [workers.spawn(hang) for _ in range(2)]
    async with asyncio.timeout(30):
        assert [await workers.run(abs, -n) for n in range(3)] == [0, 1, 2]
    gate.set()
    assert [await job.wait() for job in hanging] == [True, True]
    assert await workers.run(abs, -7) == 7
    await workers.aclose()


async def test_a_pool_grows_only_when_every_thread_is_stuck() -> None:
    pool = Pool(1, "test", 2)
    gate = threading.Event()
    assert not pool.relieve(0.0), "no thread is busy"
    here = threading.Barrier(2, timeout=60)

    def hang() -> bool:
        here.wait()
        return gate.wait()

    first = pool.start(hang)
    here.wait()
    assert not pool.relieve(60.0), "it has only just begun"
    assert pool.relieve(0.0)
    second = pool.start(hang)
    here.wait()
    assert not pool.relieve(0.0), "there is a limit"
    gate.set()
    assert first.result()
    assert second.result()
    pool.shutdown()
