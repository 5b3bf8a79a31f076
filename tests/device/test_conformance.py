"""Every device that is here passes the suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tierkv.device.cpu import CpuDevice
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.devices import DeviceTests

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import Device


class TestCpu(DeviceTests):
    def make(self) -> Device:
        return CpuDevice()


@pytest.mark.every_loop
class TestSim(DeviceTests):
    def make(self) -> Device:
        return SimDevice("sim:7", delay=2e-4)

    def model(self, device: Device, work: Callable[[], object]) -> None:
        assert isinstance(device, SimDevice)
        device.compute.submit(work)


class TestSimStepByStep(TestSim):
    def make(self) -> Device:
        return SimDevice("sim:7", manual=True)
