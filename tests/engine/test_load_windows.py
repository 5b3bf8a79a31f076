"""Loads of many windows: cancelled, damaged or failing in the middle of all stages."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from tests import kit
from tests.engine.rig import Rig, load, running, usable
from tierkv.abc import IoStatus
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError
from tierkv.mover.fetch import Wanted
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Fault, Gated, Hanging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import tierkv

pytestmark = pytest.mark.anyio
BLOCKS = 8
IDS = kit.tokens(BLOCKS)
KINDS = ("host", "nvme", "host+nvme")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(autouse=True)
def _one_block_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.mover.departing.ONE_WINDOW_BYTES", 1)
    monkeypatch.setattr("tierkv.mover.departing._LEAST_BYTES", 1)


class _Nth(Fault):
    """Damages what the n-th read call brought."""

    def __init__(self, number: int) -> None:
        super().__init__("read")
        self.number = number
        self.calls = 0

    def due(self, operation: str) -> bool:
        if not self.active or operation != "read":
            return False
        self.calls += 1
        return self.calls == self.number + 1

    def spoil(self, memory: memoryview) -> IoStatus:
        memory[len(memory) // 2] ^= 1
        return IoStatus.OK


@asynccontextmanager
async def ready(
    kinds: str, path: Path, *, device: bool = False, layout: str = "full", **settings: Any
) -> AsyncIterator[tuple[Rig, tierkv.Session, kit.Memory]]:
    """An engine with one stored conversation in its slowest tier alone."""
    space = kit.space(layout)
    kv = kit.Memory(space.layout, len(IDS), seed=1)
    sim = SimDevice("sim:4")
    async with running(kinds, path, space=space, **settings) as rig:
        if device:
            rig.engine.core.devices.add(sim)
        async with rig.engine.session("a") as session:
            await session.store(IDS, kv.view)
            await session.flush()
            rig.cool()
            yield rig, session, kv
        await rig.at_rest()
    sim.close()
    assert sim.failed is None


@pytest.mark.parametrize("device", [False, True], ids=["ram", "device"])
@pytest.mark.parametrize("layout", ["full", "sliding", "state"])
@pytest.mark.parametrize("kinds", KINDS)
async def test_one_call_per_window(kinds: str, layout: str, device: bool, tmp_path: Path) -> None:
    async with ready(kinds, tmp_path, device=device, layout=layout) as (rig, session, kv):
        tokens, back = await load(session, IDS)
        assert tokens == len(IDS)
        assert back.same(kv, tokens)
        if "nvme" in kinds and layout == "full":
            assert rig.calls("nvme", "read") == BLOCKS


@pytest.mark.parametrize("device", [False, True], ids=["ram", "device"])
@pytest.mark.parametrize("kinds", KINDS)
async def test_cancelled_at_each_step(kinds: str, device: bool, tmp_path: Path) -> None:
    views: list[kit.Memory] = []
    async with ready(kinds, tmp_path, device=device) as (rig, session, kv):

        async def once() -> int:
            rig.cool()
            views.append(kit.Memory(session.space.layout, len(IDS)))
            async with session.match(IDS) as match:
                return (await match.load(into=views[-1].view)).tokens

        async for run in cancel_at_each_step(once):
            before = [t.clone() for x in views[-1].layers.values() for t in x.values()]
            await rig.at_rest()
            after = [t for x in views[-1].layers.values() for t in x.values()]
            assert all(map(torch.equal, before, after)), f"written after {run}"
            if run.outcome == "completed":
                assert run.value == len(IDS)
                assert views[-1].same(kv, len(IDS))
        await usable(rig, session.space)


@pytest.mark.parametrize("device", [False, True], ids=["ram", "device"])
@pytest.mark.parametrize("block", [0, 1, 4, BLOCKS - 1])
@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_damage_in_one_window_ends_the_prefix_there(
    kinds: str, block: int, device: bool, tmp_path: Path
) -> None:
    fault = _Nth(block)
    fault.active = False
    async with ready(kinds, tmp_path, device=device, faults={"nvme": [fault]}) as found:
        _, session, kv = found
        fault.active = True
        back = kit.Memory(session.space.layout, len(IDS))
        async with session.match(IDS) as match:
            result = await match.load(into=back.view)
        size = session.space.block_tokens
        assert (result.tokens, result.reason) == (block * size, MissReason.DAMAGED)
        assert sum(result.by_tier.values()) == result.tokens
        assert back.same(kv, result.tokens)
        assert back.untouched(result.tokens)
        fault.active = False
        await session.store(IDS, kv.view)
        assert (await load(session, IDS))[0] == len(IDS)


@pytest.mark.parametrize("number", [0, 3])
async def test_a_window_that_hangs_keeps_what_came_before_it(number: int, tmp_path: Path) -> None:
    hanging = _HangsAt(number)
    hanging.active = False
    async with ready(
        "nvme", tmp_path, faults={"nvme": [hanging]}, tier_timeout="1s", threads=8
    ) as (_, session, kv):
        hanging.active = True
        back = kit.Memory(session.space.layout, len(IDS))
        async with asyncio.timeout(60), session.match(IDS) as match:
            result = await match.load(into=back.view)
        assert result.reason is MissReason.FAILED
        assert result.tokens <= number * session.space.block_tokens
        assert back.same(kv, result.tokens)
        hanging.release()


class _HangsAt(Hanging):
    """Hangs in every read from the n-th one on."""

    def __init__(self, number: int) -> None:
        super().__init__("read")
        self.number = number
        self.calls = 0

    def due(self, operation: str) -> bool:
        if not self.active or operation != "read":
            return False
        self.calls += 1
        return self.calls > self.number


@pytest.mark.parametrize("device", [False, True], ids=["ram", "device"])
async def test_a_closing_engine_ends_a_load_that_waits(device: bool, tmp_path: Path) -> None:
    hanging = _HangsAt(2)
    hanging.active = False
    space = kit.space()
    kv = kit.Memory(space.layout, len(IDS), seed=1)
    sim = SimDevice("sim:9")
    async with running("nvme", tmp_path, space=space, faults={"nvme": [hanging]}) as rig:
        if device:
            rig.engine.core.devices.add(sim)
        session = rig.engine.session("a")
        await session.__aenter__()
        await session.store(IDS, kv.view)
        hanging.active = True
        job = rig.engine.workers.spawn(load, session, IDS, closing=True)
        async with asyncio.timeout(60):
            while not hanging.entered:  # noqa: ASYNC110 - a thread says so
                await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.01, hanging.release)
        async with asyncio.timeout(60):
            await rig.engine.aclose()
            await job.ended.wait()
        try:
            tokens, back = await job.wait()
        except ClosedError:
            pass
        else:  # it had as much when the engine went
            assert back.same(kv, tokens)
    sim.close()


@pytest.mark.parametrize("device", [False, True], ids=["ram", "device"])
@pytest.mark.parametrize("staging", ["28KiB", "64KiB", "128KiB"])
async def test_many_loads_in_little_staging_memory_all_end(
    staging: str, device: bool, tmp_path: Path
) -> None:
    """Some share a beginning, none waits for memory that it (or who waits for it) could let go."""
    space = kit.space()
    shared = kit.tokens(4)
    prompts = [shared + kit.tokens(4, seed=n) for n in range(1, 7)]
    prompts += [kit.tokens(8, seed=n) for n in range(10, 16)]
    kvs = [kit.Memory(space.layout, len(ids), seed=1) for ids in prompts]
    for number, kv in enumerate(kvs):  # what they share is the same, the rest is not
        for layer in kv.layers.values():
            for tensor in layer.values():
                tensor[:, 64 if number < 6 else 0 :] += number
    sim = SimDevice("sim:12")
    async with running("nvme", tmp_path, space=space, staging=staging) as rig:
        if device:
            rig.engine.core.devices.add(sim)
        for number, (ids, kv) in enumerate(zip(prompts, kvs, strict=True)):
            async with rig.engine.session(f"s{number}") as session:
                assert (await session.store(ids, kv.view)).skipped == 0

        async def one(number: int) -> None:
            # not all at once: who comes later joins what others began
            for _ in range(5 * number):
                await asyncio.sleep(0)
            async with rig.engine.session(f"s{number}") as session:
                tokens, back = await load(session, prompts[number])
                assert tokens == len(prompts[number])
                assert back.same(kvs[number], tokens)

        for _ in range(3):
            async with asyncio.timeout(60), anyio.create_task_group() as group:
                for number in range(len(prompts)):
                    group.start_soon(one, number)
        await rig.at_rest()
    sim.close()


async def test_a_flight_older_than_the_window_before_it_is_joined_only_afterwards(
    tmp_path: Path,
) -> None:
    """Memory is given in the order of flights: nobody holds a later one and waits for an older."""
    gate = Gated("read")
    async with ready("nvme", tmp_path, faults={"nvme": [gate]}) as (rig, session, kv):
        fetcher = rig.engine.runtime.fetcher
        async with session.match(IDS) as match:
            second = next(p for p in match._found.parts if p.block == 1)
            wanted = Wanted(second, session.space, session.state.root, None)
            (other,) = fetcher.join([wanted])
            job = rig.engine.workers.spawn(load, session, IDS)
        # its turn: the match above was left; the flight still is
        await gate.arrived(2)
        assert other.users == 1  # the load waits for block 0 alone
        gate.open_gate()
        tokens, back = await job.wait()
        assert tokens == len(IDS)
        assert back.same(kv, tokens)
        other.leave()
