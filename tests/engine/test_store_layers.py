"""Layer-wise stores: the same as a store, but each layer is copied as soon as it is there."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running, usable
from tests.engine.simulated import simulated
from tierkv.decisions.types import SkipReason
from tierkv.errors import ClosedError, LayoutError, StoreIncomplete
from tierkv.layout import Layout, Space
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Failing

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.rig import Rig
    from tierkv.session import Session

pytestmark = pytest.mark.anyio


def _layers(space: Space) -> list[int]:
    return sorted(layer.index for group in space.layout.groups for layer in group.layers)


def _put(memory: kit.Memory, kv: kit.Memory, layer: int) -> None:
    for mine, theirs in ((memory.layers, kv.layers), (memory.states, kv.states)):
        for name, tensor in theirs.get(layer, {}).items():
            mine[layer][name].copy_(tensor)


async def _model(
    session: Session, ids: list[int], kv: kit.Memory, device: SimDevice | None = None, **more: Any
) -> Any:
    """Compute layer after layer, each on the model's stream where there is a device."""
    memory = kit.Memory(kv.layout, kv.length)
    async with session.store_layers(ids, memory.view, **more) as saver:
        for layer in _layers(session.space):
            if device is None:
                _put(memory, kv, layer)
            else:
                device.compute.submit(partial(_put, memory, kv, layer))
            await saver.layer(layer)
    return saver.result


@pytest.mark.parametrize("layout", list(kit.LAYOUTS))
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_it_equals_a_store(kinds: str, layout: str, tmp_path: Path) -> None:
    space = kit.space(layout)
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            result = await _model(session, ids, kv)
            assert [b.state for b in result.blocks] == ["stored"] * 4
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            assert (await session.store(ids, kv.view)).stored == 0
            again = await _model(session, ids, kv)
            assert again.stored == 0
            assert again.present == 4
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kinds", ["host", "nvme", "device", "device+host"])
async def test_on_a_device_late_layers_are_waited_for(
    kinds: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space("sliding")
    ids = kit.tokens(5)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    options = {"codec": codec}
    async with simulated(kinds, tmp_path, monkeypatch, space=space, options=options) as (
        rig,
        device,
    ):
        device.compute.submit(lambda: time.sleep(0.01))
        async with rig.engine.session("a") as session:
            result = await _model(session, ids, kv, device)
            assert result.stored == 5
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_copies_are_submitted_while_the_model_computes(tmp_path: Path) -> None:
    """Each call submits that layer and returns: no copy can have run, the model is at layer 0."""
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    per_layer = 4 * space.layout.groups[0].raw_bytes(16) // 3
    async with running("host", tmp_path, space=space) as rig:
        device = SimDevice("sim:4", manual=True)
        rig.engine.core.devices.add(device)
        memory = kit.Memory(space.layout, len(ids))
        async with rig.engine.session("a") as session:
            saver = session.store_layers(ids, memory.view)
            async with saver:
                assert saver.ahead_bytes > 0
                for layer in range(3):
                    device.compute.submit(partial(_put, memory, kv, layer))
                    await saver.layer(layer)
                    assert device.counters.stored_bytes == (layer + 1) * per_layer
                    assert memory.untouched()
            assert saver.result is not None
            assert saver.result.stored == 4
            assert device.counters.stored_bytes == 3 * per_layer  # nothing was copied twice
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_nothing_is_visible_before_the_end_and_others_do_not_wait(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("host+nvme", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as a, rig.engine.session("b") as b:
            async with a.store_layers(ids, kv.view) as saver:
                await saver.layer(0)
                async with b.match(ids) as match:
                    assert match.tokens == 0
                async with asyncio.timeout(30):
                    other = await b.store(ids, kv.view)
                assert {x.reason for x in other.blocks} == {SkipReason.IN_FLIGHT}
                await saver.layer(1)
                await saver.layer(2)
            async with b.match(ids) as match:
                assert match.tokens == len(ids)
        await rig.at_rest()


async def test_layers_may_come_in_any_order_and_again(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(3)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    memory = kit.Memory(space.layout, len(ids))
    async with running("host", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            async with session.store_layers(ids, memory.view) as saver:
                await saver.layer(2)
                for layer in (2, 0, 1):
                    _put(memory, kv, layer)
                    await saver.layer(layer)
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_a_missing_layer_stores_nothing_and_is_named(kinds: str, tmp_path: Path) -> None:
    space = kit.space("sliding")
    ids = kit.tokens(3)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            with pytest.raises(StoreIncomplete, match="layers 1 never came") as caught:
                async with session.store_layers(ids, kv.view) as saver:
                    await saver.layer(0)
            assert caught.value.missing == (1,)
            assert saver.result is None
            assert (await load(session, ids))[0] == 0
            assert (await session.store(ids, kv.view)).stored == 3
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_an_exception_of_the_model_wins(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(3)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                async with session.store_layers(ids, kv.view) as saver:
                    await saver.layer(0)
                    raise ZeroDivisionError
            assert (await load(session, ids))[0] == 0
            async with asyncio.timeout(30), session.match(ids):
                pass  # the turn was given back
        await rig.at_rest()


async def test_misuse_is_told(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(2)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("host", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            saver = session.store_layers(ids, kv.view)
            with pytest.raises(ClosedError, match="async with"):
                await saver.layer(0)
            with pytest.raises(LayoutError, match="no layer 7"):
                async with saver:
                    await saver.layer(7)
            with pytest.raises(LayoutError, match="room for 32 tokens"):
                await session.store_layers(kit.tokens(3), kv.view).__aenter__()
            done = session.store_layers(ids, kv.view)
            async with done:
                for layer in range(3):
                    await done.layer(layer)
            with pytest.raises(ClosedError, match="once"):
                await done.__aenter__()
        with pytest.raises(ClosedError):
            await session.store_layers(ids, kv.view).__aenter__()
        await rig.at_rest()


@pytest.mark.parametrize(
    "settings", [{"staging": "64KiB"}, {"capacity": "16KiB"}, {"capacity": "64KiB"}]
)
@pytest.mark.parametrize("kinds", ["host", "nvme", "host+nvme"])
async def test_what_has_no_memory_is_gathered_at_the_end(
    kinds: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    space = kit.space("sliding")
    ids = kit.tokens(12)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=space, **settings) as rig:
        async with rig.engine.session("a") as session:
            result = await _model(session, ids, kv)
            assert len(result.blocks) == 12
            tokens, back = await load(session, ids)
            assert back.same(kv, tokens)
            assert tokens > 0
            if kinds != "host":
                assert result.stored == 12
                assert tokens == len(ids)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_staging_is_left_for_a_load_inside_the_block(tmp_path: Path) -> None:
    """Stores that take staging memory for as long as a model computes leave a window of it."""
    space = kit.space()
    async with running("nvme", tmp_path, space=space, staging="256KiB") as rig:
        old, kv_old = kit.tokens(8, seed=9), kit.Memory(space.layout, 128, seed=9)
        async with rig.engine.session("old") as reader:
            await reader.store(old, kv_old.view)
            savers = []
            for number in range(6):
                ids = kit.tokens(16, seed=number)
                kv = kit.Memory(space.layout, len(ids), seed=number)
                session = await rig.engine.session(f"s{number}").__aenter__()
                savers.append((await session.store_layers(ids, kv.view).__aenter__(), session))
            async with asyncio.timeout(30):
                tokens, back = await load(reader, old)
            assert tokens == len(old)
            assert back.same(kv_old, tokens)
            async with asyncio.timeout(60):
                for saver, session in savers:
                    for layer in range(3):
                        await saver.layer(layer)
                    await saver.__aexit__(None, None, None)
                    assert saver.result is not None
                    assert saver.result.stored == 16
                    await session.__aexit__(None, None, None)
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_cancelled_at_each_step(kinds: str, tmp_path: Path) -> None:
    space = kit.space()
    async with running(kinds, tmp_path, space=space) as rig:
        await _cancelled(rig, space, None)


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["host", "nvme", "device"])
async def test_cancelled_at_each_step_on_a_device(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    async with simulated(kinds, tmp_path, monkeypatch, space=space) as (rig, device):
        await _cancelled(rig, space, device)


async def _cancelled(rig: Rig, space: Space, device: SimDevice | None) -> None:
    seed = 0

    async def store() -> int:
        nonlocal seed
        seed += 1
        ids = kit.tokens(3, seed=seed)
        kv = kit.Memory(space.layout, len(ids), seed=seed)
        async with rig.engine.session(f"s{seed}") as session:
            result = await _model(session, ids, kv, device)
            return int(result.stored)

    async for run in cancel_at_each_step(store):
        await rig.at_rest()
        ids = kit.tokens(3, seed=seed)
        kv = kit.Memory(space.layout, len(ids), seed=seed)
        async with rig.engine.session("reader") as reader:
            tokens, back = await load(reader, ids)
        assert back.same(kv, tokens)
        assert run.outcome != "completed" or (run.value == 3 and tokens == len(ids))
    await usable(rig, space)


@pytest.mark.parametrize("times", [1, None])
async def test_a_failing_medium_stores_nothing_of_the_batch(
    times: int | None, tmp_path: Path
) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = Failing("write", times=times)
    async with running("nvme", tmp_path, space=space, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            result = await _model(session, ids, kv)
            assert result.skipped == 4
            assert result.blocks[0].reason is SkipReason.FAILED
            assert (await load(session, ids))[0] == 0
        await rig.at_rest()


async def test_a_lossy_load_inside_the_block_makes_what_is_stored_derived(tmp_path: Path) -> None:
    space = kit.space()
    old, ids = kit.tokens(2, seed=1), kit.tokens(4, seed=1)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with (
        running("host", tmp_path, space=space, compression="int8") as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        short = kit.Memory(space.layout, len(old), seed=1)
        await session.store(old, short.view)
        async with session.store_layers(ids, kv.view, start=32) as saver:
            async with session.match(old) as match:
                await match.load(into=kv.view)  # lossy: what is computed from it is not exact
            for layer in range(3):
                await saver.layer(layer)
        assert saver.result is not None
        assert saver.result.stored == 2
        core = rig.engine.core
        states = [core.decisions.state(p, core.clock()) for p in session.state.parts()]
        assert [state.exact for state in states] == [True, True, False, False]


@pytest.mark.every_loop
async def test_closing_the_engine_inside_the_block(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with (
        running("nvme", tmp_path, space=space) as rig,
        rig.engine.session("a") as session,
    ):
        with pytest.raises(ClosedError):  # noqa: PT012
            async with session.store_layers(ids, kv.view) as saver:
                await saver.layer(0)
                await rig.engine.aclose()
                await saver.layer(1)


async def test_memory_larger_than_a_slice_is_sealed_in_batches(tmp_path: Path) -> None:
    layout = Layout.uniform(4, 8, 256, "float32")
    space = Space(tierkv.Identity("wide", "rev1"), layout, block_tokens=16)  # 1 MiB a block
    ids = kit.tokens(40)
    kv = kit.Memory(layout, len(ids), seed=3)
    async with running("host", tmp_path, space=space, capacity="64MiB", tick=60) as rig:
        async with rig.engine.session("a") as session:
            hops = rig.engine.stats().thread_hops
            result = await _model(session, ids, kv)
            assert result.stored == 40
            # one a layer, and one for each slice of at most 32 MiB that is sealed
            assert rig.engine.stats().thread_hops - hops == 4 + 2
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()
