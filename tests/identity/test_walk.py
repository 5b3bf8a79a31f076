"""Many conversations on a real model with little memory: every reply is the right one."""

from __future__ import annotations

import copy
import os
import random
from typing import TYPE_CHECKING

import pytest

import tierkv
from tierkv_adapters.hf import attach

if TYPE_CHECKING:
    from pathlib import Path

    from tests.identity.conftest import Lab
    from tierkv_adapters.hf import AsyncHandle
    from tierkv_adapters.hf.demo.reference import Memory

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.model,
    pytest.mark.stress,
    pytest.mark.timeout(1800),
]

TURNS = max(12, int(120 * float(os.environ.get("TIERKV_SCALE", "1"))))
LONGEST = 900  # with Gemma 3, far enough beyond its window of 512


class Told:
    """One conversation: what was said, and the KV that a model would have kept of it."""

    def __init__(self, ids: list[int], memory: Memory) -> None:
        self.ids = ids
        self.memory = memory

    def branch(self) -> Told:
        return Told(list(self.ids), copy.copy(self.memory))


class Walk:
    """Conversations that begin, go on, branch and end, one turn at a time."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.draw = random.Random(seed)
        self.seed = seed
        self.done = 0
        self.told: list[Told] = []
        self.reused: dict[str, int] = {}

    async def turn(self, kv: AsyncHandle) -> None:
        self.done += 1
        if len(self.told) < 3 or self.draw.random() < 0.1:
            await self._begin(kv)
            return
        which = self.draw.choice(self.told)
        branching = self.draw.random() < 0.3
        talk = which.branch() if branching else which
        ids = [*talk.ids, *self.lab.words(self.draw.randint(5, 90), seed=self.done)]
        result = await self.lab.ask(kv, ids)
        # whatever was evicted: as much as is reported was restored, and the reply is right
        if result.reused_tokens:
            expected = self.lab.resumed(talk.memory, ids, result.reused_tokens)
        else:
            talk.memory, expected = self.lab.remember(ids)
        assert result.output_ids == expected
        talk.ids = result.output_ids
        if branching:
            self.told.append(talk)
        if len(talk.ids) > LONGEST:
            self.told.remove(talk)
        for tier, tokens in result.by_tier.items():
            self.reused[tier] = self.reused.get(tier, 0) + tokens

    async def _begin(self, kv: AsyncHandle) -> None:
        ids = self.lab.prompt(self.draw.randint(70, 300), seed=1000 * self.seed + self.done)
        memory, output = self.lab.remember(ids)
        result = await self.lab.ask(kv, ids)
        assert result.output_ids == output
        self.told.append(Told(output, memory))


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_random_walk_over_conversations(lab: Lab, seed: int, tmp_path: Path) -> None:
    walk = Walk(lab, seed)
    tiers = [
        tierkv.Tier("host", 8 * lab.block_bytes, codec=walk.draw.choice(["raw", "lz4"])),
        tierkv.Tier("nvme", "1GiB", path=str(tmp_path), codec=walk.draw.choice(["raw", "zstd"])),
    ]
    while walk.done < TURNS:
        # a new engine every few turns: restarts are part of the walk
        async with tierkv.open(tiers=tiers) as engine:
            with attach(lab.model, engine) as kv:
                for _ in range(min(TURNS - walk.done, walk.draw.randint(4, 12))):
                    await walk.turn(kv)
                assert kv.status().restores_failed == 0
            await engine.flush()
            assert engine.stats().leases == 0

    assert walk.reused["nvme"] > 0
