"""A reset forgets what is being stored, too: it never comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from tests import kit
from tests.engine.rig import load, running
from tierkv.decisions.types import SkipReason
from tierkv.session import StoreResult
from tierkv.testing.faults import Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
IDS = kit.tokens(8)


def memory() -> kit.Memory:
    return kit.Memory(kit.space().layout, 128, seed=1)


@pytest.mark.parametrize("chain", ["raw", "lz4"])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_a_medium_was_writing_does_not_come_back(
    chain: str, cancelled: bool, tmp_path: Path
) -> None:
    gate, results = Gated("write"), list[StoreResult]()
    async with running(
        "nvme", tmp_path, space=kit.space(), faults={"nvme": [gate]}, compression=chain
    ) as rig:
        async with rig.engine.session("a") as session:

            async def store(scope: anyio.CancelScope) -> None:
                with scope:
                    results.append(await session.store(IDS, memory().view))

            scope = anyio.CancelScope()
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(store, scope)
                    await gate.arrived()
                    if cancelled:
                        scope.cancel()
                    await rig.engine.reset()
                    gate.open_gate()
            await rig.settle()
            if cancelled:
                assert not results
            else:
                assert {(b.state, b.reason) for b in results[0].blocks} == {
                    ("skipped", SkipReason.RESET)
                }
            assert (await load(session, IDS))[0] == 0
            assert rig.engine.core.decisions.used(0) == 0
            again = await session.store(IDS, memory().view)  # asked for afterwards
            assert again.stored == 8
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert back.same(memory(), tokens)
        await rig.at_rest()


async def test_a_store_that_waits_for_its_turn_is_forgotten_with_the_rest(tmp_path: Path) -> None:
    async with (
        running("host", tmp_path, space=kit.space()) as rig,
        rig.engine.session("a") as session,
        rig.engine.session("a") as other,
    ):
        results: list[StoreResult] = []

        async def store() -> None:
            results.append(await other.store(IDS, memory().view))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                await session.begin_turn()
                group.start_soon(store)
                await anyio.wait_all_tasks_blocked()
                await rig.engine.reset()
                session.end_turn()
        assert {b.reason for b in results[0].blocks} == {SkipReason.RESET}
        assert (await load(session, IDS))[0] == 0


async def test_a_layer_wise_store_is_forgotten_with_the_rest(tmp_path: Path) -> None:
    async with (
        running("host", tmp_path, space=kit.space()) as rig,
        rig.engine.session("a") as session,
    ):
        saver = session.store_layers(IDS, memory().view)
        async with saver:
            layers = [layer.index for g in session.space.layout.groups for layer in g.layers]
            for layer in layers[:-1]:
                await saver.layer(layer)
            await rig.engine.reset()
            await saver.layer(layers[-1])
        assert saver.result is not None
        assert {b.reason for b in saver.result.blocks} == {SkipReason.RESET}
        assert (await load(session, IDS))[0] == 0
