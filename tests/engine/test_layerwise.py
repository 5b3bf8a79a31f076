"""Layer-wise restore is real: a layer is handed out before the next one has been read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tierkv.errors import LoadIncomplete
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
        async with asyncio.timeout(20), session.match(ids) as match:
            layers = match.layers(into=back.view)
            count = sum(len(g.layers) for g in space.layout.groups)
            for number in range(count):
                # an eager load would wait here for layers that nobody has entered yet
                entered[number].set()
                await anext(layers)
                assert len(calls) <= number + 2
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
        assert engine.stats().leases == 0
        assert engine.stats().staging_used == 0
