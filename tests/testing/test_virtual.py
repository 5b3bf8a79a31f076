"""Virtual time: exact, the same in every run, and over at once."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from tierkv.abc import OK, Move
from tierkv.device import fold, fold_digests
from tierkv.errors import ClosedError
from tierkv.testing.backend_references import DictBackend
from tierkv.testing.bench import Bench, contents, part
from tierkv.testing.virtual import Throttled, VirtualDevice, VirtualStream, run_virtual
from tierkv.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_jumps_from_timer_to_timer() -> None:
    async def sleeper(seconds: float, seen: list[float]) -> None:
        await asyncio.sleep(seconds)
        seen.append(now())

    async def main() -> list[float]:
        seen: list[float] = []
        async with asyncio.TaskGroup() as group:
            for seconds in (3600.0, 0.25, 86400.0 * 30):
                group.create_task(sleeper(seconds, seen))
        return seen

    before = time.monotonic()
    assert run_virtual(main()) == [0.25, 3600.0, 86400.0 * 30]
    assert time.monotonic() - before < 60


def test_timeouts_count_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(6)
        return now()

    assert run_virtual(main()) == 5


def test_work_for_threads_is_done_at_once_and_takes_no_time() -> None:
    async def main() -> tuple[object, ...]:
        workers = Workers()
        await workers.start()
        here = await workers.run(threading.get_ident)
        there = await asyncio.get_running_loop().run_in_executor(None, threading.get_ident)
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        await workers.aclose()
        with pytest.raises(ClosedError):
            await workers.run(int)
        return here, there, now()

    mine = threading.get_ident()
    assert run_virtual(main()) == (mine, mine, 0)
    with ThreadPoolExecutor(1) as pool:  # outside of it all is as before
        assert pool.submit(threading.get_ident).result() != mine


def test_what_can_never_happen_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.testing.virtual._GUARD_S", 0.01)

    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="can never happen"):
        run_virtual(main())


def test_a_real_thread_is_waited_for_while_no_timer_runs() -> None:
    async def main() -> int:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(came.set))
        thread.start()
        await came.wait()
        thread.join()
        return 7

    assert run_virtual(main()) == 7


def test_a_transfer_takes_latency_and_bytes(tmp_path: Path) -> None:
    parts = [part(i, 100_000) for i in range(4)]

    async def main(duplex: bool) -> tuple[float, float]:
        inner = DictBackend(tmp_path / str(duplex), 1 << 20)
        slow = Throttled(inner, bandwidth=1e6, latency=0.5, duplex=duplex)
        workers = Workers()
        await workers.start()
        await slow.open(workers)
        bench = Bench(slow, workers, [])
        assert await bench.write(*parts[:2]) == [OK, OK]
        assert now() == pytest.approx(0.7)
        async with asyncio.TaskGroup() as group:  # one after the other, unless it is duplex
            seen = [group.create_task(bench.read(p)) for p in parts[:2]]
            group.create_task(bench.write(*parts[2:]))
        assert [task.result() for task in seen] == [[contents(p)] for p in parts[:2]]
        assert slow.stats().entries == 4
        assert (slow.charge(5), slow.longest(4096)) == (inner.charge(5), inner.longest(4096))
        await slow.aclose()
        await workers.aclose()
        return now(), slow.busy_s

    (tmp_path / "True").mkdir()
    (tmp_path / "False").mkdir()
    assert run_virtual(main(duplex=False)) == pytest.approx((0.7 + 2 * 0.6 + 0.7, 2.6))
    assert run_virtual(main(duplex=True)) == pytest.approx((0.7 + 2 * 0.6, 2.6))


def _run(main: Callable[[VirtualDevice], object]) -> object:
    async def inside() -> object:
        device = VirtualDevice(bandwidth=1000, latency=0.25, fold_bandwidth=100)
        return await main(device)  # type: ignore[misc]

    return run_virtual(inside())


def test_copies_of_a_device_take_time_and_happen_at_its_end() -> None:
    async def main(device: VirtualDevice) -> None:
        data, out = torch.ones(500).byte(), torch.zeros(500).byte()
        device.compute.submit(2.0, lambda: data.fill_(7))
        device.stores.wait(device.current().record())
        device.copy([Move(out, data)], device.stores)
        event = device.stores.record()
        data.fill_(1)
        await asyncio.sleep(2.5)
        assert not event.query()
        assert not out.any()
        await device.wait(event)
        assert now() == pytest.approx(2.75)
        assert out.eq(7).all()
        await device.wait(event)
        assert now() == pytest.approx(2.75)
        assert isinstance(device.stores, VirtualStream)
        assert device.stores.busy_s == pytest.approx(0.75)

    _run(main)


def test_streams_of_a_device_overlap() -> None:
    async def main(device: VirtualDevice) -> None:
        data, out = torch.ones(750).byte(), torch.zeros(750).byte()
        for stream in (device.stores, device.loads, device.loads):
            device.copy([Move(out, data)], stream)
        await device.wait(device.stores.record())
        assert now() == pytest.approx(1.0)
        await device.wait(device.loads.record())
        assert now() == pytest.approx(2.0)

    _run(main)


def test_folds_of_a_device() -> None:
    async def main(device: VirtualDevice) -> None:
        data = torch.arange(128).byte()
        numbers = device.folds([data], device.stores)
        await device.wait(device.stores.record())
        assert now() == pytest.approx(1.28)
        assert fold_digests(numbers) == [fold(memoryview(bytes(range(128))))]

    _run(main)


def test_nobody_blocks_in_virtual_time() -> None:
    async def main(device: VirtualDevice) -> None:
        data, out = torch.ones(50).byte(), torch.zeros(50).byte()
        device.copy([Move(out, data)], device.loads)
        event = device.loads.record()
        with pytest.raises(RuntimeError, match=r"await device\.wait"):
            event.synchronize()
        await device.wait(event)
        event.synchronize()
        device.copy([Move(out, data * 3)], device.loads)
        device.close()  # whatever the time is
        assert out.eq(3).all()

    _run(main)
