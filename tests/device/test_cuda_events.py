"""What the CUDA device keeps, asks for and comes through, on the fake."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch

from tests.device.batches import check_any_batch
from tests.device.fake_cuda import (
    FakeCuda,
    FakeCudaDevice,
    FakeEvent,
    FakeRuntime,
    device_bytes,
    noise,
    pinned,
)
from tierkv.abc import Move
from tierkv.device import capture
from tierkv.device.plan import BULK_BYTES
from tierkv.device.polling import Poller
from tierkv.errors import BackendError

pytestmark = pytest.mark.every_loop

# --------------------------------------------------------------------------- what is held


def test_tensors_are_held_until_the_event_and_no_longer() -> None:
    device = FakeCudaDevice()
    there = device_bytes(device, noise(64))
    FakeEvent.held = []
    host = torch.zeros(64, dtype=torch.uint8)
    gone = weakref.ref(host)
    device.copy([Move(host, there)], device.stores)
    event = device.stores.record()
    del host
    gc.collect()
    assert gone() is not None
    assert not event.query()
    for raw in FakeEvent.held:
        raw.done = True
    assert event.query()
    gc.collect()
    assert gone() is None


def test_events_are_used_again() -> None:
    device = FakeCudaDevice()
    for _ in range(100):
        assert device.stores.record().query()
    assert FakeEvent.made <= 3


def test_a_later_event_that_is_done_tells_for_earlier_ones() -> None:
    device = FakeCudaDevice()
    FakeEvent.held = []
    events = [device.stores.record() for _ in range(5)]
    FakeEvent.held[3].done = True
    assert events[3].query()
    before = FakeEvent.queries
    assert all(event.query() for event in events[:3])
    assert FakeEvent.queries == before
    assert not events[4].query()


@pytest.mark.anyio
async def test_only_the_oldest_event_of_a_stream_is_asked() -> None:
    device = FakeCudaDevice()
    FakeEvent.held = []
    events = [device.stores.record() for _ in range(50)]
    done: list[int] = []

    async def waiter(number: int) -> None:
        await device.wait(events[number])
        done.append(number)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waiter(number)) for number in range(50)]
        await asyncio.sleep(0)
        FakeEvent.queries = 0
        await asyncio.sleep(0.02)
        assert done == []
        assert 0 < FakeEvent.queries <= 200, "each of 50 waiters would ask 20 times and more"
        tasks[0].cancel()  # the oldest goes away: others must not hang
        FakeEvent.held[48].done = True
        for raw in FakeEvent.held[:30]:
            raw.done = True
        async with asyncio.timeout(30):
            while len(done) < 29:  # noqa: ASYNC110 - the loop of a poller is what is tested
                await asyncio.sleep(0.001)
        for raw in FakeEvent.held:
            raw.done = True
    assert sorted(done) == list(range(1, 50))


@pytest.mark.anyio
async def test_a_device_that_fails_is_told_to_everybody_who_waits() -> None:
    device = FakeCudaDevice()
    FakeEvent.held = []
    events = [device.stores.record() for _ in range(3)]

    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    async def waiter(number: int) -> None:
        with pytest.raises(BackendError, match="'cuda:0': the device failed: an illegal memory"):
            await device.wait(events[number])

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(waiter(number))
        await asyncio.sleep(0)
        FakeEvent.held[0].query = fail  # type: ignore[method-assign]


@pytest.mark.anyio
async def test_new_waiters_do_not_put_the_question_off() -> None:
    poller = Poller(asyncio.get_running_loop())
    asked: list[bool] = []

    def done() -> bool:
        asked.append(True)
        return len(asked) > 1

    async def waiter(number: int) -> None:
        await poller.wait(number, done)

    async with asyncio.TaskGroup() as group:
        begin = asyncio.get_running_loop().time()
        number = 0
        while len(asked) < 2 and asyncio.get_running_loop().time() < begin + 60:
            number += 1
            group.create_task(waiter(number))
            await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() < begin + 60


# --------------------------------------------------------------------------- faults


def test_after_a_fault_everything_says_so_and_nothing_else_is_raised() -> None:
    device = FakeCudaDevice()
    chunk = memoryview(bytearray(4096))
    there, host = device_bytes(device, noise(64)), torch.zeros(64, dtype=torch.uint8)
    assert device.pin(chunk)
    FakeEvent.held = []
    pending = device.stores.record()
    FakeEvent.broken = "an illegal memory access was encountered"
    for event in (pending, device.stores.record(), device.current().record()):
        with pytest.raises(BackendError, match="the device failed: an illegal memory access"):
            event.query()
        with pytest.raises(BackendError, match="illegal memory access"):
            event.synchronize()
        with pytest.raises(BackendError, match="illegal memory access"):
            device.loads.wait(event)
    for work in (
        lambda: device.copy([Move(host, there)], device.stores),
        lambda: device.copy([Move(host, there)], device.current()),
        lambda: device.folds([there], device.loads),
        device.available,
    ):
        with pytest.raises(BackendError, match="illegal memory access"):
            work()
    assert device.allocate(64) is None
    assert not device.pin(memoryview(bytearray(4096)))
    device.unpin(chunk)
    device.close()


def test_a_device_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierkv.device.cuda.CLOSE_S", 0.02)
    kept: list[object] = []
    monkeypatch.setattr("tierkv.device.cuda._given_up", kept)
    device = FakeCudaDevice()
    chunk = memoryview(bytearray(4096))
    assert device.pin(chunk)
    there, host = device_bytes(device, noise(64)), torch.zeros(64, dtype=torch.uint8)
    FakeEvent.held = []
    device.copy([Move(host, there)], device.stores)
    gone = weakref.ref(host)
    fake = device.fake
    device.close()
    assert "cuda:0 hangs and is given up" in caplog.text
    del host, device
    gc.collect()
    assert gone() is not None
    assert len(fake.registered) == 1, "its DMA may still write there"


def test_what_half_a_batch_touches_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCudaDevice()
    there = device_bytes(device, noise(2 * BULK_BYTES))
    FakeEvent.held = []
    host = torch.zeros(BULK_BYTES, dtype=torch.uint8)
    gone = weakref.ref(host)
    sent: list[Move] = []

    def fail_at_the_second(move: Move) -> None:
        if sent:
            raise RuntimeError("CUDA out of memory")
        sent.append(move)

    monkeypatch.setattr("tierkv.device.cuda_copies._move", fail_at_the_second)
    other = torch.zeros(BULK_BYTES, dtype=torch.uint8)
    with pytest.raises(BackendError, match="cannot take work: CUDA out of memory"):
        device.copy([Move(host, there[:BULK_BYTES]), Move(other, there[BULK_BYTES:])], device.loads)
    sent.clear()
    event = device.loads.record()
    del host, other
    gc.collect()
    assert gone() is not None
    for raw in FakeEvent.held:
        raw.done = True
    assert event.query()
    gc.collect()
    assert gone() is None


def test_a_kernel_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    def fail(moves: object) -> list[Move]:
        raise ValueError("out of resources")

    device = FakeCudaDevice()
    device._copies.kernel = fail  # type: ignore[assignment]
    cache = device_bytes(device, noise(4096)).view(8, 8, 64)
    frame = torch.zeros(8, 8, 64, dtype=torch.uint8)
    for _ in range(2):
        frame.zero_()
        device.copy([Move(frame, cache.transpose(0, 1))], device.stores)
        assert torch.equal(frame, cache.transpose(0, 1))
    assert [r.message for r in caplog.records] == [
        "cuda:0: no kernel for strided pieces any more: out of resources"
    ]


# --------------------------------------------------------------------------- threads and graphs


def test_batches_of_several_threads_do_not_share_scratch_memory() -> None:
    class Slow(FakeRuntime):
        def cudaMemcpyBatchAsync(self, *args: Any) -> tuple[int, int]:
            time.sleep(1e-3)  # others get their turn between the kernel and the copy
            return super().cudaMemcpyBatchAsync(*args)

    device = FakeCudaDevice(runtime=Slow())
    data = [noise(2048) for _ in range(4)]
    pools = [device_bytes(device, piece) for piece in data]
    frames = [pinned(device, 2048) for _ in data]
    wrong: list[int] = []

    def store(number: int) -> None:
        for _ in range(10):
            frames[number].zero_()
            device.copy([Move(frames[number], pools[number])], device.stores)
            if not torch.equal(frames[number], data[number]):
                wrong.append(number)

    threads = [threading.Thread(target=store, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_any_batches_of_several_threads_do_not_mix() -> None:
    device = FakeCudaDevice(runtime=FakeRuntime())
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for seed in range(3):
                check_any_batch(device, 100 * number + seed)
        except Exception as error:  # noqa: BLE001 - told below
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_streams_of_threads_with_one_handle_are_not_one() -> None:
    # cudaStreamPerThread is number 2 in every thread: an event tells for its own thread only
    device = FakeCudaDevice()
    FakeEvent.held = []
    mine, other = device.current().record(), device.current().record()
    FakeEvent.held[1].done = True
    assert other.query()
    assert not mine.query()


def test_a_captured_stream_takes_and_gives_nothing() -> None:
    device = FakeCudaDevice()
    there = device_bytes(device, noise(64))
    device.fake.capturing = True
    FakeEvent.held = []
    event = device.current().record()
    assert FakeEvent.held == [], "it would become part of the graph"
    with pytest.raises(BackendError, match="capturing a CUDA graph on its current stream; store"):
        device.loads.wait(event)
    with pytest.raises(BackendError, match="capturing a CUDA graph"):
        device.copy([Move(torch.zeros(64).byte(), there)], device.current())
    assert device.allocate(64) is None, "memory of a capture belongs to its graph"


def test_captures_of_other_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = [0]

    def exchange(mode: Any) -> int:
        mode._obj.value, modes[0] = modes[0], mode._obj.value
        return 0

    class Asked(FakeEvent):
        seen: ClassVar[list[int]] = []

        def query(self) -> bool:
            self.seen.append(modes[0])
            return super().query()

    class Driver:
        cuThreadExchangeStreamCaptureMode = staticmethod(exchange)

    monkeypatch.setattr("ctypes.PyDLL", lambda name: Driver)
    capture._exchange.cache_clear()
    try:
        monkeypatch.setattr(FakeCuda, "Event", Asked)
        device = FakeCudaDevice()
        assert device.stores.record().query()
        assert set(Asked.seen) == {2}
        assert modes == [0]
    finally:
        capture._exchange.cache_clear()
