"""Many conversations at once in too little memory: every hit is one's own, nothing is leaked."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, Rig, running, wrap
from tests.engine.storm_world import Sometimes
from tierkv.abc import IoStatus
from tierkv.testing.faults import Corrupting, Failing, Short, Slow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024
SESSIONS, BLOCKS = 64, 32
OPERATIONS = int(5000 * float(os.environ.get("TIERKV_SCALE", "0.05")))


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """One loop is enough for what takes long."""
    return request.param, {"use_uvloop": False}


def _said(seed: int, blocks: int = BLOCKS) -> tuple[list[int], kit.Memory]:
    """Half of each prompt is shared between four sessions; the values tell whose it is."""
    shared, own = kit.tokens(BLOCKS // 2, seed=seed // 4), kit.tokens(BLOCKS // 2, seed=1000 + seed)
    ids = (shared + own)[: 16 * blocks]
    kv = kit.Memory(SPACE.layout, len(ids))
    half = 16 * BLOCKS // 2
    for index, layer in kv.layers.items():
        for number, tensor in enumerate(layer.values()):
            tensor[:, :half] = 10_000 + 100 * (seed // 4) + 10 * index + number
            tensor[:, half:] = 20_000 + 100 * seed + 10 * index + number
    return ids, kv


async def _act(engine: tierkv.Engine, dice: random.Random, hits: list[int]) -> None:
    seed = dice.randrange(SESSIONS)
    ids, kv = _said(seed, dice.randrange(1, BLOCKS + 1))
    act = dice.random()
    async with engine.session(f"s{seed}") as session:
        if act < 0.4:
            await session.store(ids, kv.view)
            return
        back = kit.Memory(SPACE.layout, len(ids))
        deadline = dice.choice((None, None, "1ms", "50ms"))
        async with session.match(ids) as match:
            if act < 0.85:
                tokens = (await match.load(into=back.view, deadline=deadline)).tokens
                assert back.untouched(tokens)
            else:
                tokens = match.tokens
                try:
                    async for _ in match.layers(into=back.view):
                        pass
                except tierkv.errors.LoadIncomplete:
                    return
        assert back.same(kv, tokens), f"another's bytes in session {seed}"
        hits.append(tokens)


async def _run(rig: Rig, seed: int, *, cancels: bool) -> list[int]:
    dice, hits = random.Random(seed), list[int]()
    left = OPERATIONS

    async def client(number: int) -> None:
        nonlocal left
        mine = random.Random(f"{seed}-{number}")
        while left > 0:
            left -= 1
            if cancels and mine.random() < 0.3:
                with anyio.move_on_after(mine.random() * 0.02):
                    await _act(rig.engine, mine, hits)
                try:
                    async with asyncio.timeout(mine.random() * 0.02):
                        await _act(rig.engine, mine, hits)
                except TimeoutError:
                    pass
            else:
                await _act(rig.engine, mine, hits)

    async with anyio.create_task_group() as group:
        for number in range(dice.randrange(8, 16)):
            group.start_soon(client, number)
    return hits


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f004_every_hit_is_ones_own(kinds: str, tmp_path: Path) -> None:
    capacity = 4 * FRAME if kinds != "host" else 200 * FRAME
    async with running(kinds, tmp_path, space=SPACE, capacity=capacity, staging="1MiB") as rig:
        hits = await _run(rig, 1, cancels=False)
        assert sum(hits) > 0
        await rig.at_rest()
        used = rig.engine.stats().used
        assert all(
            used[level.name] <= rig.engine.core.decisions.capacity(level.index)
            for level in rig.engine.core.levels
        )


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_f004_without_write_through_and_with_cancels(codec: str, tmp_path: Path) -> None:
    options = {"write_through": False}
    async with running(
        "host+nvme",
        tmp_path,
        space=SPACE,
        capacity=40 * FRAME,
        options=options,
        compression=codec,
        tick=0.01,
        staging="2MiB",
    ) as rig:
        hits = await _run(rig, 2, cancels=True)
        assert sum(hits) > 0
        await rig.at_rest()


@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_faults_in_a_tenth_of_all_calls_cost_hits_and_nothing_else(
    kinds: str, tmp_path: Path
) -> None:
    faults = [
        Failing("read"),
        Failing("write"),
        Failing("write", status=IoStatus.FULL),
        Short(),
        Corrupting(0.7),
        Slow(0.005, "read", "write", "delete"),
    ]
    tiers = kit.tiers(kinds, tmp_path, 30 * FRAME)
    backends = wrap(tiers, {"nvme": [Sometimes(f, i) for i, f in enumerate(faults)]})
    async with tierkv.open(
        tiers=tiers, space=SPACE, backends=list(backends.values()), tick=0.01
    ) as engine:
        rig = Rig(engine, backends)
        hits = await _run(rig, 3, cancels=True)
        assert sum(hits) > 0
        backends["nvme"].faults.clear()
        await rig.at_rest()
