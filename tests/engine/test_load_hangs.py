"""A device that never ends its work: its callers get away when the engine was closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.backends.test_device_hangs import Silent, _Stuck
from tests.engine.device_rig import loaded, make_tiers, on_device, stored

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: most of what these tests take is waiting."""
    return "asyncio", {"use_uvloop": False}


@pytest.mark.parametrize("stream", ["loads", "stores"])
async def test_c8_a_cancelled_caller_gets_away_once_the_engine_gave_up(
    stream: str, tmp_path: Path
) -> None:
    device = Silent()
    tiers = make_tiers("device+host", tmp_path)
    async with (
        asyncio.timeout(60),
        on_device(tiers, sim=device, close_timeout="200ms") as rig,  # type: ignore[arg-type]
    ):
        await stored(rig, 1)
        setattr(device, stream, _Stuck())
        loop = asyncio.get_running_loop()
        call = loop.create_task(loaded(rig, 1) if stream == "loads" else stored(rig, 2))
        await kit.until(lambda: device.asked)
        call.cancel()
        await asyncio.sleep(0.05)
        assert not call.done(), "the device may still touch the caller's memory"
        await rig.engine.aclose()
        with pytest.raises(asyncio.CancelledError):
            await call
