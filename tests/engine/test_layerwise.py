"""Layer-wise restore is real: a layer is handed out before the next one has been read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.errors import LoadIncomplete
from tierkv.layout import Group, GroupKind, Layer, Layout, Space
from tierkv.mover.layers import BATCH_PARTS, LAYERS_AHEAD
from tierkv.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierkv.abc import Backend, IoResult, ReadRequest

pytestmark = pytest.mark.anyio


def _spy(backend: Backend, before: object) -> list[int]:
    """Count reads of a backend and let ``before(n)`` hold or fail the n-th."""
    calls: list[int] = []
    inner = backend.read

    async def read(requests: Sequence[ReadRequest], into: Sequence[memoryview]) -> list[IoResult]:
        calls.append(len(requests))
        await before(len(calls) - 1)  # type: ignore[operator]
        return await inner(requests, into)

    backend.read = read  # type: ignore[method-assign]
    return calls


@pytest.mark.every_loop
@pytest.mark.parametrize("layout", ["full", "sliding"])
async def test_each_layer_is_read_only_once_the_consumer_is_there(
    layout: str, tmp_path: Path
) -> None:
    space = kit.space(layout)
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, 64, seed=1)
    (tier,) = kit.tiers("nvme", tmp_path)
    backend = resolve("backends", "nvme")(tier)
    entered = [asyncio.Event() for _ in range(4)]
    gate = False

    async def before(number: int) -> None:
        if gate:
            await entered[number].wait()

    calls = _spy(backend, before)
    async with (
        tierkv.open(tiers=[tier], space=space, backends=[backend]) as engine,
        engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        gate = True
        back = kit.Memory(space.layout, 64)
        async with asyncio.timeout(60), session.match(ids) as match:
            layers = match.layers(into=back.view)
            count = sum(len(g.layers) for g in space.layout.groups)
            for number in range(count):
                # an eager load would wait here for layers that nobody has entered yet
                entered[number].set()
                await anext(layers)
                assert len(calls) <= number + 2 + LAYERS_AHEAD
            with pytest.raises(StopAsyncIteration):
                await anext(layers)
        assert back.same(kv, 64)
        assert len(calls) == count  # one backend call per layer


async def test_a_failing_layer_raises_load_incomplete_and_is_a_miss_afterwards(
    tmp_path: Path,
) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, 64, seed=1)
    (tier,) = kit.tiers("nvme", tmp_path)
    backend = resolve("backends", "nvme")(tier)

    async def before(number: int) -> None:
        if number == 1:
            raise OSError("gone")

    _spy(backend, before)
    async with (
        tierkv.open(tiers=[tier], space=space, backends=[backend]) as engine,
        engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, 64)
        async with session.match(ids) as match:
            layers = match.layers(into=back.view)
            assert await anext(layers) == 0
            with pytest.raises(LoadIncomplete) as caught:
                await anext(layers)
            assert caught.value.layer == 1
        async with session.match(ids) as match:
            assert match.tokens < 64
        async with asyncio.timeout(60):
            while engine.stats().staging_used:  # noqa: ASYNC110 - of layers that were read ahead
                await asyncio.sleep(0.001)
        assert engine.stats().leases == 0


async def test_layers_stored_in_another_order_than_they_are_numbered(tmp_path: Path) -> None:
    """The first range read of a part has to reach the layer wherever it stands in the frame."""
    layers = tuple(Layer.kv(index, 2, 256, "float32") for index in (3, 1, 2, 0))
    space = Space(tierkv.Identity("m", "r"), Layout((Group(GroupKind.FULL, layers),)), 16)
    ids = kit.tokens(3)
    kv = kit.Memory(space.layout, 48, seed=1)
    (tier,) = kit.tiers("nvme", tmp_path)
    async with tierkv.open(tiers=[tier], space=space) as engine, engine.session("a") as session:
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, 48)
        async with session.match(ids) as match:
            assert [x async for x in match.layers(into=back.view)] == [0, 1, 2, 3]
        assert back.same(kv, 48)


@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_many_blocks_travel_in_bounded_batches(kinds: str, tmp_path: Path) -> None:
    """Setting up a read of thousands of blocks at once would hold up the loop."""
    space = kit.space("latent", block=1)
    ids = list(range(2 * BATCH_PARTS + 9))
    kv = kit.Memory(space.layout, len(ids), seed=1)
    (tier,) = kit.tiers(kinds, tmp_path, "64MiB")
    backend = resolve("backends", kinds)(tier)

    async def before(number: int) -> None:
        pass

    calls = _spy(backend, before)
    async with (
        tierkv.open(tiers=[tier], space=space, backends=[backend]) as engine,
        engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, len(ids))
        async with session.match(ids) as match:
            layers = match.layers(into=back.view)
            assert [x async for x in layers] == [0]
            assert layers.by_tier == {kinds: len(ids)}
        assert back.same(kv, len(ids))
    assert calls == ([] if kinds == "host" else [BATCH_PARTS, BATCH_PARTS, 9])
