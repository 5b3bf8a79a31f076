"""Turns of conversations: what was there before, what has gone meanwhile, whose KV it is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, Rig, load, running
from tierkv.decisions.types import EvictReason, MissReason, SkipReason
from tierkv.layout import Layout, Space
from tierkv.testing.faults import Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(6)
KV = kit.Memory(SPACE.layout, 96, seed=1)


def _forget(rig: Rig, ids: list[int], *blocks: int) -> None:
    """Lose these blocks of a prompt everywhere."""
    chain = tierkv.blocks.KeyChain(SPACE.root("", b""), 16)
    chain.follow(ids)
    parts = [tierkv.blocks.part_id(chain.keys[b], 0) for b in blocks]
    core = rig.engine.core
    core.free(core.decisions.forget(parts, EvictReason.CAPACITY, core.clock()))


@pytest.mark.parametrize("gone", [(2,), (0,), (1, 2), (0, 1, 2), (1,)])
@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_a_store_whose_prefix_has_gone_starts_earlier(
    kinds: str, gone: tuple[int, ...], tmp_path: Path
) -> None:
    async with running(kinds, tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS[:48], KV.view)
            await rig.settle()
            async with session.match(IDS) as match:
                start = match.tokens
                assert start == 48
            _forget(rig, IDS, *gone)
            result = await session.store(IDS, KV.view, start=start)
            assert result.skipped == 0
            assert result.blocks[0].index == min(gone)
            assert result.stored == 3 + len(gone)
            tokens, back = await load(session, IDS)
            assert tokens == 96
            assert back.same(KV, 96)
        await rig.at_rest()


async def test_what_is_told_when_nothing_earlier_can_be_had(tmp_path: Path) -> None:
    """The host tier is too small for the whole; the end has no parent then, and says so."""
    tiers = [tierkv.Tier("host", 3 * 12 * 1024)]
    async with tierkv.open(tiers=tiers, space=SPACE) as engine, engine.session("a") as session:
        result = await session.store(IDS, KV.view, start=80)
        assert [b.index for b in result.blocks] == list(range(6))
        assert [b.state for b in result.blocks] == ["stored"] * 3 + ["skipped"] * 3
        assert result.blocks[-1].reason is SkipReason.NO_PARENT
        assert (await load(session, IDS))[0] == 48


async def test_another_task_cannot_make_derived_kv_pass_for_exact() -> None:
    """Lineage belongs to the handle: what one loads lossily, another's match does not wash."""
    host = [tierkv.Tier("host", "4MiB", codec="int8")]
    async with tierkv.open(tiers=host, space=SPACE) as engine:
        async with (
            engine.session("s", fidelity="lossy") as one,
            engine.session("s", fidelity="lossy") as two,
        ):
            await one.store(IDS[:48], KV.view)
            assert (await load(one, IDS[:48]))[0] == 48
            async with two.match(IDS[:16]):  # a turn in between
                pass
            await one.store(IDS, KV.view, start=48)
            branch = one.fork("branch")
            async with branch:
                more = kit.tokens(7)
                await branch.store(more, kit.Memory(SPACE.layout, 112, seed=1).view, start=96)
        for prompt in (IDS, kit.tokens(7)):
            assert not engine.explain(prompt, fidelity="lossy")[-1].exact


async def test_exact_kv_replaces_lossy_kv_unless_somebody_is_reading_it() -> None:
    derived = tierkv.mover.load.Progress(derived="test")
    host = [tierkv.Tier("host", "4MiB")]
    other = kit.Memory(SPACE.layout, 96, seed=2)
    async with tierkv.open(tiers=host, space=SPACE) as engine:
        async with engine.session("l", fidelity="lossy") as lossy, engine.session("e") as exact:
            lossy.lineage.append(derived)
            await lossy.store(IDS, other.view)
            async with lossy.match(IDS) as match:
                assert match.tokens == 96
                result = await exact.store(IDS, KV.view)
                assert {b.reason for b in result.blocks} == {SkipReason.IN_FLIGHT}
                back = kit.Memory(SPACE.layout, 96)
                assert (await match.load(into=back.view)).tokens == 96
                assert back.same(other, 96)  # what was promised, not what came after
            assert (await exact.store(IDS, KV.view)).stored == 6
            tokens, back = await load(exact, IDS)
            assert tokens == 96
            assert back.same(KV, 96)
            lossy.lineage.append(derived)
            assert (await lossy.store(IDS, other.view)).present == 6  # never the reverse
        await Rig(engine, {}).at_rest()


@pytest.mark.every_loop
async def test_tasks_that_share_a_handle_do_not_mix_their_prompts(tmp_path: Path) -> None:
    """Long prompts are hashed in a thread; the histories of two tasks must not meet there."""
    space = Space(tierkv.Identity("t", "r"), Layout.uniform(1, 1, 2, "float32"), 512)
    prompts = [[seed * 100_000 + i for i in range(10_240)] for seed in range(3)]
    memories = [kit.Memory(space.layout, 10_240, seed=seed + 1) for seed in range(3)]
    async with running("host", tmp_path, space=space, capacity="64MiB") as rig:
        async with rig.engine.session("s") as session:

            async def turn(number: int) -> None:
                for _ in range(3):
                    await session.store(prompts[number], memories[number].view)
                    tokens, back = await load(session, prompts[number])
                    assert tokens == 10_240
                    assert back.same(memories[number], tokens)

            async with anyio.create_task_group() as group:
                for number in range(3):
                    group.start_soon(turn, number)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_leaving_a_match_while_another_task_loads_it(tmp_path: Path) -> None:
    gate = Gated("read")
    async with running("nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            back = kit.Memory(SPACE.layout, 96)
            match = session.match(IDS)
            async with match:
                job = rig.engine.workers.spawn(match.load, back.view)
                await gate.arrived()
            assert rig.engine.stats().leases == 1  # the load holds it now
            gate.open_gate()
            assert (await job.wait()).tokens == 96
            assert back.same(KV, 96)
            assert rig.engine.stats().leases == 0
        await rig.at_rest()


async def test_a_session_keeps_no_memory_of_the_caller(tmp_path: Path) -> None:
    import gc
    import weakref

    async with (
        running("host+nvme", tmp_path, space=SPACE) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view)
        back = kit.Memory(SPACE.layout, 96)
        view = back.view
        seen = weakref.ref(view)
        async with session.match(IDS) as match:
            await match.load(into=view)
        del view, match
        gc.collect()
        assert seen() is None


@pytest.mark.every_loop
async def test_a_tail_stored_while_the_session_is_destroyed_is_not_left(tmp_path: Path) -> None:
    gate = Gated("write")
    async with running("nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as session:
            job = rig.engine.workers.spawn(session.store, IDS[:40], KV.view)
            await gate.arrived()
            session.destroy()
            gate.open_gate()
            assert (await job.wait()).stored == 2
            with_tail = await session.store(IDS[:40], KV.view, tail=True)
            assert with_tail.stored == 1
            assert session.state.tail is None
        await rig.settle()
        assert rig.engine.core.decisions.entries(0) == 2  # the shared blocks only
        await rig.at_rest()


async def test_hybrid_prefixes_shrink_to_what_the_windows_cover(tmp_path: Path) -> None:
    space = kit.space("sliding")
    kv = kit.Memory(space.layout, 96, seed=1)
    async with running("nvme", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, kv.view)
            async with session.match(IDS) as match:
                assert match.tokens == 96
                lost = [p for p in match._found.parts if p.group == 1 and p.block == 4]
                await rig.backends["nvme"].inner.delete([(p.part, p.generation) for p in lost])
                back = kit.Memory(space.layout, 96)
                result = await match.load(into=back.view)
            assert (result.tokens, result.reason) == (64, MissReason.FAILED)
            assert back.same(kv, 64)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_waiting_for_a_turn_survives_any_order_of_cancels() -> None:
    host = [tierkv.Tier("host", "4MiB")]
    async with tierkv.open(tiers=host, space=SPACE) as engine:
        ran = 0

        async def turn(patience: float) -> None:
            nonlocal ran
            async with engine.session("s") as session:
                try:
                    async with asyncio.timeout(patience), session.match(IDS):
                        ran += 1
                        await asyncio.sleep(0.001)
                except TimeoutError:
                    pass

        async with anyio.create_task_group() as group:
            for number in range(60):
                group.start_soon(turn, 0.0005 * (number % 7) if number % 5 else 10)
        assert ran >= 12
        async with asyncio.timeout(30):
            await turn(10)
