"""The ``device`` tier: what it says, refuses and counts."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.abc import OK, IoStatus, ReadRequest, WriteItem
from tierkv.config import Tier
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.frame import encode_header
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.bench import BackendBench, contents, part
from tierkv.testing.resident import HeldEvent, framed
from tierkv_backends.device import DeviceBackend

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import Device
    from tierkv.testing.bench import Bench

pytestmark = pytest.mark.anyio
MIB = 1 << 20


class OnDevice(BackendBench):
    """A tier on a given device, or on the one that ``settings`` name."""

    def __init__(self, given: Device | None = None, /, **settings: Any) -> None:
        self.given = given
        self.settings = settings

    def make(self, root: Path, capacity: int) -> DeviceBackend:
        return DeviceBackend(Tier("device", capacity, **self.settings), self.given)


def tier_of(bench: Bench) -> DeviceBackend:
    assert isinstance(bench.backend, DeviceBackend)
    return bench.backend


async def test_without_a_gpu_ram_stands_in_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    caplog.set_level(logging.INFO, "tierkv.backends.device")
    async with OnDevice().opened(tmp_path) as bench:
        assert bench.backend.stats().mode == "device cpu"
        await bench.write(part(0, 5000))
    (record,) = caplog.records
    assert record.getMessage() == "tier 'device': device cpu (no GPU here: RAM stands in for one)"


async def test_a_gpu_is_used_if_torch_sees_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    class Gpu(SimDevice):
        def __init__(self, name: str) -> None:
            super().__init__("sim:1")
            self.name = name

    def resolve(kind: str, name: str) -> Any:
        asked.append((kind, name))
        return Gpu

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("tierkv_backends.device.backend.resolve", resolve)
    async with OnDevice().opened(tmp_path) as bench:
        assert bench.backend.stats().mode == "device cuda:0"
        assert await bench.write(part(0, 5000)) == [OK]
        assert await bench.read(part(0, 5000)) == [contents(part(0, 5000))]
    assert asked == [("devices", "cuda")]


async def test_a_device_that_is_named_is_not_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierkv.backends.device")
    async with OnDevice(device="sim:5").opened(tmp_path) as bench:
        assert bench.backend.stats().mode == "device sim:5"
    assert caplog.records == []


async def test_open_refuses_a_device_without_room_for_one_chunk(tmp_path: Path) -> None:
    small = SimDevice("sim:0", capacity=300_000)
    with pytest.raises(BackendError, match=r"sim:0 has 300000 bytes free.* takes 524288; free"):
        async with OnDevice(small).opened(tmp_path):
            pass
    small.close()


async def test_a_capacity_above_what_is_free_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = SimDevice("sim:0", capacity=1 * MIB)
    async with OnDevice(small).opened(tmp_path) as bench:
        assert "sim:0 has 1 MiB free now" in caplog.text.replace("1.0 MiB", "1 MiB")
        parts = [part(i, 100_000) for i in range(20)]
        results = [(await bench.write(p))[0].status for p in parts]
        assert set(results) == {IoStatus.OK, IoStatus.FULL}
        kept = [p for p, r in zip(parts, results, strict=True) if r is IoStatus.OK]
        assert await bench.read(*kept) == [contents(p) for p in kept]
        details = bench.backend.stats().details
        assert details["allocation_failures"] == results.count(IoStatus.FULL)
    small.close()


async def test_an_unknown_device_is_a_backend_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no such device"):
        async with OnDevice(device="cpu:7").opened(tmp_path):
            pass


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"options": {"chunks": 1}}, "did you mean 'chunk'"),
        ({"options": {"chunk": "some"}}, "option 'chunk': not a size"),
        ({"path": "kv"}, "path has no meaning"),
        ({"device": "cuad:0"}, "did you mean 'cuda'"),
    ],
)
def test_settings_are_strict(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DeviceBackend(Tier("device", "1MiB", **settings))


def test_the_usable_part_of_the_capacity_is_known_before_it_is_open() -> None:
    stats = DeviceBackend(Tier("device", 10_000_000)).stats()
    assert stats.details["usable_bytes"] == 10_000_000 // 4096 * 4096
    assert (stats.mode, stats.entries, stats.live_bytes) == ("device", 0, 0)


async def test_memory_is_taken_when_frames_need_it(tmp_path: Path) -> None:
    async with OnDevice(device="cpu").opened(tmp_path) as bench:
        assert bench.backend.stats().details["arena_bytes"] == 0
        await bench.write(part(0, 10_000))
        details = bench.backend.stats().details
        assert details["arena_bytes"] <= MIB // 2
        assert details["chunks"] == 1


async def test_small_batches_take_no_hop_and_large_ones_take_one(tmp_path: Path) -> None:
    async with OnDevice(device="cpu").opened(tmp_path) as bench:
        start = bench.workers.thread_hops
        small = [part(i, 50_000) for i in range(10)]
        await bench.write(*small)
        await bench.read(*small)
        assert bench.workers.thread_hops == start
        large = [part(20 + i, 300_000) for i in range(4)]
        await bench.write(*large)
        assert bench.workers.thread_hops == start + 1
        assert await bench.read(*large) == [contents(p) for p in large]
        assert bench.workers.thread_hops == start + 2
        assert bench.backend.stats().details["bytes_copied"] == 2 * (10 * 50_000 + 4 * 300_000)


async def test_one_batch_is_one_submission_and_one_event(tmp_path: Path) -> None:
    device = SimDevice("sim:3")
    parts = [part(i, 20_000) for i in range(12)]
    async with OnDevice(device).opened(tmp_path) as bench:
        await bench.write(*parts)
        assert (device.counters.submissions, device.counters.moves) == (1, 12)
        assert device.counters.loaded_bytes == 12 * 20_000, "host to device"
        await bench.read(*parts)
        assert (device.counters.submissions, device.counters.moves) == (2, 24)
        assert device.counters.stored_bytes == 12 * 20_000, "device to host"
        assert device.counters.syncs == 0, "a thread was blocked"
    device.close()


async def test_nothing_is_submitted_for_nothing(tmp_path: Path) -> None:
    device = SimDevice("sim:3")
    stored = part(0, 5000)
    async with OnDevice(device).opened(tmp_path) as bench:
        assert await bench.backend.write([]) == []
        assert await bench.read(stored) == [IoStatus.MISSING]
        assert device.counters.submissions == 0
        await bench.write(stored)
        empty = ReadRequest(stored.part, 1, 5000, 0)
        assert await bench.backend.read([empty], [memoryview(bytearray())]) == [OK]
        assert device.counters.submissions == 1
    device.close()


async def test_wrong_lengths_are_short(tmp_path: Path) -> None:
    stored = part(0, 5000)
    async with OnDevice(device="cpu").opened(tmp_path) as bench:
        await bench.write(stored)
        for offset, length, room in ((-1, 10, 10), (0, 8193, 8193), (0, 10, 11), (9000, 0, 0)):
            target = memoryview(bytearray(room))
            request = ReadRequest(stored.part, 1, offset, length)
            (result,) = await bench.backend.read([request], [target])
            assert result.status is IoStatus.SHORT
        item = bench.item(stored)
        (result,) = await bench.backend.write([item._replace(stored=part(1, 6000))])
        assert result.status is IoStatus.SHORT


async def test_bytes_that_are_no_frame_are_read_but_not_lent(tmp_path: Path) -> None:
    good, plain = framed(0), part(1, 9000)
    async with OnDevice(device="cpu").opened(tmp_path) as bench:
        tier = tier_of(bench)
        await bench.write(plain)
        assert tier.borrow(plain.part, 1) is None
        assert await bench.read(plain) == [contents(plain)]
        for wrong in (replace(good.stored, generation=2), replace(good.stored, part=plain.part)):
            buffer = bench.arena.allocate(good.stored.nbytes)
            assert buffer is not None
            buffer.memory[:] = good.data
            named = replace(wrong, generation=wrong.generation + 1)
            assert await tier.write([WriteItem(named, buffer)]) == [OK]
            assert tier.borrow(named.part, named.generation) is None, "another frame's header"


async def test_headers_tell_which_checksum_a_frame_has(tmp_path: Path) -> None:
    async with OnDevice(device="cpu").opened(tmp_path) as bench:
        tier = tier_of(bench)
        for number, folded in enumerate((False, True)):
            frame = framed(number)
            header = replace(frame.header, folded=folded)
            buffer = bench.arena.allocate(frame.stored.nbytes)
            assert buffer is not None
            buffer.memory[:] = frame.data
            encode_header(header, buffer.memory)
            assert await tier.write([WriteItem(frame.stored, buffer)]) == [OK]
            found = tier.borrow(frame.stored.part, 1)
            assert found is not None
            assert found.header == header
            assert found.header.folded is folded


@pytest.mark.every_loop
async def test_closing_waits_for_work_on_released_memory(tmp_path: Path) -> None:
    frame, event = framed(0), HeldEvent()
    device = SimDevice("sim:2")
    async with OnDevice(device).opened(tmp_path) as bench:
        tier = tier_of(bench)
        buffer = tier.allocate(frame.stored.nbytes)
        assert buffer is not None
        assert tier.adopt(frame.stored, frame.header, buffer)
        tier.touched(frame.stored.part, 1, event)
        closing = bench.workers.spawn(tier.aclose)
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not closing.done()
        event.done = True
        await closing.wait()
        await tier.aclose()
    device.close()


@pytest.mark.every_loop
async def test_closed_backends_refuse_and_hold_nothing(tmp_path: Path) -> None:
    device = SimDevice("sim:2")
    async with OnDevice(device).opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        await bench.backend.aclose()
        stats = bench.backend.stats()
        assert (stats.entries, stats.live_bytes, stats.details["arena_bytes"]) == (0, 0, 0)
        assert device.available() == device.capacity
        with pytest.raises(ClosedError, match="not open"):
            await bench.read(part(0, 5000))
        with pytest.raises(ClosedError, match="not open"):
            tier_of(bench).shrink(0)
        tier_of(bench).discard(part(0, 5000).part, 1)
    device.close()


@pytest.mark.every_loop
async def test_a_given_device_stays_open_and_an_own_one_is_closed(
    tmp_path: Path, no_thread_leaks: None
) -> None:
    device = SimDevice("sim:2")
    async with OnDevice(device).opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
    device.loads.record()  # refused once it is closed
    device.close()
    async with OnDevice(device="sim:2").opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        own = tier_of(bench).device
    with pytest.raises(BackendError, match="closed"):
        own.loads.record()


async def test_shrink_and_grow_again(tmp_path: Path) -> None:
    parts = [part(i, 100_000) for i in range(30)]
    device = SimDevice("sim:2")
    async with OnDevice(device).opened(tmp_path) as bench:
        tier = tier_of(bench)
        assert await bench.write(*parts) == [OK] * 30
        before = tier.stats().details["arena_bytes"]
        assert tier.shrink(MIB) == before
        assert tier.stats().capacity_bytes == MIB
        await tier.delete([(p.part, 1) for p in parts[8:]])
        assert tier.stats().details["arena_bytes"] <= MIB
        assert device.capacity - device.available() <= MIB
        assert await bench.read(*parts[:8]) == [contents(p) for p in parts[:8]]
        (result,) = await bench.write(part(99, 300_000))
        assert result.status is IoStatus.FULL
        tier.shrink(4 * MIB)
        assert await bench.write(part(99, 300_000)) == [OK]
    device.close()


@pytest.mark.every_loop
@pytest.mark.parametrize("device", ["cpu", "sim:3"])
async def test_the_loop_is_never_blocked(
    device: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with OnDevice(device=device).opened(tmp_path) as bench:
        request.getfixturevalue("no_blocking")  # plug-ins were imported before
        parts = [part(i, 100_000) for i in range(20)]
        assert await bench.write(*parts) == [OK] * 20
        assert await bench.read(*parts) == [contents(p) for p in parts]
        tier = tier_of(bench)
        assert tier.allocate(1 << 20) is not None
        tier.shrink(0)
