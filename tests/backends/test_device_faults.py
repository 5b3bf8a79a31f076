"""The ``device`` tier when memory runs out, copies fail, callers are cancelled, or work is late."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from tierkv.abc import OK, Event, IoStatus, ReadRequest
from tierkv.abc.direct import DirectIo
from tierkv.config import Tier
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.backend_references import DictBackend
from tierkv.testing.bench import BackendBench, contents, part
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Corrupting, Failing, FaultyResident, Gated, Short, inject
from tierkv.testing.resident import framed
from tierkv_backends.device import DeviceBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tierkv.abc import IoResult, Move, StoredPart, Stream
    from tierkv.testing.bench import Bench

pytestmark = pytest.mark.anyio
SCALE = float(os.environ.get("TIERKV_SCALE", "1"))


class On(BackendBench):
    def __init__(self, device: SimDevice, chunk: int = 100_000) -> None:
        self.device = device
        self.chunk = chunk

    def make(self, root: Path, capacity: int) -> DeviceBackend:
        return DeviceBackend(Tier("device", capacity, options={"chunk": self.chunk}), self.device)


@asynccontextmanager
async def on(device: SimDevice, root: Path, chunk: int = 100_000) -> AsyncIterator[Bench]:
    """A tier on this device; afterwards nothing may have been given back under running work."""
    async with On(device, chunk).opened(root) as bench:
        yield bench
    device.close()
    assert device.counters.hazards == 0


def _books(bench: Bench) -> tuple[int, float]:
    stats = bench.backend.stats()
    return stats.entries, stats.details["waiting_bytes"]


async def test_each_allocation_may_fail(tmp_path: Path) -> None:
    """Whichever chunk is refused: its frame is FULL and counted, all others are as they were."""
    parts = [part(i, 30_000 + 7_000 * (i % 3)) for i in range(20)]
    number, failures = 0, 1
    while failures:
        device = SimDevice("sim:0", delay=0.0)

        def nth(at: int, _: int, number: int = number) -> bool:
            return at == number

        async with on(device, tmp_path) as bench:
            with device.fail_allocations(nth):
                results = [(await bench.write(p))[0].status for p in parts]
            failures = int(bench.backend.stats().details["allocation_failures"])
            assert results.count(IoStatus.FULL) == failures
            assert failures == (number < device.counters.allocations)
            kept = [p for p, r in zip(parts, results, strict=True) if r is IoStatus.OK]
            assert len(kept) == len(parts) - failures
            assert await bench.read(*kept) == [contents(p) for p in kept]
            assert await bench.write(*(p for p in parts if p not in kept)) == [OK] * failures
            assert await bench.read(*parts) == [contents(p) for p in parts]
        number += 1
    assert number > 5


async def test_a_device_that_gives_nothing_takes_nothing(tmp_path: Path) -> None:
    device = SimDevice("sim:0", delay=0.0)
    async with on(device, tmp_path) as bench:
        with device.fail_allocations():
            results = await bench.write(*(part(i, 9000) for i in range(3)))
            assert [r.status for r in results] == [IoStatus.FULL] * 3
        assert device.counters.submissions == 0
        assert _books(bench) == (0, 0)


class Refusing(SimDevice):
    """Copies are refused, as by a driver that has no room for one more."""

    refuses = False

    def copy(self, moves: Sequence[Move], stream: Stream) -> None:
        if self.refuses:
            raise RuntimeError("invalid argument")
        super().copy(moves, stream)


async def test_a_refused_copy_is_an_error_of_its_batch(tmp_path: Path) -> None:
    device = Refusing("sim:0")
    here, other = part(0, 9000), part(1, 9000)
    async with on(device, tmp_path) as bench:
        await bench.write(here)
        device.refuses = True
        (failed,) = await bench.write(other)
        assert failed.status is IoStatus.ERROR
        assert isinstance(failed.error, RuntimeError)
        assert await bench.read(other, here) == [IoStatus.MISSING, IoStatus.ERROR]
        device.refuses = False
        assert await bench.write(other) == [OK]
        assert await bench.read(here, other) == [contents(here), contents(other)]
        assert bench.backend.stats().details["arena_bytes"] <= 200_000, "its room came back"


async def test_memory_that_a_broken_device_may_touch_is_never_reused(tmp_path: Path) -> None:
    device = SimDevice("sim:0")
    async with on(device, tmp_path, chunk=4 << 20) as bench:
        await bench.write(part(0, 9000))
        device.failed = RuntimeError("unspecified launch failure")
        (failed,) = await bench.write(part(1, 9000))
        assert failed.status is IoStatus.ERROR
        assert await bench.read(part(0, 9000)) == [IoStatus.ERROR]
        backend = bench.backend
        assert isinstance(backend, DeviceBackend)
        room = 1023 * 4096 - 2 * backend.charge(9000)  # a chunk is a multiple of three pages here
        assert backend.allocate(room + 1) is None
        assert backend.allocate(room) is not None
        device.failed = None


async def _write(bench: Bench, parts: Sequence[StoredPart]) -> None:
    items = [bench.item(p) for p in parts]
    try:
        await bench.backend.write(items)
    finally:  # whatever happened: the memory is the caller's again
        for item in items:
            item.buffer.memory[:] = b"\xee" * item.stored.nbytes
            item.buffer.release()


@pytest.mark.every_loop
async def test_a_cancelled_write_keeps_nothing(tmp_path: Path) -> None:
    device = SimDevice("sim:9", delay=2e-3)
    parts = [part(i, 40_000) for i in range(4)]
    async with on(device, tmp_path) as bench:
        async for run in cancel_at_each_step(lambda: _write(bench, parts)):
            if run.outcome != "cancelled":  # or too late to be cancelled
                assert await bench.read(*parts) == [contents(p) for p in parts]
                await bench.backend.delete([(p.part, 1) for p in parts])
            assert _books(bench) == (0, 0), run
            assert bench.backend.stats().live_bytes == 0


@pytest.mark.every_loop
async def test_a_cancelled_read_leaves_buffer_and_frames_alone(tmp_path: Path) -> None:
    device = SimDevice("sim:9", delay=2e-3)
    parts = [part(i, 40_000) for i in range(4)]
    async with on(device, tmp_path) as bench:
        await bench.write(*parts)
        targets = [memoryview(bytearray(p.nbytes)) for p in parts]

        async def read() -> None:
            requests = [ReadRequest(p.part, 1, 0, p.nbytes) for p in parts]
            try:
                await bench.backend.read(requests, targets)
            finally:
                for target in targets:
                    target[:] = b"\xee" * len(target)

        async for run in cancel_at_each_step(read):
            await asyncio.sleep(0.01)
            assert all(bytes(t) == b"\xee" * len(t) for t in targets), run
            assert await bench.read(*parts) == [contents(p) for p in parts], run


@pytest.mark.every_loop
async def test_large_batches_are_cancelled_safely_in_their_thread(tmp_path: Path) -> None:
    device = SimDevice("sim:9", delay=1e-3)
    stored = part(0, 900_000)
    async with on(device, tmp_path) as bench:
        async for run in cancel_at_each_step(lambda: _write(bench, [stored])):
            if run.outcome != "cancelled":  # or too late to be cancelled
                assert await bench.read(stored) == [contents(stored)]
                await bench.backend.delete([(stored.part, 1)])
            assert _books(bench) == (0, 0), run


@pytest.mark.every_loop
async def test_a_deleted_frame_is_read_to_its_end(tmp_path: Path) -> None:
    device = SimDevice("sim:4", delay=5e-3)
    stored = part(0, 200_000)
    async with on(device, tmp_path) as bench:
        await bench.write(stored)
        reading = bench.workers.spawn(bench.read, stored)
        while not device.counters.stored_bytes:  # noqa: ASYNC110 - counted by the job
            await asyncio.sleep(0)
        await bench.backend.delete([(stored.part, 1)])
        others = [part(i, 200_000) for i in range(1, 20)]
        await bench.write(*others)
        assert await reading.wait() == [contents(stored)]


class Clumsy(DeviceBackend):
    """Forgets what it was told about work on its frames."""

    def touched(self, *_: object) -> None:
        return


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", [DeviceBackend, Clumsy])
async def test_the_simulated_device_notices_early_reuse(
    tmp_path: Path, kind: type[DeviceBackend]
) -> None:
    """The check behind the checks: a tier that frees memory under running work is found out."""
    device = SimDevice("sim:1", manual=True)
    frame = framed(0)
    bench_of = On(device)
    bench_of.make = lambda root, capacity: kind(Tier("device", capacity), device)  # type: ignore[method-assign]
    async with bench_of.opened(tmp_path) as bench:
        tier = bench.backend
        assert isinstance(tier, DeviceBackend)
        buffer = tier.allocate(frame.stored.nbytes)
        assert buffer is not None
        assert tier.adopt(frame.stored, frame.header, buffer)
        device.folds([buffer.tensor], device.loads)
        event = device.loads.record()
        tier.touched(frame.stored.part, 1, event)
        tier.discard(frame.stored.part, 1)
        device.drain()
    device.close()
    assert (device.counters.hazards > 0) is (kind is Clumsy)


async def storm(bench: Bench, seed: int, rounds: int) -> None:
    """Batches written, read, deleted and cancelled at once; every byte is checked."""
    rng = random.Random(seed)
    live: dict[int, StoredPart] = {}

    async def check(stored: StoredPart) -> None:
        (seen,) = await bench.read(stored)
        assert seen in (contents(stored), IoStatus.MISSING), stored

    for generation in range(1, rounds + 1):
        names = rng.sample(range(24), 5)
        fresh = [part(n, rng.randrange(1, 90_000), generation) for n in names[:3]]
        readers = [bench.workers.spawn(check, live[n]) for n in names[3:] if n in live]
        results = await bench.write(*fresh)
        for stored, result in zip(fresh, results, strict=True):
            assert result.status in (IoStatus.OK, IoStatus.FULL)
            number = next(n for n in names if part(n, 1).part == stored.part)
            if result.status is IoStatus.OK:
                live[number] = stored
        gone = [live.pop(n) for n in rng.sample(sorted(live), len(live) // 6)]
        await bench.backend.delete([(p.part, p.generation) for p in gone])
        for reader in readers:
            await reader.wait()
    everything = list(live.values())
    for stored in everything:
        assert await bench.read(stored) == [contents(stored)]
    assert bench.backend.stats().entries == len(everything)


async def _storms(root: Path, seeds: range, rounds: int) -> None:
    for seed in seeds:
        device = SimDevice(f"sim:{seed}", delay=2e-4, capacity=1 << 20)
        rng = random.Random(seed)
        async with on(device, root, chunk=150_000) as bench:
            with device.fail_allocations(lambda *_: rng.random() < 0.2):  # noqa: B023 - used inside
                await storm(bench, seed, rounds)


@pytest.mark.every_loop
async def test_storm_of_batches(tmp_path: Path) -> None:
    await _storms(tmp_path, range(4), 15)


@pytest.mark.stress
async def test_storms_of_batches(tmp_path: Path) -> None:
    await _storms(tmp_path, range(100, 100 + max(1, int(50 * SCALE))), 60)


# ------------------------------------------------------------------ the fault wrapper


async def test_a_wrapped_device_tier_stays_one(tmp_path: Path) -> None:
    device = SimDevice("sim:6")
    reads, writes = Failing("read", times=1), Failing("write", times=1)
    flips, gate = Corrupting(0.0, times=1), Gated("read")
    faults = (gate, reads, writes, flips)
    frame = framed(0)

    class Wrapped(BackendBench):
        def make(self, root: Path, capacity: int) -> FaultyResident:
            found = inject(DeviceBackend(Tier("device", capacity), device), *faults)
            assert isinstance(found, FaultyResident)
            return found

    async with Wrapped().opened(tmp_path) as bench:
        tier = bench.backend
        assert isinstance(tier, FaultyResident)
        assert tier.device is device
        assert tier.allocate(100) is None
        buffer = tier.allocate(frame.stored.nbytes)
        assert buffer is not None
        assert tier.adopt(frame.stored, frame.header, buffer)
        flips.active = False
        assert tier.borrow(frame.stored.part, 1) is None
        flips.active = True
        before = bytes(buffer.tensor.numpy())
        found = tier.borrow(frame.stored.part, 1)
        assert found is not None
        after = bytes(found.buffer.tensor.numpy())
        assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [0]
        assert gate.seen == 0, "what only waits is not used up by a synchronous call"
        event = device.stores.record()
        tier.touched(frame.stored.part, 1, event)
        assert isinstance(event, Event)
        tier.discard(frame.stored.part, 1)
        await device.wait(event)
        assert tier.shrink(0) == 0
    device.close()


class Straight(DirectIo):
    """A direct way to a dictionary."""

    mode = "posix"

    def __init__(self) -> None:
        self.frames: dict[bytes, torch.Tensor] = {}

    async def read_device(
        self, requests: Sequence[ReadRequest], into: Sequence[torch.Tensor]
    ) -> list[IoResult]:
        for request, target in zip(requests, into, strict=True):
            target[: request.length].copy_(self.frames[request.part][: request.length])
        return [OK] * len(requests)

    async def write_device(
        self, items: Sequence[tuple[StoredPart, torch.Tensor]]
    ) -> list[IoResult]:
        self.frames |= {stored.part: memory.clone() for stored, memory in items}
        return [OK] * len(items)


class Reaching(DictBackend):
    """A backend with a direct way."""

    way = Straight()

    def direct(self, device: SimDevice) -> Straight:
        return self.way


async def test_faults_on_the_direct_way(tmp_path: Path) -> None:
    device = SimDevice("sim:1")
    fails, flips, cuts = Failing("write", times=1), Corrupting(0.0, times=1), Short(times=1)
    flips.active = cuts.active = False
    tier = inject(Reaching(tmp_path, 1 << 20), fails, flips, cuts)
    assert inject(DictBackend(tmp_path, 1 << 20)).direct(device) is None
    way = tier.direct(device)
    assert way is not None
    assert way.mode == "posix"
    stored = part(0, 4096)
    memory, back = torch.full((4096,), 7, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    assert [r.status for r in await way.write_device([(stored, memory)])] == [IoStatus.ERROR]
    assert await way.write_device([(stored, memory)]) == [OK]
    requests = [ReadRequest(stored.part, 1, 0, 4096)]
    assert await way.read_device(requests, [back]) == [OK]
    assert torch.equal(back, memory)
    flips.active = True
    assert await way.read_device(requests, [back]) == [OK]
    assert (back != memory).nonzero().tolist() == [[0]]
    cuts.active = True
    assert [r.status for r in await way.read_device(requests, [back])] == [IoStatus.SHORT]
    assert tier.calls == [("write", 1)] * 2 + [("read", 1)] * 3
    device.close()
