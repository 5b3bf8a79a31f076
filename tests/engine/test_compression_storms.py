"""Many sessions beside conversions: no load ever misses a block or gets other values."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.compression_world import (
    AFTER_50,
    BLOCK,
    KINDS,
    LAYOUT,
    SPACE,
    idle,
    near,
    realistic,
)
from tests.engine.rig import Rig, load, running, usable, wrap
from tierkv.testing.clock import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
IDS = kit.tokens(6, seed=1)  # 96 tokens: blocks 0 and 1 have more than 50 behind them
KV = realistic(LAYOUT, len(IDS), seed=1)
OLD = 2
TIERS = ("host", "device", "host+nvme", "device+host+file")


async def _readers(rig: Rig, stop: asyncio.Event, bad: list[str]) -> int:
    """Load the whole conversation again and again."""
    loads = 0
    async with rig.engine.session("r", fidelity="lossy") as session:
        while not stop.is_set():
            tokens, back = await load(session, IDS)
            loads += 1
            if tokens != len(IDS):
                bad.append(f"{tokens} tokens")
            elif not near(KV, back, tokens, 1 / 127):
                bad.append("other values")
            await asyncio.sleep(0)
    return loads


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_k6_no_load_ever_misses_a_block_that_is_converted(kind: str, tmp_path: Path) -> None:
    bad: list[str] = []
    rules = [tierkv.CompressionPolicy("int8+zstd", after_steps=60), AFTER_50]
    clock = VirtualClock(10.0)
    async with running(kind, tmp_path, space=SPACE, compression=rules, clock=clock) as rig:
        recoder = rig.engine.runtime.behind.recoder
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            stop = asyncio.Event()
            reading = rig.engine.workers.spawn(_readers, rig, stop, bad, name="readers")
            async with asyncio.timeout(60):
                while recoder.converted < OLD:
                    clock.advance(1.0)  # those that were in use are looked at again
                    await session.store(IDS, KV.view)
                    recoder.kick()
                    await asyncio.sleep(0.001)
            stop.set()
            assert await reading.wait() > 0
            assert not bad, bad
        await rig.at_rest()


def _world(seed: int) -> dict[int, tuple[list[int], kit.Memory]]:
    return {
        n: (kit.tokens(6, seed=seed * 100 + n), realistic(LAYOUT, 96, seed=seed * 100 + n))
        for n in range(5)
    }


async def _chatter(
    rig: Rig,
    name: int,
    world: dict[int, tuple[list[int], kit.Memory]],
    rounds: int,
    fidelity: str,
    bad: list[str],
) -> None:
    rng = random.Random(name)
    for _ in range(rounds):
        which = rng.choice(list(world))
        ids, kv = world[which]
        async with rig.engine.session(f"{which}-{fidelity}", fidelity=fidelity) as session:
            if rng.random() < 0.5:
                await session.store(ids[: BLOCK * rng.randrange(1, 7)], kv.view)
                continue
            try:
                async with asyncio.timeout(rng.choice([None, 0.0005])):
                    tokens, back = await load(session, ids)
            except TimeoutError:
                continue
            same = back.same(kv, tokens) if fidelity == "exact" else near(kv, back, tokens, 0.01)
            if not same:
                bad.append(f"{fidelity} {which}: {tokens} tokens")


async def _storm(kinds: str, seed: int, rounds: int, root: Path) -> int:
    """Sessions of both fidelities in a small engine; how many copies were converted."""
    rules = [
        tierkv.CompressionPolicy("int8+lz4", after_steps=70),
        tierkv.CompressionPolicy("planes", after_steps=20),
    ]
    tiers = [
        tierkv.Tier(k, "512KiB" if k != "nvme" else "64MiB", path=_path(root, k))
        for k in kinds.split("+")
    ]
    backends = wrap(tiers)
    bad: list[str] = []
    world = _world(seed)
    async with tierkv.open(
        tiers=tiers, space=SPACE, backends=list(backends.values()), compression=rules, tick=0.005
    ) as engine:
        rig = Rig(engine, backends)
        jobs = [
            engine.workers.spawn(
                *(_chatter, rig, 10 * seed + n, world, rounds, "lossy" if n % 2 else "exact", bad),
                name="chatter",
            )
            for n in range(4)
        ]
        for job in jobs:
            await job.wait()
        await engine.flush()
        assert not bad, bad
        await usable(rig, SPACE)
        await idle(rig)
        await rig.at_rest()
        return engine.runtime.behind.recoder.converted


@pytest.mark.parametrize("kinds", TIERS)
async def test_sessions_of_both_fidelities_in_a_small_engine(kinds: str, tmp_path: Path) -> None:
    assert await _storm(kinds, 1, 20, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize("kinds", TIERS)
async def test_many_sessions_of_both_fidelities(kinds: str, tmp_path: Path) -> None:
    scale = float(os.environ.get("TIERKV_SCALE", "1"))
    for seed in range(2, 3 + int(9 * scale)):
        assert await _storm(kinds, seed, 40 + int(160 * scale), tmp_path / str(seed))


def _path(root: Path, kind: str) -> str | None:
    return None if kind in ("host", "device") else str(root / kind)
