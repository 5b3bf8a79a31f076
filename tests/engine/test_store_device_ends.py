"""Stores out of a device's memory: several batches, failures, and the end of the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import load
from tests.engine.simulated import late, simulated
from tierkv.decisions.types import SkipReason
from tierkv.errors import ClosedError, LayoutError
from tierkv.layout import Layout, Space
from tierkv.testing.faults import Failing
from tierkv.testing.streams import SimStream

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kinds", ["host", "device"])
async def test_a_device_that_cannot_copy_costs_the_store_only(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with simulated(kinds, tmp_path, monkeypatch, space=space) as (rig, device):
        async with rig.engine.session("a") as session:

            def broken(*_: object) -> None:
                raise RuntimeError("the device is out of order")

            with monkeypatch.context() as patch:
                patch.setattr(device, "copy", broken)
                result = await session.store(ids, kv.view)
            assert result.skipped == 4
            assert result.blocks[0].reason is SkipReason.FAILED
            assert (await load(session, ids))[0] == 0
            await rig.at_rest()
            assert (await session.store(ids, kv.view)).stored == 4
        await rig.at_rest()


@pytest.mark.parametrize("kinds", ["host", "nvme", "device"])
async def test_a_view_that_does_not_fit_is_refused_and_nothing_copied(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    view = kv.view
    kv.layers[2]["v"] = kv.layers[2]["v"].half()
    lying = kv.view
    monkeypatch.setattr(lying, "sample", view.sample)  # only the copy itself finds out
    async with simulated(kinds, tmp_path, monkeypatch, space=space) as (rig, device):
        async with rig.engine.session("a") as session:
            with pytest.raises(LayoutError):
                await session.store(ids, lying)
            assert device.counters.submissions == 0
        await rig.at_rest()


def _wide(blocks: int) -> tuple[Space, list[int], kit.Memory]:
    """KV that is large enough to travel in several batches: 1 MiB a block."""
    layout = Layout.uniform(4, 8, 256, "float32")
    space = Space(tierkv.Identity("wide", "rev1"), layout, block_tokens=16)
    ids = kit.tokens(blocks)
    return space, ids, kit.Memory(layout, len(ids), seed=3)


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["host", "nvme", "device"])
async def test_batches_overlap_and_come_in_order(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, ids, kv = _wide(12)
    async with simulated(
        kinds, tmp_path, monkeypatch, space=space, capacity="32MiB", staging="64MiB"
    ) as (rig, device):
        async with rig.engine.session("a") as session:
            async with asyncio.timeout(60):
                assert (await session.store(ids, late(device, kv).view)).stored == 12
            copies = [1] if kinds != "device" else [1, 1]  # and the headers
            assert device.counters.submissions == 12 * len(copies)
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_batch_is_copied_while_the_one_before_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy but the first is submitted before the batch ahead of it was waited for."""
    space, ids, kv = _wide(8)
    order: list[str] = []
    async with simulated(
        "host", tmp_path, monkeypatch, space=space, capacity="32MiB", staging="64MiB"
    ) as (rig, device):
        copy, wait = device.copy, device.wait

        def copying(*args: Any) -> None:
            order.append("copy")
            copy(*args)

        async def waiting(event: Any) -> None:
            order.append("wait")
            await wait(event)

        monkeypatch.setattr(device, "copy", copying)
        monkeypatch.setattr(device, "wait", waiting)
        async with rig.engine.session("a") as session:
            assert (await session.store(ids, late(device, kv).view)).stored == 8
        assert order[:2] == ["copy", "copy"]
        seen = {"copy": 0, "wait": 0}
        for what in order:
            seen[what] += 1
            assert seen["wait"] < seen["copy"] or seen["copy"] == 8
        await rig.at_rest()


async def test_a_failing_medium_under_overlap_leaves_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, ids, kv = _wide(12)
    for times in (1, 3):
        fault = Failing("write", times=times)
        async with simulated(
            "nvme",
            tmp_path / str(times),
            monkeypatch,
            space=space,
            staging="64MiB",
            faults={"nvme": [fault]},
        ) as (rig, device):
            async with rig.engine.session("a") as session:
                result = await session.store(ids, kv.view)
                assert result.stored + result.skipped == 12
                states = [b.state for b in result.blocks]
                assert states == sorted(states, reverse=True)  # stored ones first
                tokens, back = await load(session, ids)
                assert tokens == result.stored * 16
                assert back.same(kv, tokens)
                fault.active = False
                again = await session.store(ids, kv.view)
                assert again.stored == result.skipped
            await rig.at_rest()
            assert device.counters.submissions > 0


async def test_the_caller_may_say_what_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that runs in another thread, on its own stream, gives an event of that stream."""
    space = kit.space()
    ids = kit.tokens(3)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with simulated("host", tmp_path, monkeypatch, space=space) as (rig, device):
        memory = kit.Memory(space.layout, len(ids))
        own = device.loads  # any stream that is not the loop thread's own
        assert isinstance(own, SimStream)

        def kernel() -> None:
            time.sleep(0.02)
            for layer, named in kv.layers.items():
                for name, tensor in named.items():
                    memory.layers[layer][name].copy_(tensor)

        own.submit(kernel)
        async with rig.engine.session("a") as session:
            await session.store(ids, memory.view, ready=own.record())
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("kinds", ["host", "nvme", "device"])
async def test_closing_the_engine_ends_a_store_that_waits_for_the_device(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    ids = kit.tokens(3)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    ends: list[BaseException | None] = []
    async with simulated(kinds, tmp_path, monkeypatch, space=space) as (rig, device):
        busy = threading.Event()
        device.compute.submit(lambda: bool(busy.wait(60)))

        async def store() -> None:
            try:
                async with rig.engine.session("a") as session:
                    await session.store(ids, kv.view)
            except ClosedError as error:
                ends.append(error)
            else:
                ends.append(None)

        async with asyncio.timeout(30), anyio.create_task_group() as group:
            group.start_soon(store)
            await kit.until(lambda: device.counters.stored_bytes)  # submitted, and not yet run
            group.start_soon(rig.engine.aclose)
            await asyncio.sleep(0.02)
            assert ends == []
            busy.set()
        assert len(ends) == 1
        assert rig.engine.core.decisions.reserved(0) == 0
        assert rig.engine.core.staging.used == 0
