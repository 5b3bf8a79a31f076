"""Exact KV is exactly what a model computes, whatever lossy tiers, sessions and engines did before.

Random turns of several conversations over tiers of which one is lossy, against a model without any
store (:mod:`tests.engine.exact_world`).
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.exact_world import Brain, cut, documents, truth
from tests.engine.rig import Rig, load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio
SCALE = float(os.environ.get("TIERKV_SCALE", "0.05"))
ROOM = 6 * kit.BLOCK
NAMES = ("a", "b", "c")
WAYS = ("fresh", "layers", "go on", "from", "probe", "nested")


class World:
    """Conversations, and what is known of them."""

    def __init__(self, dice: random.Random, layout: str) -> None:
        self.dice = dice
        self.space = kit.space(layout)
        self.documents = documents(4, 6)
        self.truths = [truth(self.space.layout, ids) for ids in self.documents]
        self.brains: dict[str, Brain] = {}
        self.exact_hits = self.lossy_hits = 0

    def _right(self, memory: kit.Memory, ids: Sequence[int], tokens: int) -> None:
        number = next(n for n, doc in enumerate(self.documents) if doc[: len(ids)] == list(ids))
        assert memory.same(self.truths[number], tokens)

    async def turn(self, engine: tierkv.Engine) -> None:
        """One turn of a conversation, in one of the ways in which callers may go on."""
        dice = self.dice
        name, fidelity = dice.choice(NAMES), dice.choice(("lossy", "lossy", "exact"))
        brain = self.brains.setdefault(name, Brain(self.space.layout, ROOM))
        ids, way = cut(dice, dice.choice(self.documents)), dice.choice(WAYS)
        same = next((n for n, (x, y) in enumerate(zip(ids, brain.ids, strict=False)) if x != y), -1)
        there = (min(len(ids), len(brain.ids)) if same < 0 else same) // kit.BLOCK * kit.BLOCK
        if not there and way not in ("fresh", "layers"):
            way = "fresh"
        async with engine.session(name, fidelity=fidelity) as session:
            place = await self._bring(session, brain, ids, way, there)
            brain.compute(ids, place)
            start = place // kit.BLOCK * kit.BLOCK
            if way != "probe" and dice.random() < 0.5:  # else that would tell that all is anew
                start = 0
            if dice.random() < 0.3:
                async with session.store_layers(ids, brain.memory.view, start) as saver:
                    count = len(brain.memory.layers)
                    for layer in dice.sample(range(count), k=count):
                        await saver.layer(layer)
            else:
                await session.store(ids, brain.memory.view, start, tail=dice.random() < 0.3)
            if dice.random() < 0.2:
                other = dice.choice([n for n in NAMES if n != name])
                engine.forget_session(other)
                session.fork(other)
                self.brains[other] = brain.twin()

    async def _bring(
        self, session: tierkv.Session, brain: Brain, ids: list[int], way: str, there: int
    ) -> int:
        """Tokens whose KV is in the memory before the rest is computed."""
        if way == "fresh" or way == "layers":
            brain.ids = []
            async with session.match(ids) as match:
                if not match.tokens:
                    return 0
                if way == "fresh":
                    tokens = (await match.load(into=brain.memory.view)).tokens
                else:
                    async for _ in match.layers(into=brain.memory.view):
                        pass
                    tokens = match.tokens
            if session.lossy:
                self.lossy_hits += 1
            else:
                self.exact_hits += 1
                self._right(brain.memory, ids, tokens)
            return tokens
        if way == "from":
            async with session.match(ids, start=there) as match:
                return (await match.load(into=brain.memory.view)).tokens
        if way == "probe":
            async with session.match(ids):
                pass
        elif way == "nested":
            async with session.match(ids, start=there) as match, session.match(ids):
                return (await match.load(into=brain.memory.view)).tokens
        return there

    async def look(self, engine: tierkv.Engine) -> None:
        """Whatever an exact session is given is exact."""
        number = self.dice.randrange(len(self.documents))
        ids = self.documents[number]
        async with engine.session("looks") as session:
            tokens, back = await load(session, ids)
            assert back.same(self.truths[number], tokens)
            assert back.untouched(tokens)
            self.exact_hits += tokens > 0
            for block in range(len(ids) // kit.BLOCK):
                held = session.get_nowait(block)
                if held is None:
                    continue
                with held:
                    held.verify()
                    span = slice(block * kit.BLOCK, (block + 1) * kit.BLOCK)
                    for layer, tensors in self.truths[number].layers.items():
                        for name, tensor in tensors.items():
                            assert (held.tensor(layer, name) == tensor[:, span]).all()

    async def live(self, rig: Rig, steps: int) -> None:
        """Some steps in one engine."""
        for _ in range(steps):
            act = self.dice.random()
            if act < 0.6:
                await self.turn(rig.engine)
            elif act < 0.75:
                await self.look(rig.engine)
            elif act < 0.85:
                await rig.settle()
                rig.cool()
            elif act < 0.95:
                fidelity = self.dice.choice(("exact", "lossy"))
                tokens = self.dice.choice(self.documents)
                job = await rig.engine.prefetch(tokens=tokens, fidelity=fidelity)
                if self.dice.random() < 0.5:
                    await job.wait()
            else:
                name = self.dice.choice(NAMES)
                rig.engine.forget_session(name, name_too=self.dice.random() < 0.5)
                self.brains.pop(name, None)
        await rig.settle()
        rig.engine.core.decisions.check()


def _tiers(kinds: str, path: Path, *, lossy: bool) -> list[tierkv.Tier]:
    first, last = kit.tiers(kinds, path)
    if not lossy:
        return [first, last]
    coded = tierkv.Tier(last.kind, last.capacity, path=last.path, codec="int8")
    return [first, coded]


async def _lives(kinds: str, layout: str, seed: int, path: Path, engines: int, steps: int) -> World:
    dice = random.Random(f"{kinds} {layout} {seed}")
    world = World(dice, layout)
    for number in range(engines):
        lossy = not number or dice.random() < 0.7
        settings: dict[str, Any] = {}
        if lossy and dice.random() < 0.3:
            settings["compression"] = tierkv.CompressionPolicy("int8", after_steps=1)
        tiers = _tiers(kinds, path, lossy=lossy)
        async with tierkv.open(tiers=tiers, space=world.space, **settings) as engine:
            await world.live(Rig(engine, {}), steps)
        world.brains.clear()  # whoever closes the engine gives the KV up that it came with
    return world


@pytest.mark.parametrize("layout", ["full", "latent"])
@pytest.mark.parametrize("kinds", ["host+nvme", "host+file"])
async def test_i4_exact_sessions_get_what_a_model_computes(
    kinds: str, layout: str, tmp_path: Path
) -> None:
    hits = 0
    for seed in range(2):
        world = await _lives(kinds, layout, seed, tmp_path / str(seed), engines=3, steps=12)
        hits += world.exact_hits * world.lossy_hits
    assert hits  # else it shows nothing


@pytest.mark.stress
@pytest.mark.parametrize("layout", ["full", "latent"])
@pytest.mark.parametrize("kinds", ["host+nvme", "host+file"])
async def test_i4_exact_sessions_get_what_a_model_computes_at_length(
    kinds: str, layout: str, tmp_path: Path
) -> None:
    for seed in range(100, 100 + max(1, int(60 * SCALE))):
        await _lives(kinds, layout, seed, tmp_path / str(seed), engines=4, steps=25)
