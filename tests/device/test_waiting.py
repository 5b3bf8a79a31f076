"""A wait for a device's work ends with the work, whatever else happens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

from tests.device.fake_cuda import FakeCudaDevice, FakeEvent
from tierkv.abc import Move
from tierkv.device import is_over, outlast
from tierkv.errors import BackendError
from tierkv.testing.accelerator import SimDevice

if TYPE_CHECKING:
    from tierkv.abc import Event

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


def pending() -> tuple[FakeCudaDevice, Event]:
    device = FakeCudaDevice()
    FakeEvent.held = []
    return device, device.stores.record()


def finish() -> None:
    for raw in FakeEvent.held or []:
        raw.done = True


async def test_it_returns_when_the_work_is_done() -> None:
    device, event = pending()
    task = asyncio.get_running_loop().create_task(outlast(device, event))
    await asyncio.sleep(0.005)
    assert not task.done()
    assert not is_over(event)
    finish()
    assert await task
    assert is_over(event)


async def test_native_cancellations_wait_for_the_end() -> None:
    device, event = pending()
    task = asyncio.get_running_loop().create_task(outlast(device, event))
    for _ in range(3):
        await asyncio.sleep(0.005)
        task.cancel()
    await asyncio.sleep(0.005)
    assert not task.done()
    finish()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_scope_waits_for_the_end() -> None:
    device, event = pending()
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_later(0.001, scope.cancel)
        asyncio.get_running_loop().call_later(0.02, finish)
        await outlast(device, event)
        pytest.fail("the cancellation was swallowed")
    assert event.query()


async def test_a_failure_is_told() -> None:
    device, event = pending()
    FakeEvent.broken = "an illegal memory access was encountered"
    with pytest.raises(BackendError, match="illegal memory access"):
        await outlast(device, event)
    assert is_over(event)


async def test_whatever_a_device_raises_is_told_as_one_kind() -> None:
    def fail() -> None:
        raise OSError("gone")

    device = SimDevice("sim:0")
    device.loads.wait(device.compute.record())
    device.compute.submit(fail)
    device.copy([Move(torch.zeros(4), torch.ones(4))], device.compute)
    with pytest.raises(BackendError, match=r"'sim:0': the device failed: OSError\('gone'\)"):
        await outlast(device, device.compute.record())
    device.close()


async def test_a_failure_does_not_hide_the_cancellation() -> None:
    device, event = pending()
    task = asyncio.get_running_loop().create_task(outlast(device, event))
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.005)
    FakeEvent.broken = "an illegal memory access was encountered"
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("cancel", [False, True])
async def test_what_is_given_up_is_not_waited_for(cancel: bool) -> None:
    device, event = pending()
    hopeless = False
    task = asyncio.get_running_loop().create_task(outlast(device, event, lambda: hopeless))
    await asyncio.sleep(0.005)
    if cancel:
        task.cancel()
        await asyncio.sleep(0.005)
    assert not task.done()
    hopeless = True
    if cancel:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert not await task
    assert not is_over(event)
