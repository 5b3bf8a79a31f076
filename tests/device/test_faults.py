"""An engine over the CUDA device's own code (on the fake), while the device breaks.

After a fault every call of CUDA fails, in every thread. An engine must come through that with
misses and refused blocks, and must still close.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.device.fake_cuda import FakeCudaDevice, FakeEvent
from tierkv.errors import LoadIncomplete
from tierkv.registry import resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import torch

pytestmark = pytest.mark.anyio

FAULT = "CUDA error: an illegal memory access was encountered"
KINDS = ["host", "device", "device+host"]


def there(device: FakeCudaDevice, memory: kit.Memory) -> kit.Memory:
    """Let these tensors be in the device's memory."""
    tensors: list[torch.Tensor] = [x for layer in memory.layers.values() for x in layer.values()]
    for tensor in tensors:
        low = tensor.data_ptr()
        device.spans.append((low, low + tensor.numel() * tensor.element_size()))
    return memory


@asynccontextmanager
async def running(kinds: str) -> AsyncIterator[tuple[tierkv.Engine, FakeCudaDevice]]:
    device = FakeCudaDevice()
    tiers, backends = [], []
    for kind in kinds.split("+"):
        tiers.append(tierkv.Tier(kind, "4MiB"))
        more = {"device": device} if kind == "device" else {}
        backends.append(resolve("backends", kind)(tiers[-1], **more))
    async with asyncio.timeout(60):
        async with tierkv.open(tiers=tiers, backends=backends, space=kit.space()) as engine:
            engine.core.devices.add(device)
            yield engine, device


@pytest.mark.parametrize("kinds", KINDS)
async def test_a_fault_costs_loads_and_stores_and_nothing_else(kinds: str) -> None:
    ids, other = kit.tokens(4), kit.tokens(4, seed=1)
    async with running(kinds) as (engine, device), engine.session("a") as session:
        kv = there(device, kit.Memory(session.space.layout, len(ids), seed=1))
        assert (await session.store(ids, kv.view)).stored == 4
        back = there(device, kit.Memory(session.space.layout, len(ids)))
        async with session.match(ids) as match:
            assert (await match.load(into=back.view)).tokens == len(ids)
        assert back.same(kv, len(ids))
        FakeEvent.broken = FAULT
        for _ in range(2):
            async with session.match(ids) as match:
                assert (await match.load(into=back.view)).tokens == 0
            async with session.match(ids) as match:
                with pytest.raises(LoadIncomplete):
                    async for _ in match.layers(into=back.view):
                        pass
            assert (await session.store(other, kv.view)).stored == 0
        async with session.store_layers(other, kv.view) as saver:
            for layer in range(3):
                await saver.layer(layer)
        assert saver.result is not None
        assert saver.result.stored == 0
        await engine.prefetch(session="a")


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", KINDS)
async def test_a_fault_while_work_is_under_way(kinds: str) -> None:
    ids = kit.tokens(4)
    async with running(kinds) as (engine, device), engine.session("a") as session:
        kv = there(device, kit.Memory(session.space.layout, len(ids), seed=1))
        back = there(device, kit.Memory(session.space.layout, len(ids)))
        assert (await session.store(ids[:32], kv.view)).stored == 2
        FakeEvent.held = []  # nothing ends any more

        async def load() -> int:
            async with session.match(ids) as match:
                return (await match.load(into=back.view)).tokens

        async def store() -> int:
            return (await session.store(ids, kv.view)).stored

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(load()), group.create_task(store())]
            await kit.until(lambda: len(FakeEvent.held or ()) >= 2)
            assert not any(task.done() for task in tasks)
            FakeEvent.broken = FAULT
        assert [task.result() for task in tasks] == [0, 0]


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", KINDS)
async def test_a_caller_that_is_cancelled_over_a_fault(kinds: str) -> None:
    ids = kit.tokens(4)
    async with running(kinds) as (engine, device), engine.session("a") as session:
        kv = there(device, kit.Memory(session.space.layout, len(ids), seed=1))
        FakeEvent.held = []
        task = asyncio.get_running_loop().create_task(session.store(ids, kv.view))
        await kit.until(lambda: FakeEvent.held)
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done(), "the device still reads the view"
        FakeEvent.broken = FAULT
        with pytest.raises(asyncio.CancelledError):
            await task
