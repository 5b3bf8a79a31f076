"""The CUDA device: its own logic on a fake, and the suite on a GPU where there is one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device.fake_cuda import (
    FakeCuda,
    FakeCudaDevice,
    FakeEvent,
    FakeRuntime,
    device_bytes,
    noise,
)
from tierkv.abc import Move
from tierkv.device.cuda import CudaDevice
from tierkv.device.plan import BULK_BYTES
from tierkv.errors import BackendError
from tierkv.testing.devices import DeviceTests
from tierkv.views import over

if TYPE_CHECKING:
    from tierkv.abc import Device

PAGE = 4096


class TestOnTheFake(DeviceTests):
    def make(self) -> Device:
        return FakeCudaDevice()


@pytest.mark.every_loop
class TestOnTheFakeBatched(DeviceTests):
    def make(self) -> Device:
        return FakeCudaDevice(runtime=FakeRuntime())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
class TestOnAGpu(DeviceTests):
    def make(self) -> Device:
        return CudaDevice("cuda:0")

    def model(self, device: Device, work: object) -> None:
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call] # about 10 ms
        assert callable(work)
        work()


# --------------------------------------------------------------------------- being there


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(BackendError, match="torch sees no GPU here; use a CUDA"):
        CudaDevice("cuda:0", cuda=FakeCuda(gpus=0))


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "cuda:-1", "gpu:0", "cuda:0:1"])
def test_another_name_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(BackendError, match=r"there are \['cuda:0', 'cuda:1'\]"):
        CudaDevice(name, cuda=FakeCuda(gpus=2))


def test_the_first_gpu_needs_no_number() -> None:
    assert CudaDevice("cuda", cuda=FakeCuda()).name == "cuda:0"
    assert CudaDevice("cuda:1", cuda=FakeCuda()).name == "cuda:1"


# --------------------------------------------------------------------------- memory


def test_out_of_memory_is_none() -> None:
    device = FakeCudaDevice()
    device.fake.free = 1 << 61
    assert device.allocate(1 << 60) is None  # torch has not as much
    device.fake.free = 1 << 30
    assert device.available() == (1 << 30) + (2 << 20) - PAGE


def test_torch_is_not_asked_for_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # before its allocator fails, it waits for the device and empties the model's cache
    device = FakeCudaDevice()
    device.fake.free = 0
    assert device.allocate((2 << 20) - PAGE) is not None
    monkeypatch.setattr(torch, "empty", None)
    assert device.allocate(2 << 20) is None


def test_fresh_memory_is_ordered_behind_the_model() -> None:
    # torch's allocator may give out what work of the model's stream still uses
    device = FakeCudaDevice()
    FakeEvent.held = []
    assert device.allocate(100) is not None
    (event,) = FakeEvent.held
    for stream in (device._stores, device._loads):
        assert event in stream.raw.waited


def test_pinning_is_undone_once_and_at_close() -> None:
    device = FakeCudaDevice()
    chunks = [memoryview(bytearray(PAGE)) for _ in range(2)]
    assert [device.pin(chunk) for chunk in chunks] == [True, True]
    assert list(device.fake.registered.values()) == [PAGE, PAGE]
    device.unpin(chunks[0])
    device.unpin(chunks[0])
    assert len(device.fake.registered) == 1
    device.close()
    assert device.fake.registered == {}


def test_memory_that_another_device_registered_is_pinned_but_not_ours() -> None:
    cuda = FakeCuda()
    first, second = FakeCudaDevice("cuda:0", cuda), FakeCudaDevice("cuda:1", cuda)
    chunk = memoryview(bytearray(PAGE))
    assert first.pin(chunk)
    assert second.pin(chunk)
    second.unpin(chunk)
    second.close()
    assert len(cuda.registered) == 1


def test_copies_of_every_device_are_cut_at_registrations() -> None:
    cuda, runtime = FakeCuda(), FakeRuntime()
    first, second = FakeCudaDevice("cuda:0", cuda), FakeCudaDevice("cuda:1", cuda, runtime)
    memory = memoryview(bytearray(2 * BULK_BYTES))
    for low in (0, BULK_BYTES):
        for device in (first, second):
            assert device.pin(memory[low : low + BULK_BYTES])
    host = over(memory, "uint8", (len(memory),))
    second.copy([Move(host, device_bytes(second, noise(len(memory))))], second.stores)
    assert [size for batch in runtime.batches for _, _, size in batch] == [BULK_BYTES] * 2
    first.close()
    assert len(cuda.registered) == 2, "the second still has them"
    second.close()
    assert cuda.registered == {}


def test_a_refusal_to_pin_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeCudaDevice()
    device.fake.refuse = 2
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not device.pin(memoryview(bytearray(PAGE)))
    assert [r.message for r in caplog.records if "refuses to pin 4096 bytes" in r.message] == [
        caplog.records[0].message
    ]
    assert len(caplog.records) == 1
