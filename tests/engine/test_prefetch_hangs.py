"""A prefetch into a device tier from a tier that hangs: it ends, and the next ones do, too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.engine.device_rig import SPACE, make_tiers, on_device
from tierkv.testing.faults import Hanging

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


async def test_f046_no_slot_and_no_lease_stays_with_a_read_that_hangs(tmp_path: Path) -> None:
    ids, kv = kit.tokens(4), kit.Memory(SPACE.layout, 64, seed=1)
    hanging = Hanging("read")
    tiers = make_tiers("device+nvme", tmp_path)
    async with on_device(tiers, {"nvme": [hanging]}, tier_timeout="1s") as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
        rig.cool()
        async with asyncio.timeout(60):
            for _ in range(6):  # more than run at once
                assert await (await rig.engine.prefetch(tokens=ids)).wait() == 0
        assert hanging.entered
        assert rig.engine.stats().leases == 0
        assert rig.engine.runtime.prefetcher.open == 0
        hanging.release()
        await rig.settle()
