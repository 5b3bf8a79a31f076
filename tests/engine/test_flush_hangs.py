"""A write that hangs holds up no flush, also once the tier answers everything else again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.engine.rig import load, running
from tests.engine.test_breaker import is_open, until
from tierkv.testing.faults import Hanging

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
SPACE = kit.space()


async def test_p3_a_flush_does_not_wait_for_a_write_that_hangs(tmp_path: Path) -> None:
    said = [kit.tokens(2, seed=seed) for seed in (1, 2)]
    kv = [kit.Memory(SPACE.layout, 32, seed=seed) for seed in (1, 2)]
    frozen = Hanging("write", times=1)
    frozen.active = False
    async with running(
        "host+nvme", tmp_path, space=SPACE, faults={"nvme": [frozen]}, tier_timeout="300ms"
    ) as rig:
        try:
            async with rig.engine.session("a") as session, asyncio.timeout(30):
                await session.store(said[0], kv[0].view)
                await session.flush()
                frozen.active = True
                await session.store(said[1], kv[1].view)
                await until(lambda: is_open(rig), "the hanging write was not noticed")
                # the tier answers: its breakers close, and only the one write is still out
                nvme = rig.engine.core.levels[1]
                for direction in ("read", "write"):
                    rig.engine.core.decisions.sample(
                        1, direction, 1, 0.001, rig.engine.core.clock()
                    )
                rig.engine.core.watch.tell(nvme)
                assert not is_open(rig)
                rig.cool()
                tokens, back = await load(session, said[0])
                assert tokens == 32
                assert back.same(kv[0], 32)
                flushed = await session.flush()
                assert flushed.missing >= 2, "nobody knows whether what hangs is written"
        finally:
            frozen.release()
        await rig.settle()
        async with rig.engine.session("a") as session:
            assert (await session.flush()).missing == 0  # the write came back
