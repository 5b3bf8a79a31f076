"""Stores of every kind, cut short at random, on every kind of first tier."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

import anyio
import pytest

from tests import kit
from tests.engine.rig import load
from tests.engine.simulated import late, simulated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.stress]

ROUNDS = max(5, int(200 * float(os.environ.get("TIERKV_SCALE", "1"))))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kinds", ["host+nvme", "nvme", "device+host+nvme"])
async def test_random_cancels_leave_whole_prefixes_and_nothing_else(
    kinds: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space("sliding")
    chance = random.Random(f"{kinds}{codec}")
    settings = {"space": space, "capacity": "256KiB", "staging": "256KiB"}
    options = {"codec": codec}
    async with simulated(kinds, tmp_path, monkeypatch, options=options, **settings) as (
        rig,
        device,
    ):

        async def turn(seed: int) -> None:
            ids = kit.tokens(6, seed=seed)[: chance.randint(8, 96)]
            memory = late(device, kit.Memory(space.layout, 96, seed=seed))
            async with rig.engine.session(f"s{seed}") as session:
                if chance.random() < 0.5:
                    await session.store(ids, memory.view, tail=True)
                else:
                    async with session.store_layers(ids, memory.view) as saver:
                        for layer in (0, 1):
                            await saver.layer(layer)

        async def cut(seed: int) -> None:
            # one in three is left alone: there is something to find, however slow the machine is
            with anyio.move_on_after(chance.random() * 0.08 if seed % 3 else None):
                await turn(seed)

        found = 0
        for number in range(ROUNDS):
            seeds = [3 * number + i for i in range(3)]
            async with asyncio.timeout(60), anyio.create_task_group() as group:
                for seed in seeds:
                    group.start_soon(cut, seed)
            await rig.at_rest()
            for seed in seeds:
                ids = kit.tokens(6, seed=seed)
                kv = kit.Memory(space.layout, len(ids), seed=seed)
                async with rig.engine.session("reader") as reader:
                    tokens, back = await load(reader, ids)
                assert back.same(kv, tokens)
                found += tokens
        assert found
