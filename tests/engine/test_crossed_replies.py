"""A cancelled read must not leave its answer to the next one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.engine.rig import load, running
from tierkv.testing.faults import Slow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
SPACE = kit.space()
BLOCKS = 4


@pytest.mark.parametrize("tier", ["nvme", "file"])
async def test_f041_who_comes_after_a_cancelled_load_gets_his_own_bytes(
    tier: str, tmp_path: Path
) -> None:
    said = {seed: (kit.tokens(BLOCKS, seed=seed), seed) for seed in range(1, 5)}
    kv = {seed: kit.Memory(SPACE.layout, BLOCKS * 16, seed=seed) for seed in said}
    async with running(tier, tmp_path, space=SPACE, faults={tier: [Slow(0.02, "read")]}) as rig:
        for seed, (ids, _) in said.items():
            async with rig.engine.session(f"s{seed}") as session:
                assert (await session.store(ids, kv[seed].view)).stored == BLOCKS
        for seed, other in ((1, 2), (3, 4), (2, 1), (4, 3)):
            async with rig.engine.session("first") as session:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.005):
                        await load(session, said[seed][0])
            async with rig.engine.session("second") as session:
                tokens, back = await load(session, said[other][0])
            assert tokens == BLOCKS * 16
            assert back.same(kv[other], tokens)
        await rig.at_rest()
