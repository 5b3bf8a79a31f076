"""Stages of a load overlap: reading, verifying and copying take as long as the slowest of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

import tierkv
from tests import kit
from tierkv.decisions.types import MissReason
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.mover.load import load
from tierkv.registry import resolve
from tierkv.testing.virtual import Throttled, VirtualDevice, VirtualStream, run_virtual

if TYPE_CHECKING:
    from collections.abc import Coroutine

BLOCK = 64
WIDTH = 512  # float32 a token: 2 KiB, so that 8k tokens are 16 MiB
SPACE = Space(
    tierkv.Identity("wide", "r"),
    Layout(
        (
            Group(
                GroupKind.LATENT,
                (Layer(0, (TensorSpec("latent", "float32", (1, WIDTH)),)),),
            ),
        )
    ),
    block_tokens=BLOCK,
)
SPEED = 1e9


def _memory(tokens: int, fill: bool) -> dict[int, dict[str, torch.Tensor]]:
    flat = torch.zeros(tokens * WIDTH)
    if fill:
        flat.copy_(torch.arange(tokens * WIDTH))
    return {0: {"latent": flat.view(1, tokens, WIDTH)}}


async def _run(tokens: int, device: VirtualDevice | None) -> tuple[float, float, int]:
    """Seconds of one load, of its slowest stage alone, and backend calls."""
    loop = asyncio.get_running_loop()
    tier = tierkv.Tier("host", "600MiB")
    slow = Throttled(resolve("backends", "host")(tier), SPEED, latency=50e-6)
    async with tierkv.open(
        tiers=[tier], space=SPACE, backends=[slow], clock=loop.time, tick=1e6
    ) as engine:
        if device is not None:
            engine.core.devices.add(device)
        ids, kv = list(range(tokens)), _memory(tokens, fill=True)
        async with engine.session("a") as session:
            stored = await session.store(ids, tierkv.views.dense(kv))
            assert stored.stored == tokens // BLOCK
            back = _memory(tokens, fill=False)
            before, batches, start = slow.busy_s, slow.batches, loop.time()
            async with session.match(ids) as match:
                assert (await match.load(into=tierkv.views.dense(back))).tokens == tokens
            seconds = loop.time() - start
            assert torch.equal(back[0]["latent"], kv[0]["latent"])
            return seconds, slow.busy_s - before, slow.batches - batches


def _busy(device: VirtualDevice) -> float:
    assert isinstance(device.loads, VirtualStream)
    return device.loads.busy_s


@pytest.mark.parametrize("tokens", [8_192, pytest.param(32_768, marks=pytest.mark.stress)])
@pytest.mark.parametrize("copying", [None, 1.0, 4.0])
def test_reads_and_copies_overlap(tokens: int, copying: float | None) -> None:
    async def main() -> None:
        device = None if copying is None else VirtualDevice(SPEED * copying)
        seconds, reading, _ = await _run(tokens, device)
        slowest = reading if device is None else max(reading, _busy(device))
        assert seconds <= 1.10 * slowest, (seconds, slowest)

    _virtual(main())


def test_a_load_of_less_than_a_window_is_one_call() -> None:
    async def main() -> None:
        assert (await _run(4_096, None))[2] == 1
        assert (await _run(16_384, None))[2] > 10

    _virtual(main())


def _virtual(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


@pytest.mark.parametrize("blocks", [64, pytest.param(1000, marks=pytest.mark.stress)])
def test_f072_fifty_loads_of_one_prefix_take_hardly_longer_than_one(blocks: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        space = kit.space()
        tier = tierkv.Tier("host", "64MiB")
        slow = Throttled(resolve("backends", "host")(tier), 1e8, latency=1e-4)
        async with tierkv.open(
            tiers=[tier], space=space, backends=[slow], clock=loop.time, tick=1e6
        ) as engine:
            ids = kit.tokens(blocks)
            kv = kit.Memory(space.layout, len(ids), seed=1)
            async with engine.session("writer") as session:
                assert (await session.store(ids, kv.view)).stored == blocks

            async def reader(name: str) -> None:
                back = kit.Memory(space.layout, len(ids))
                async with engine.session(name) as mine, mine.match(ids) as match:
                    assert (await match.load(into=back.view)).tokens == len(ids)
                assert back.same(kv, len(ids))

            start = loop.time()
            await reader("one")
            one = loop.time() - start
            start = loop.time()
            async with anyio.create_task_group() as group:
                for number in range(50):
                    group.start_soon(reader, f"r{number}")
            assert loop.time() - start <= 1.5 * one

    _virtual(main())


@pytest.mark.parametrize("copying", [None, 1.0])
def test_layers_are_read_while_the_model_computes(copying: float | None) -> None:
    """Computing a layer takes as long as reading one: all of them take as long as one stage."""
    layers = 16
    layout = Layout.uniform(layers, 4, 64, "float32")
    space = Space(tierkv.Identity("deep", "r"), layout, block_tokens=BLOCK)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        device = None if copying is None else VirtualDevice(8 * SPEED * copying)
        tier = tierkv.Tier("host", "64MiB")
        slow = Throttled(resolve("backends", "host")(tier), SPEED)
        async with tierkv.open(
            tiers=[tier], space=space, backends=[slow], clock=loop.time, tick=1e6
        ) as engine:
            if device is not None:
                engine.core.devices.add(device)
            ids = kit.tokens(8, block=BLOCK)
            kv = kit.Memory(layout, len(ids), seed=1)
            async with engine.session("a") as session:
                await session.store(ids, kv.view)
                back = kit.Memory(layout, len(ids))
                before, start = slow.busy_s, loop.time()
                one_layer = 2 * 4 * 64 * 4 * len(ids) / SPEED
                async with session.match(ids) as match:
                    async for _ in match.layers(into=back.view):
                        await asyncio.sleep(one_layer)
                seconds, reading = loop.time() - start, slow.busy_s - before
                assert back.same(kv, len(ids))
                ideal = max(reading, layers * one_layer) + one_layer  # the first must come first
                copies = 0.0 if device is None else _busy(device)
                assert seconds <= 1.10 * ideal + copies, (seconds, ideal, copies)

    _virtual(main())


@pytest.mark.parametrize("copying", [None, 1.0])
def test_a_deadline_in_the_middle_keeps_what_came_until_then(copying: float | None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        device = None if copying is None else VirtualDevice(SPEED * copying)
        tier = tierkv.Tier("host", "100MiB")
        slow = Throttled(resolve("backends", "host")(tier), SPEED)
        tokens = 16_384
        async with tierkv.open(
            tiers=[tier], space=SPACE, backends=[slow], clock=loop.time, tick=1e6
        ) as engine:
            if device is not None:
                engine.core.devices.add(device)
            ids, kv = list(range(tokens)), _memory(tokens, fill=True)
            async with engine.session("a") as session:
                await session.store(ids, tierkv.views.dense(kv))
                back = _memory(tokens, fill=False)
                whole = tokens * WIDTH * 4 / SPEED
                start = loop.time()
                async with session.match(ids) as match:
                    plan = match.plan(tierkv.views.dense(back))  # without the cost model's advice
                    await load(engine.core, engine.runtime.fetcher, [plan], loop.time() + whole / 2)
                taken = loop.time() - start
                assert plan.progress.reason is MissReason.DEADLINE
                got = plan.progress.blocks * BLOCK
                assert 0.3 * tokens <= got <= 0.55 * tokens
                assert torch.equal(back[0]["latent"][:, :got], kv[0]["latent"][:, :got])
                assert taken <= 0.6 * whole

    _virtual(main())
