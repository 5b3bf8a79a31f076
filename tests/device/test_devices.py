"""Which device a name or a view means, and what the stand-ins do."""

from __future__ import annotations

import threading
from typing import Any

import anyio.to_thread
import pytest
import torch

from tests.device.fake_cuda import FakeCudaDevice
from tierkv import views
from tierkv.abc import Device, Move
from tierkv.device import Devices, devices, mapped
from tierkv.device.cpu import CpuDevice
from tierkv.device.polling import poll
from tierkv.errors import BackendError, ConfigError, LayoutError
from tierkv.registry import names, resolve
from tierkv.testing.accelerator import POISON, SimDevice

pytestmark = pytest.mark.every_loop


class Somewhere(views.DenseView):
    """A view whose memory is on a device that is not here."""

    def __init__(self, where: str) -> None:
        super().__init__({0: {"k": torch.zeros(1, 4, 2)}})
        self.where = torch.device(where)

    def anchor(self) -> Any:
        class Tensor:
            device = self.where

        return Tensor()


def here() -> views.DenseView:
    return views.dense([(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))])


def test_the_names_are_registered() -> None:
    assert {"cpu", "cuda", "sim"} <= set(names("devices"))
    for name in ("cpu", "cuda", "sim"):
        assert issubclass(resolve("devices", name), Device)


def test_a_device_is_made_once() -> None:
    found = Devices()
    assert found.open("cpu") is found.open("cpu")
    sim = found.open("sim:4")
    assert sim is not found.open("sim:5")
    assert sim.name == "sim:4"
    assert [device.name for device in found] == ["cpu", "sim:4", "sim:5"]
    found.close()
    found.close()


def test_two_names_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "resolve", lambda kind, name: FakeCudaDevice)
    found = Devices()
    assert found.open("cuda") is found.open("cuda:0") is found.open("cuda")
    assert found.open("cuda:1") is not found.open("cuda")


def test_one_that_cannot_be_closed_leaves_no_other_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise OSError("gone")

    found = Devices()
    monkeypatch.setattr(found.open("sim:1"), "close", broken)
    other = found.open("sim:2")
    found.close()
    assert "sim:1 failed while it was closed" in caplog.text
    with pytest.raises(BackendError, match="was closed"):
        other.loads.record()


def test_unknown_devices_are_typed_errors() -> None:
    found = Devices()
    with pytest.raises(ConfigError, match="devices: unknown name 'xpu'"):
        found.open("xpu:0")
    with pytest.raises(BackendError, match="sim:SEED"):
        found.open("sim")
    with pytest.raises(BackendError, match="called 'cpu'"):
        found.open("cpu:1")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="torch sees no GPU here"):
            found.open("cuda:0")


def test_host_memory_is_no_device_unless_a_tier_uses_it_as_one() -> None:
    found = Devices()
    assert found.of(here()) is None
    sim = SimDevice("sim:0")
    found.add(sim)
    assert found.of(here()) is sim
    found.close()


def test_memory_of_a_device_opens_it() -> None:
    found = Devices()
    with pytest.raises(ConfigError, match="unknown name 'xpu'"):
        found.of(Somewhere("xpu:0"))
    with pytest.raises((BackendError, AssertionError)):
        found.of(Somewhere("cuda:99"))


# --------------------------------------------------------------------------- cpu


def test_the_cpu_gives_none_when_the_kernel_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    monkeypatch.setattr("tierkv.device.cpu.available_memory", lambda: 10_000)
    assert device.allocate(10_001) is None
    first = device.allocate(9_999)
    assert first is not None
    assert device.allocate(2) is None
    part = first[:4]
    del first
    assert device.allocate(2) is None
    del part
    assert device.allocate(9_999) is not None

    class Refusing:
        MAP_PRIVATE = MAP_ANONYMOUS = 0

        def mmap(self, *args: object, **more: object) -> None:
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mapped, "mmap", Refusing())
    assert device.allocate(9_999) is None


@pytest.mark.anyio
async def test_a_pool_may_grow_on_the_loop(no_blocking: None) -> None:
    device = CpuDevice()
    await anyio.to_thread.run_sync(device.available)  # as a tier does when it opens
    assert device.allocate(4096) is not None


def test_memory_outlives_the_first_tensor_over_it() -> None:
    whole = CpuDevice().allocate(8192)
    assert whole is not None
    part = whole[4096:].view(torch.int16)
    del whole
    part.fill_(3)
    assert int(part.sum()) == 3 * 2048


@pytest.mark.anyio
async def test_the_cpu_waits_for_events_of_other_devices() -> None:
    cpu, sim = CpuDevice(), SimDevice("sim:0", delay=5e-3)
    data, out = torch.arange(64).byte(), torch.zeros(64, dtype=torch.uint8)
    sim.copy([Move(out, data)], sim.loads)
    cpu.loads.wait(sim.loads.record())
    assert torch.equal(out, data)
    await cpu.wait(cpu.loads.record())
    sim.close()


# --------------------------------------------------------------------------- simulated


def test_freed_memory_is_spoilt_and_hazards_are_counted() -> None:
    device = SimDevice("sim:0", manual=True)
    memory = device.allocate(8192)
    assert memory is not None
    assert set(memory.tolist()) == {POISON}
    memory.fill_(1)
    out = torch.zeros(4096, dtype=torch.uint8)
    device.copy([Move(out, memory[:4096])], device.stores)
    device.freed(memory[4096:])
    assert device.counters.hazards == 0
    device.freed(memory[:4096])
    assert device.counters.hazards == 1
    device.drain()
    assert set(out.tolist()) == {POISON}
    device.freed(memory[:4096])
    assert device.counters.hazards == 1
    device.close()


def test_memory_is_counted_and_comes_back() -> None:
    device = SimDevice("sim:0", capacity=10_000)
    first = device.allocate(6_000)
    assert first is not None
    assert device.allocate(6_000) is None
    assert device.available() == 4_000
    piece = first[:10]
    del first
    assert device.available() == 4_000
    del piece
    assert device.available() == 10_000


def test_allocations_fail_when_told_to() -> None:
    device = SimDevice("sim:0")
    with device.fail_allocations(lambda number, nbytes: number == 1 or nbytes > 100):
        found = [
            device.allocate(10),
            device.allocate(10),
            device.allocate(10),
            device.allocate(200),
        ]
    assert [piece is not None for piece in found] == [True, False, True, False]
    with device.fail_allocations():
        assert device.allocate(1) is None
    assert device.allocate(1) is not None


def test_manual_mode_runs_nothing_by_itself() -> None:
    device = SimDevice("sim:0", manual=True)
    data, out = torch.ones(4), torch.zeros(4)
    device.compute.submit(lambda: data.fill_(2))
    device.stores.wait(device.current().record())
    device.copy([Move(out, data)], device.stores)
    event = device.stores.record()
    assert not event.query()
    assert device.step()  # the kernel alone
    assert out.sum() == 0
    event.synchronize()
    assert out.tolist() == [2] * 4
    assert not device.step()
    device.close()


def test_a_wait_for_ever_is_found_out_in_manual_mode() -> None:
    device, other = SimDevice("sim:0", manual=True), SimDevice("sim:1", manual=True)
    device.stores.wait(other.stores.record())
    with pytest.raises(BackendError, match="all streams wait"):
        device.stores.record().synchronize()
    other.drain()
    device.close()
    other.close()


def test_a_failure_on_the_device_is_told_by_later_events() -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    device = SimDevice("sim:0")
    device.compute.submit(fail)
    event = device.compute.record()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        event.query()
    device.close()


def test_threads_end_and_closed_streams_take_nothing(no_thread_leaks: None) -> None:
    device = SimDevice("sim:9")
    device.copy([Move(torch.zeros(4), torch.ones(4))], device.loads)
    device.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("sim:9")]
    with pytest.raises(BackendError, match="was closed"):
        device.copy([Move(torch.zeros(4), torch.ones(4))], device.loads)


def test_counters() -> None:
    device = SimDevice("sim:0", manual=True)
    data, out = torch.ones(8, 1000).byte(), torch.zeros(8, 1000).byte()
    device.copy([Move(out[i], data[i]) for i in range(8)], device.stores)
    device.copy([Move(out[0], data[0])], device.loads)
    device.folds([data[0, :64]], device.loads)
    device.loads.record().synchronize()
    seen = device.counters
    assert (seen.submissions, seen.moves, seen.merged) == (2, 9, 7)
    assert (seen.stored_bytes, seen.loaded_bytes, seen.folded, seen.syncs) == (8000, 1000, 1, 1)
    device.close()


@pytest.mark.parametrize("wrong", [CpuDevice().stores, object()])
def test_foreign_streams_are_refused(wrong: Any) -> None:
    device = SimDevice("sim:0")
    with pytest.raises(BackendError, match="no stream of this device"):
        device.copy([Move(torch.zeros(1), torch.ones(1))], wrong)
    with pytest.raises(BackendError, match="no stream of this device"):
        device.folds([torch.zeros(64).byte()], wrong)


def test_misfits_are_refused_before_anything_is_submitted() -> None:
    device = SimDevice("sim:0", manual=True)
    good, bad = Move(torch.zeros(2), torch.ones(2)), Move(torch.zeros(2), torch.ones(1))
    with pytest.raises(LayoutError):
        device.copy([good, bad], device.loads)
    assert not device.step()
    assert device.counters.submissions == 0


@pytest.mark.anyio
async def test_polling_ends_when_it_is_done() -> None:
    asked = 0

    def done() -> bool:
        nonlocal asked
        asked += 1
        return asked == 5

    await poll(done)
    assert asked == 5
