"""The ``device`` tier on a device that never answers: closing ends, and nothing is reused."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.backends.test_device import OnDevice, tier_of
from tierkv.abc import Stream
from tierkv.device.cpu import CpuDevice
from tierkv.errors import BackendError, ClosedError
from tierkv.testing.bench import part
from tierkv.testing.resident import HeldEvent
from tierkv.workers import Signal

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import Event

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


class _Stuck(Stream):
    """Takes work that never ends."""

    def record(self) -> Event:
        return HeldEvent()

    def wait(self, event: Event) -> None:
        """Never."""


class Silent(CpuDevice):
    """Waits for events by asking."""

    asked = False

    async def wait(self, event: Event) -> None:
        self.asked = self.asked or not event.query()
        while not event.query():  # noqa: ASYNC110 - that is how devices are
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv_backends.device.backend._CLOSE_S", 0.05)
    monkeypatch.setattr("tierkv.device.waiting._LOOK_S", 0.01)


@pytest.mark.parametrize("cancel", [False, True])
async def test_c8_closing_gives_up_copies_that_never_end(
    cancel: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits gets ClosedError (or its cancellation); the memory is kept for ever."""
    device = Silent()
    async with OnDevice(device).opened(tmp_path) as bench:
        await bench.write(part(0, 9000))
        tier = tier_of(bench)
        room = device._room
        device.stores = _Stuck()
        task: list[asyncio.Task[object]] = []

        async def reads() -> None:
            current = asyncio.current_task()
            assert current is not None
            task.append(current)
            await bench.read(part(0, 9000))

        reading = bench.workers.spawn(reads)
        await kit.until(lambda: device.asked)
        if cancel:
            task[0].cancel()
            await asyncio.sleep(0.02)
        assert not reading.done(), "it leaves memory that the device may still write to"
        with caplog.at_level(logging.ERROR):
            await tier.aclose()
        with pytest.raises(ClosedError, match="cancelled" if cancel else "hangs on the device"):
            await reading.wait()
        assert "hangs and is given up" in caplog.text
        gc.collect()
        assert device._room == room, "memory under running work was freed"


async def test_c8_closing_gives_up_though_its_timer_fires_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers of uvloop count whole milliseconds: a wait may end just before its time."""

    async def early(self: Signal, within: float | None = None) -> bool:
        await asyncio.sleep(0)
        return False

    device = Silent()
    async with OnDevice(device).opened(tmp_path) as bench:
        await bench.write(part(0, 9000))
        tier = tier_of(bench)
        device.stores = _Stuck()
        reading = bench.workers.spawn(bench.read, part(0, 9000))
        await kit.until(lambda: device.asked)
        with monkeypatch.context() as patch:
            patch.setattr("tierkv_backends.device.backend._CLOSE_S", 60.0)
            patch.setattr(Signal, "outlast", early)
            await tier.aclose()
        with pytest.raises(ClosedError, match="hangs on the device"):
            await reading.wait()


@pytest.mark.parametrize("kind", ["closes", "is cancelled"])
async def test_c8_closing_gives_up_work_on_frames(kind: str, tmp_path: Path) -> None:
    """Work of the model that reads a frame and never ends holds nobody up."""
    async with OnDevice(Silent()).opened(tmp_path) as bench:
        await bench.write(part(0, 9000))
        tier = tier_of(bench)
        tier.touched(part(0, 9000).part, 1, HeldEvent())
        task = asyncio.current_task()
        assert task is not None
        if kind == "closes":
            await tier.aclose()
            return
        asyncio.get_running_loop().call_later(0.01, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await tier.aclose()
        task.uncancel()


async def test_opening_twice_is_refused(tmp_path: Path) -> None:
    async with OnDevice(Silent()).opened(tmp_path) as bench:
        with pytest.raises(BackendError, match="open already"):
            await bench.backend.open(bench.workers)
