"""Host memory is pinned for each device, and unpinned for each when the engine closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.engine.rig import running
from tests.engine.test_breaker import until
from tierkv.testing.accelerator import SimDevice

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Pinned(SimDevice):
    """Notes what is pinned for it; may refuse everything."""

    def __init__(self, name: str, *, refuses: bool = False) -> None:
        super().__init__(name)
        self.refuses = refuses
        self.now: dict[int, memoryview] = {}
        self.asked = 0

    def pin(self, memory: memoryview) -> bool:
        """Note it, or refuse."""
        self.asked += 1
        if not self.refuses:
            self.now[id(memory)] = memory
        return not self.refuses

    def unpin(self, memory: memoryview) -> None:
        """What was never pinned must not be unpinned."""
        del self.now[id(memory)]


async def test_m1_a_device_that_refuses_takes_nothing_from_another(tmp_path: Path) -> None:
    good, bad = Pinned("sim:1"), Pinned("sim:2", refuses=True)
    async with running("host", tmp_path, space=kit.space(), capacity="256MiB", tick=0.005) as rig:
        rig.engine.core.devices.add(bad)
        rig.engine.core.devices.add(good)
        pinning = rig.engine._pinning
        assert pinning is not None
        await until(lambda: len(good.now) == 8 and bad.asked > 0, "everything is pinned")
        assert pinning.nbytes == sum(map(len, good.now.values())) == 512 << 20
        assert bad.asked == 1, "it is asked once"
    assert good.now == {}
