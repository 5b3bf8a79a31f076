"""Stores tell when they have read the caller's memory for the last time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running
from tierkv.decisions.types import EvictReason, SkipReason
from tierkv.errors import ClosedError, LayoutError
from tierkv.session import StoreResult
from tierkv.session.batches import StoreRequest
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Failing, Gated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio
IDS = kit.tokens(8)


def memory(length: int = 128, seed: int = 1) -> kit.Memory:
    return kit.Memory(kit.space().layout, length, seed=seed)


def scribble(kv: kit.Memory, told: list[int]) -> Callable[[], None]:
    """A callback that does what it is for: the memory is used for something else at once."""

    def gathered() -> None:
        told.append(1)
        for layer in kv.layers.values():
            for tensor in layer.values():
                tensor.fill_(66.0)

    return gathered


async def stored_behind(gate: Gated, session: tierkv.Session, kv: kit.Memory) -> StoreResult:
    """Store while the medium does not write: it is told of before anything is written."""
    told: list[int] = []
    heard, results = asyncio.Event(), list[StoreResult]()

    def gathered() -> None:
        scribble(kv, told)()
        heard.set()

    async def store() -> None:
        results.append(await session.store(IDS, kv.view, gathered=gathered))

    async with asyncio.timeout(60), anyio.create_task_group() as group:
        group.start_soon(store)
        await gate.arrived()
        await heard.wait()
        assert not results, "the medium has not written anything"
        gate.open_gate()
    assert told == [1]
    return results[0]


@pytest.mark.parametrize("chain", ["raw", "lz4"])
async def test_a_medium_that_writes_holds_no_memory_of_the_caller(
    chain: str, tmp_path: Path
) -> None:
    gate, kv = Gated("write"), memory()
    async with running(
        "nvme", tmp_path, space=kit.space(), faults={"nvme": [gate]}, compression=chain
    ) as rig:
        async with rig.engine.session("a") as session:
            assert (await stored_behind(gate, session, kv)).stored == 8
            tokens, back = await load(session, IDS)
        assert tokens == len(IDS)
        assert back.same(memory(), tokens)
        await rig.at_rest()


@pytest.mark.parametrize("kinds", ["host", "nvme", "file", "host+nvme"])
async def test_told_once_whatever_becomes_of_the_blocks(kinds: str, tmp_path: Path) -> None:
    async with running(kinds, tmp_path, space=kit.space()) as rig:
        async with rig.engine.session("a") as session:
            for stored in (8, 0):  # new, then present
                kv, told = memory(), list[int]()
                result = await session.store(IDS, kv.view, gathered=scribble(kv, told))
                assert (result.stored, told) == (stored, [1])
            kv, told = memory(), []
            await session.store(IDS[:5], kv.view, gathered=scribble(kv, told))  # no block at all
            assert told == [1]
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert back.same(memory(), tokens)
        await rig.at_rest()


async def test_from_a_device(tmp_path: Path) -> None:
    sim, gate = SimDevice("sim:32"), Gated("write")
    async with running("nvme", tmp_path, space=kit.space(), faults={"nvme": [gate]}) as rig:
        rig.engine.core.devices.add(sim)
        kv = memory()
        async with rig.engine.session("a") as session:
            assert (await stored_behind(gate, session, kv)).stored == 8
            rig.engine.core.devices = type(rig.engine.core.devices)()
            tokens, back = await load(session, IDS)
            assert back.same(memory(), tokens)
            assert tokens == len(IDS)
    sim.close()
    assert sim.failed is None


async def test_what_the_first_tier_refuses_is_read_before_it_is_told(tmp_path: Path) -> None:
    """A tier too small for all of it: the next one takes the rest out of the same view."""
    tiers = [
        tierkv.Tier("host", "64KiB"),
        tierkv.Tier("nvme", "16MiB", path=str(tmp_path / "nvme")),
    ]
    ids = kit.tokens(40)
    kv, told = memory(640), list[int]()
    async with (
        tierkv.open(tiers=tiers, space=kit.space()) as engine,
        engine.session("a") as session,
    ):
        result = await session.store(ids, kv.view, gathered=scribble(kv, told))
        assert (result.stored, told) == (40, [1])
        tokens, back = await load(session, ids)
        assert tokens == 640
        assert back.same(memory(640), tokens)


async def test_what_cannot_be_written_afterwards_is_skipped(tmp_path: Path) -> None:
    gate, kv = Gated("write"), memory()
    faults = {"nvme": [gate, Failing("write")]}
    async with (
        running("nvme+file", tmp_path, space=kit.space(), faults=faults) as rig,
        rig.engine.session("a") as session,
    ):
        result = await stored_behind(gate, session, kv)
        assert result.skipped == 8
        reasons = {block.reason for block in result.blocks}
        assert reasons <= {SkipReason.FAILED, SkipReason.NO_PARENT}
        assert (await load(session, IDS))[0] == 0
        again = await session.store(IDS, memory().view)  # nobody asks: the next tier
        assert again.stored == 8
        tokens, back = await load(session, IDS)
        assert tokens == len(IDS)
        assert back.same(memory(), tokens)


@pytest.mark.every_loop
async def test_blocks_that_have_gone_meanwhile_are_read_before_it_is_told(tmp_path: Path) -> None:
    async with (
        running("nvme", tmp_path, space=kit.space()) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS[:64], memory().view)
        core = rig.engine.core
        parts = [part for part, _, _ in core.decisions.parts(0)]
        core.free(core.decisions.forget(parts, EvictReason.REMOVED, core.clock()))
        kv, told = memory(), list[int]()
        result = await session.store(IDS, kv.view, start=64, gathered=scribble(kv, told))
        assert (result.stored, told) == (8, [1])
        tokens, back = await load(session, IDS)
        assert tokens == len(IDS)
        assert back.same(memory(), tokens)


async def test_told_if_it_fails(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=kit.space()) as rig:
        told: list[int] = []
        async with rig.engine.session("a") as session:
            with pytest.raises(LayoutError):
                await session.store(IDS, memory(64).view, gathered=lambda: told.append(1))
            assert told == [1]
            wrong: Any = 5
            with pytest.raises(LayoutError, match="gathered is a function"):
                await session.store(IDS, memory().view, gathered=wrong)
        with pytest.raises(ClosedError):
            await session.store(IDS, memory().view, gathered=lambda: told.append(2))
        assert told == [1, 2]


async def test_a_callback_that_raises_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def gathered() -> None:
        raise ValueError("planted")

    async with (
        running("host", tmp_path, space=kit.space()) as rig,
        rig.engine.session("a") as session,
    ):
        assert (await session.store(IDS, memory().view, gathered=gathered)).stored == 8
    assert "planted" in caplog.text


async def test_each_store_of_a_batch_is_told(tmp_path: Path) -> None:
    async with running("nvme", tmp_path, space=kit.space()) as rig, rig.engine.session("b") as b:
        async with rig.engine.session("a") as a:
            told: list[str] = []
            results = await rig.engine.store_many(
                [
                    StoreRequest(a, IDS, memory().view, gathered=lambda: told.append("a")),
                    StoreRequest(b, kit.tokens(3, seed=2), memory().view),
                ]
            )
        assert [result.stored for result in results] == [8, 3]
        assert told == ["a"]


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_cancelled_at_each_step_it_is_told_once_and_no_later(
    kinds: str, tmp_path: Path
) -> None:
    async with running(kinds, tmp_path, space=kit.space()) as rig:
        count = 0
        async with rig.engine.session("a") as session:

            async def store() -> None:
                nonlocal count
                count += 1
                kv, told = memory(), list[int]()
                ids = kit.tokens(8, seed=count)
                try:
                    await session.store(ids, kv.view, gathered=scribble(kv, told))
                finally:
                    assert told == [1]

            async for _ in cancel_at_each_step(store):
                pass
            for seed in range(1, count + 1):  # what became visible is what was there before
                tokens, back = await load(session, kit.tokens(8, seed=seed))
                assert back.same(memory(), tokens)
        await rig.at_rest()
