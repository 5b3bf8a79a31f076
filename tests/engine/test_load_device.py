"""Loads into a device's memory: on its stream, behind the caller's work, awaited, verified."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import kit
from tests.device.fake_cuda import FakeCudaDevice
from tests.engine.rig import Rig, load, running, usable
from tierkv.decisions.types import MissReason
from tierkv.errors import LoadIncomplete
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Corrupting, Gated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import tierkv

pytestmark = pytest.mark.anyio
BLOCKS = 4
KINDS = ("host", "nvme", "host+nvme")


@asynccontextmanager
async def with_device(
    kinds: str, path: Path, *, seed: int = 1, **settings: Any
) -> AsyncIterator[tuple[Rig, SimDevice]]:
    """An engine whose callers' tensors are in a simulated device's memory."""
    device = SimDevice(f"sim:{seed}")
    settings.setdefault("space", kit.space())
    async with running(kinds, path, **settings) as rig:
        rig.engine.core.devices.add(device)
        yield rig, device
    device.close()
    assert device.counters.hazards == 0, "memory was given back under running work"
    assert device.failed is None


async def _layers(session: tierkv.Session, ids: list[int]) -> kit.Memory:
    back = kit.Memory(session.space.layout, len(ids))
    async with session.match(ids) as match:
        async for _ in match.layers(into=back.view):
            pass
    return back


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("layout", sorted(kit.LAYOUTS))
@pytest.mark.parametrize("kinds", KINDS)
async def test_what_was_stored_comes_back(
    kinds: str, layout: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")  # memory given back too early is full of poison
    space = kit.space(layout)
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with with_device(kinds, tmp_path, space=space, compression=codec) as (rig, device):
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            before = device.counters.submissions
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            assert device.counters.submissions == before + 1  # one batch of copies
            rig.cool()
            assert (await _layers(session, ids)).same(kv, len(ids))
        await rig.at_rest()


async def test_tensors_of_inference_mode_can_be_filled(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with (
        with_device("host", tmp_path) as (rig, _),
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        with torch.inference_mode():
            back = kit.Memory(space.layout, len(ids))
        async with session.match(ids) as match:
            assert (await match.load(into=back.view)).tokens == len(ids)
        assert back.same(kv, len(ids))


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
async def test_the_callers_own_work_comes_first(
    kinds: str, layerwise: bool, tmp_path: Path
) -> None:
    """A kernel that still writes into the view when the load is called must not win."""
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with (
        with_device(kinds, tmp_path) as (rig, device),
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, len(ids))

        def kernel() -> None:
            time.sleep(0.05)  # longer than the load would take without it
            for layer in back.layers.values():
                for tensor in layer.values():
                    tensor.zero_()

        async with session.match(ids) as match:
            device.compute.submit(kernel)
            if layerwise:
                assert [x async for x in match.layers(into=back.view)] == [0, 1, 2]
            else:
                assert (await match.load(into=back.view)).tokens == len(ids)
        await device.wait(device.compute.record())
        assert back.same(kv, len(ids))


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", KINDS)
async def test_cancelled_at_each_step_nothing_is_written_afterwards(
    kinds: str, tmp_path: Path
) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    views: list[kit.Memory] = []
    async with with_device(kinds, tmp_path) as (rig, device):
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()

            async def once(layerwise: bool) -> None:
                rig.cool()
                views.append(kit.Memory(space.layout, len(ids)))
                async with session.match(ids) as match:
                    if layerwise:
                        async for _ in match.layers(into=views[-1].view):
                            pass
                    else:
                        assert (await match.load(into=views[-1].view)).tokens == len(ids)

            for layerwise in (False, True):
                async for run in cancel_at_each_step(lambda way=layerwise: once(way)):  # type: ignore[misc]
                    before = (
                        [t.clone() for x in views[-1].layers.values() for t in x.values()]
                        if views
                        else []
                    )
                    await rig.at_rest()
                    await device.wait(device.loads.record())
                    after = [t for x in views[-1].layers.values() for t in x.values()]
                    assert all(map(torch.equal, before, after)), f"written after {run}"
                    if run.outcome == "completed":
                        assert views[-1].same(kv, len(ids))
        await usable(rig, space)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_a_damaged_block_is_never_copied(kinds: str, layerwise: bool, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = Corrupting(0.5)
    fault.active = False
    async with with_device(kinds, tmp_path, faults={"nvme": [fault]}) as (rig, _):
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            fault.active = True
            back = kit.Memory(space.layout, len(ids))
            async with session.match(ids) as match:
                if layerwise:
                    with pytest.raises(LoadIncomplete):
                        async for _ in match.layers(into=back.view):
                            pass
                else:
                    result = await match.load(into=back.view)
                    assert (result.tokens, result.reason) == (0, MissReason.DAMAGED)
                    assert back.untouched()
            fault.active = False
            await session.store(ids, kv.view)
            assert (await load(session, ids))[0] == len(ids)
        await rig.at_rest()


@pytest.mark.parametrize("layerwise", [False, True])
async def test_a_device_that_refuses_work_is_a_miss(
    layerwise: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with with_device("host", tmp_path) as (rig, device):
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            copy = device.copy

            def broken(*args: Any) -> None:
                raise RuntimeError("out of memory, it says")

            device.copy = broken  # type: ignore[method-assign,assignment]
            back = kit.Memory(space.layout, len(ids))
            async with session.match(ids) as match:
                if layerwise:
                    with pytest.raises(LoadIncomplete, match="out of memory"):
                        await anext(match.layers(into=back.view))
                else:
                    result = await match.load(into=back.view)
                    assert (result.tokens, result.reason) == (0, MissReason.FAILED)
            assert back.untouched()
            device.copy = copy  # type: ignore[method-assign]
            assert (await load(session, ids))[0] == len(ids)  # nothing was given up for it
        await rig.at_rest()
    assert "refused" in caplog.text


@pytest.mark.every_loop
async def test_a_deadline_reports_what_is_in_place(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("read")
    async with with_device("host+nvme", tmp_path, faults={"nvme": [gate]}) as (rig, _):
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            with_prefix = kit.Memory(space.layout, len(ids))
            async with session.match(ids) as match:
                result = await match.load(into=with_prefix.view, deadline=0.05)
            assert (result.tokens, result.reason) == (0, MissReason.DEADLINE)
            assert with_prefix.untouched()
            gate.open_gate()
            async with asyncio.timeout(30):
                assert (await load(session, ids))[0] == len(ids)
        await rig.at_rest()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
async def test_by_way_of_the_cuda_device_s_own_plans(
    kinds: str, layerwise: bool, tmp_path: Path
) -> None:
    """Host and device memory are told apart here: each copy has one side on the device."""
    space = kit.space("mixed")
    ids = kit.tokens(BLOCKS)
    kv, back = kit.Memory(space.layout, len(ids), seed=1), kit.Memory(space.layout, len(ids))
    device = FakeCudaDevice()
    for named in back.layers.values():
        for name, tensor in named.items():
            memory = device.allocate(tensor.nbytes)
            assert memory is not None
            named[name] = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    async with running(kinds, tmp_path, space=space) as rig:
        rig.engine.core.devices.add(device)
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            async with session.match(ids) as match:
                if layerwise:
                    assert len([x async for x in match.layers(into=back.view)]) == 2
                else:
                    assert (await match.load(into=back.view)).tokens == len(ids)
            assert back.same(kv, len(ids))
        await rig.at_rest()
    device.close()
