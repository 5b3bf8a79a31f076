"""Cancelled at any suspension, in both ways: nothing is leaked, nobody writes on, work goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, Rig, is_durable, load, running, usable, wrap
from tierkv.errors import ClosedError
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Hanging

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
KINDS = kit.on_every_loop(COMBINATIONS, "host", "host+nvme", "device+file")
BLOCKS = 4


def _snapshot(memory: kit.Memory) -> list[bytes]:
    return [t.numpy().tobytes() for layer in memory.layers.values() for t in layer.values()]


@pytest.mark.parametrize("kinds", KINDS)
async def test_match(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)

            async def enter() -> int:
                async with session.match(ids) as match:
                    await asyncio.sleep(0)
                    return match.tokens

            async for run in cancel_at_each_step(enter):
                await rig.at_rest()
                assert run.outcome != "completed" or run.value == len(ids)
        await usable(rig, space)


@pytest.mark.parametrize("layout", ["full", "sliding"])
@pytest.mark.parametrize("kinds", KINDS)
async def test_load(kinds: str, layout: str, tmp_path: Path) -> None:
    space = kit.space(layout)
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    views: list[kit.Memory] = []
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()

            async def cold_load() -> int:
                rig.cool()
                views.append(kit.Memory(space.layout, len(ids)))
                async with session.match(ids) as match:
                    return (await match.load(into=views[-1].view)).tokens

            async for run in cancel_at_each_step(cold_load):
                before = _snapshot(views[-1]) if views else []
                await rig.at_rest()
                if views:
                    assert _snapshot(views[-1]) == before, f"written after {run}"
                if run.outcome == "completed":
                    assert run.value == len(ids)
                    assert views[-1].same(kv, len(ids))
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await usable(rig, space)


@pytest.mark.parametrize("kinds", KINDS)
async def test_layers(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    views: list[kit.Memory] = []
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()

            async def layerwise() -> list[int]:
                rig.cool()
                views.append(kit.Memory(space.layout, len(ids)))
                async with session.match(ids) as match:
                    return [layer async for layer in match.layers(into=views[-1].view)]

            async for run in cancel_at_each_step(layerwise):
                before = _snapshot(views[-1]) if views else []
                await rig.at_rest()
                if views:
                    assert _snapshot(views[-1]) == before, f"written after {run}"
                if run.outcome == "completed":
                    assert run.value == [0, 1, 2]
                    assert views[-1].same(kv, len(ids))
        await usable(rig, space)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kinds", KINDS)
async def test_store(kinds: str, codec: str, tmp_path: Path) -> None:
    space = kit.space()
    seed = 0
    async with running(kinds, tmp_path, space=space, compression=codec) as rig:

        async def store() -> int:
            nonlocal seed
            seed += 1
            ids = kit.tokens(BLOCKS, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            async with rig.engine.session(f"s{seed}") as session:
                return (await session.store(ids, kv.view, tail=True)).stored

        async for run in cancel_at_each_step(store):
            await rig.at_rest()
            # each block is wholly there, or not at all
            ids = kit.tokens(BLOCKS, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            async with rig.engine.session("reader") as reader:
                tokens, back = await load(reader, ids)
            assert back.same(kv, tokens)
            assert back.untouched(tokens)
            assert run.outcome != "completed" or (run.value == BLOCKS and tokens == len(ids))
        await usable(rig, space)


@pytest.mark.every_loop
async def test_store_that_has_to_demote(tmp_path: Path) -> None:
    space = kit.space()
    seed = 0
    small = {"write_through": False}
    async with running(
        "host+nvme", tmp_path, space=space, capacity="64KiB", options=small, tick=60
    ) as rig:

        async def store() -> int:
            nonlocal seed
            seed += 1
            ids = kit.tokens(BLOCKS, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            async with rig.engine.session(f"s{seed}") as session:
                return (await session.store(ids, kv.view)).stored

        assert await store() == BLOCKS
        async for run in cancel_at_each_step(store):
            await rig.at_rest()
            assert run.outcome != "completed" or run.value == BLOCKS
        await usable(rig, space)


@pytest.mark.parametrize("kinds", KINDS)
async def test_flush_prefetch_and_many(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=space) as rig:
        engine = rig.engine
        async with engine.session("a") as session, engine.session("b") as other:
            await session.store(ids, kv.view)

            async def prefetch() -> int:
                rig.cool()
                return await (await engine.prefetch(session="a")).wait()

            async def many() -> int:
                rig.cool()
                back = kit.Memory(space.layout, len(ids))
                async with engine.match_many([(session, ids), (other, ids)]) as matches:
                    loaded = await engine.load_many([(m, back.view) for m in matches])
                return sum(result.tokens for result in loaded)

            async for run in cancel_at_each_step(session.flush):
                await rig.at_rest()
                if run.outcome == "completed":
                    assert run.value.durable == (BLOCKS if is_durable(kinds) else 0)
            async for run in cancel_at_each_step(prefetch):
                await rig.at_rest()
                if run.outcome == "completed":
                    assert run.value == (BLOCKS if "+" in kinds else 0)
            async for run in cancel_at_each_step(many):
                await rig.at_rest()
                assert run.outcome != "completed" or run.value == 2 * len(ids)
        await usable(rig, space)


@pytest.mark.parametrize("kinds", KINDS)
async def test_fork(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    number = 0
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)

            async def branch() -> int:
                nonlocal number
                number += 1
                async with session.fork(f"branch-{number}") as fork:
                    return (await load(fork, ids))[0]

            async for run in cancel_at_each_step(branch):
                await rig.at_rest()
                assert rig.engine.snapshot().sessions == 1
                assert run.outcome != "completed" or run.value == len(ids)
        await usable(rig, space)


@pytest.mark.parametrize("kinds", KINDS)
async def test_open_and_close(
    kinds: str, tmp_path: Path, no_thread_leaks: None, no_fd_leaks: None, no_task_leaks: None
) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)

    async def life() -> None:
        async with tierkv.open(tiers=kit.tiers(kinds, tmp_path), space=space) as engine:
            async with engine.session("a") as session:
                await session.store(ids, kv.view)
            assert (await engine.aclose()).unwritten == 0

    async for run in cancel_at_each_step(life):
        # the root is free again: nothing holds its lock
        if run.step % 4 == 0 or run.outcome == "completed":
            async with tierkv.open(tiers=kit.tiers(kinds, tmp_path), space=space) as engine:
                assert engine.stats().leases == 0


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_f044_a_thread_inside_the_medium_writes_into_engine_memory_only(
    kind: str, tmp_path: Path
) -> None:
    """The load is cancelled at once; the thread goes on into engine memory, not into ours."""
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    hanging = Hanging("read", times=1)
    async with (
        running("nvme", tmp_path, space=space, faults={"nvme": [hanging]}) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, len(ids))

        async def cut() -> None:
            async with session.match(ids) as match:
                await match.load(into=back.view)

        step = 0
        async for run in cancel_at_each_step(cut, (kind,)):  # type: ignore[arg-type]
            step = run.step
            while rig.engine.stats().in_flight and not hanging.entered:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.001)
            if hanging.entered:
                break
        assert step
        assert rig.engine.stats().leases == 0
        assert back.untouched()
        assert rig.engine.stats().in_flight == BLOCKS  # it still belongs to the engine
        hanging.release()
        await rig.at_rest()
        assert back.untouched()
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)


@pytest.mark.every_loop
async def test_a_cancelled_waiter_for_a_turn_gets_no_turn_in_a_replan(tmp_path: Path) -> None:
    """A load cancelled while it looks for a shorter prefix still gives its turn back."""
    space = kit.space("sliding")
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    tiers = kit.tiers("nvme", tmp_path)
    backends = wrap(tiers)
    async with tierkv.open(tiers=tiers, space=space, backends=list(backends.values())) as engine:
        rig = Rig(engine, backends)
        async with engine.session("a") as session:
            await session.store(ids, kv.view)

            async def damaged_load() -> int:
                # the copies of the last block are lost while the match holds them
                async with session.match(ids) as match:
                    core = engine.core
                    for part in [p for p in match._found.parts if p.block == BLOCKS - 1]:
                        await backends["nvme"].inner.delete([(part.part, part.generation)])
                    back = kit.Memory(space.layout, len(ids))
                    tokens = (await match.load(into=back.view)).tokens
                    assert back.same(kv, tokens)
                    assert core.decisions.leases() == 1
                    return tokens

            async for run in cancel_at_each_step(damaged_load):
                await rig.settle()
                engine.core.decisions.check()
                assert engine.stats().leases == 0
                assert engine.stats().staging_used == 0
                async with asyncio.timeout(30), session.match(ids):
                    pass  # the turn is free
                await session.store(ids, kv.view)
                if run.outcome == "completed":
                    assert run.value == (BLOCKS - 1) * space.block_tokens


@pytest.mark.every_loop
async def test_after_close_everything_says_so(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("host+nvme", tmp_path, space=space) as rig:
        engine = rig.engine
        async with engine.session("a") as session:
            await session.store(ids, kv.view)
            async with session.match(ids) as match:
                await engine.aclose()
                with pytest.raises(ClosedError):
                    await match.load(into=kv.view)
            for call in (session.store(ids, kv.view), session.flush(), engine.prefetch(tokens=ids)):
                with pytest.raises(ClosedError):
                    await call
        with pytest.raises(ClosedError):
            engine.session("b")
        await engine.aclose()
