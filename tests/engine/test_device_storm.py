"""Many conversations at once on a simulated device, cancelled at random: never a wrong byte.

The caller's tensors are the device's: KV is still being written by the model when a store begins,
and is overwritten as soon as it returns; memory that is loaded into is filled as soon as the load
ends, well or not, and must stay as it was filled.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests import kit
from tests.engine.device_rig import FRAME, SPACE, loaded, make_tiers, on_device, said, stored
from tierkv.errors import SessionBusyError
from tierkv.testing.accelerator import SimDevice

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.engine.device_rig import DeviceRig

pytestmark = pytest.mark.anyio
SCALE = float(os.environ.get("TIERKV_SCALE", "1"))
CHAINS = ("device", "device+host", "device+nvme", "device+host+nvme")
TALKS = 6
FILL = 55.0


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


def _tensors(memory: kit.Memory) -> list[torch.Tensor]:
    return [tensor for layer in memory.layers.values() for tensor in layer.values()]


class Storm:
    """Callers of one engine on one simulated device."""

    def __init__(self, rig: DeviceRig, sim: SimDevice, seed: int) -> None:
        self.rig = rig
        self.sim = sim
        self.rng = random.Random(seed)
        self.counts = dict.fromkeys(("stored", "loaded", "tokens", "cut"), 0)
        self.ended: list[kit.Memory] = []

    async def run(self, callers: int, rounds: int) -> None:
        """Everything that callers do, several at once."""
        async with anyio.create_task_group() as group:
            for _ in range(callers):
                group.start_soon(self._caller, rounds)

    async def _caller(self, rounds: int) -> None:
        for _ in range(rounds):
            talk, blocks = self.rng.randrange(TALKS), self.rng.randrange(1, 7)
            what = self.rng.choice((self._store, self._store, self._load, self._load, self._other))
            patience = self.rng.choice((None, None, 0.001, 0.003, 0.01))
            try:
                async with asyncio.timeout(patience):  # a native cancel
                    await what(talk, blocks)
            except TimeoutError:
                self.counts["cut"] += 1
            except SessionBusyError:
                pass

    def _model(self, memory: kit.Memory, source: kit.Memory | None) -> None:
        """A kernel of the model writes KV some time later."""
        targets = _tensors(memory)
        sources = [t.clone() for t in _tensors(source)] if source is not None else None

        def kernel() -> None:
            for number, target in enumerate(targets):
                if sources is None:
                    target.fill_(-1.0)
                else:
                    target.copy_(sources[number])

        self.sim.compute.submit(kernel)

    async def _store(self, talk: int, blocks: int) -> None:
        ids, kv = said(talk, 6)
        mine = kit.Memory(SPACE.layout, 96)
        self._model(mine, kv)
        try:
            async with self.rig.engine.session(f"s{talk}") as session:
                result = await session.store(ids[: 16 * blocks], mine.view)
                self.counts["stored"] += result.stored
        finally:
            self._model(mine, None)

    async def _load(self, talk: int, blocks: int) -> None:
        ids, kv = said(talk, 6)
        back = kit.Memory(SPACE.layout, 96)
        try:
            async with self.rig.engine.session(f"s{talk}") as session:
                async with session.match(ids[: 16 * blocks]) as match:
                    result = await match.load(into=back.view)
                assert back.same(kv, result.tokens)
                assert back.untouched(result.tokens)
                self.counts["loaded"] += 1
                self.counts["tokens"] += result.tokens
        finally:
            for tensor in _tensors(back):
                tensor.fill_(FILL)
            self.ended.append(back)

    async def _other(self, talk: int, blocks: int) -> None:
        choice = self.rng.randrange(4)
        if choice == 0:
            await self.rig.engine.prefetch(session=f"s{talk}")
        elif choice == 1:
            await self.rig.engine.flush()
        elif choice == 2:
            async with self.rig.engine.session(f"s{talk}") as session:
                session.destroy()
        else:
            core = self.rig.engine.core
            drops, demotes = core.decisions.make_room(
                0, blocks * FRAME, tenant="", now=core.clock()
            )
            core.free(drops)
            self.rig.engine.runtime.behind.demote(demotes)

    async def check(self) -> None:
        """Nothing leaked, nothing written late, and everything still works."""
        await self.rig.clean()
        self.sim.check()
        assert all(bool((t == FILL).all()) for memory in self.ended for t in _tensors(memory))
        assert (await stored(self.rig, 77)).skipped == 0
        assert await loaded(self.rig, 77) == 64


async def _storm(chain: str, path: Path, seed: int, rounds: int, *, failing: float = 0.0) -> Storm:
    sim = SimDevice(f"sim:{seed}", delay=2e-4)
    tiers = make_tiers(chain, path, room=16 * FRAME)
    rng = random.Random(seed)
    async with on_device(tiers, sim=sim, tick=0.01) as rig:
        storm = Storm(rig, sim, seed)
        with sim.fail_allocations(lambda *_: rng.random() < failing):
            await storm.run(4, rounds)
        await storm.check()
    return storm


@pytest.mark.parametrize("chain", CHAINS)
async def test_storm(chain: str, tmp_path: Path) -> None:
    storm = await _storm(chain, tmp_path, seed=1, rounds=25)
    assert storm.counts["stored"]
    assert storm.counts["tokens"]


@pytest.mark.stress
@pytest.mark.parametrize("chain", CHAINS)
async def test_many_storms(chain: str, tmp_path: Path) -> None:
    for seed in range(100, 100 + max(1, int(50 * SCALE))):
        await _storm(chain, tmp_path / str(seed), seed, 40, failing=0.1 * (seed % 3))
