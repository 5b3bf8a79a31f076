"""Machine code of codecs is compiled beside the work: not on the loop, and nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import tierkv
from tests import kit
from tests.codecs.test_trials import put
from tests.engine.rig import load
from tierkv import jit
from tierkv.jit import copying, trials
from tierkv.layout import Layout, Space
from tierkv.pipeline import warming
from tierkv_codecs.int8 import Int8

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio
HOST = "64MiB"


def small_space(name: str = "small") -> Space:
    """Of bfloat16, for which there are loops; a block of 16 tokens is 32 KiB a tensor."""
    layout = Layout.uniform(2, 8, 128, "bfloat16")
    return Space(tierkv.Identity(name, "rev1"), layout, block_tokens=16)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What codecs try from now on, as in a new process, and in which threads."""
    copying.prepare()
    put(monkeypatch)
    monkeypatch.setattr(warming, "_warmed", {})
    found: list[tuple[str, int]] = []
    real = trials.Tried._try

    def watched(self: Any, key: Any) -> None:
        found.append((self.family, threading.get_ident()))
        real(self, key)

    monkeypatch.setattr(trials.Tried, "_try", watched)
    return found


@pytest.mark.every_loop
@pytest.mark.parametrize("chain", ["ecq4+rans", "int4", "rot4", "planes"])
async def test_nothing_is_compiled_on_the_loop(chain: str, tried: list[tuple[str, int]]) -> None:
    space, host = small_space(), [tierkv.Tier("host", HOST, codec=chain)]
    async with (
        tierkv.open(tiers=host, space=space) as engine,
        engine.session("a", fidelity="lossy") as a,
    ):
        found = []
        for turn in range(2):
            ids = kit.tokens(2, seed=turn)
            kv = kit.Memory(space.layout, len(ids), seed=1)
            await a.store(ids, kv.view)  # small: on the loop
            tokens, back = await load(a, ids)
            assert tokens == len(ids)
            found.append(back)
            if not turn:
                await kit.until(lambda: not warming.cold(space, chain))
        assert found[0].same(found[1], 32), "another result before than after"
    assert tried
    assert threading.get_ident() not in {thread for _, thread in tried}


async def test_a_space_that_comes_later_is_warmed_too(tried: list[tuple[str, int]]) -> None:
    space, chain = small_space("later"), "int4"
    host = [tierkv.Tier("host", HOST, codec=chain)]
    async with tierkv.open(tiers=host, tick=0.01) as engine:
        assert warming.cold(space, chain)
        async with engine.session("a", fidelity="lossy", space=space):
            await kit.until(lambda: not warming.cold(space, chain))
    assert threading.get_ident() not in {thread for _, thread in tried}


async def test_what_the_loop_asked_for_is_compiled_by_and_by(tried: list[tuple[str, int]]) -> None:
    sums: jit.Tried[Callable[[], int], int] = jit.Tried(
        "sums", lambda number: lambda: number, lambda code, number: code() == number
    )
    async with tierkv.open(tiers=[tierkv.Tier("host", HOST)], tick=0.01):
        assert sums(3) is None
        await kit.until(lambda: sums.known(3))
        assert sums(3) is not None
    assert threading.get_ident() not in {thread for _, thread in tried}


async def test_engines_of_raw_blocks_have_nothing_to_compile(
    tried: list[tuple[str, int]],
) -> None:
    assert not warming.cold(small_space(), "raw")
    space = small_space()
    async with (
        tierkv.open(tiers=[tierkv.Tier("host", HOST)], space=space, tick=0.01) as engine,
        engine.session("a") as a,
    ):
        ids = kit.tokens(2)
        await a.store(ids, kit.Memory(space.layout, len(ids), seed=1).view)
        await load(a, ids)
    assert tried == []


def _held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events: the first trial has begun; trials may go on."""
    begun, go_on = threading.Event(), threading.Event()
    real = trials.Tried._try

    def slow(self: Any, key: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        real(self, key)

    monkeypatch.setattr(trials.Tried, "_try", slow)
    return begun, go_on


async def test_closing_waits_for_one_piece_at_most(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = _held(monkeypatch)
    host = [tierkv.Tier("host", HOST, codec="K:int4,V:rot3")]
    engine = await tierkv.open(tiers=host, space=small_space()).start()
    assert not go_on.is_set(), "opening waited"
    await kit.until(begun.is_set)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.aclose)
        await kit.until(lambda: engine.core.closed)
        go_on.set()
    assert len(tried) == 1
    assert jit.behind(), "what is left is still noted"


def test_a_loop_that_ends_without_closing_leaves_the_others(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = _held(monkeypatch)
    engines = []

    async def main() -> None:
        host = [tierkv.Tier("host", HOST, codec="K:int4,V:rot3")]
        engines.append(await tierkv.open(tiers=host, space=small_space()).start())
        await kit.until(begun.is_set)
        # when the tasks of the loop are cancelled
        asyncio.get_running_loop().call_later(1, go_on.set)
        raise ValueError("ends here")

    with pytest.raises(ValueError, match="ends here"):
        asyncio.run(main())
    assert len(tried) == 1
    assert jit.behind(), "what is left is still noted"
    asyncio.run(engines[0].aclose())


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError()])
def test_a_codec_that_fails_on_the_sample_is_told_of(
    error: Exception,
    tried: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Int8, "encode", fail)
    with caplog.at_level(logging.WARNING, "tierkv"):
        warming.warm(small_space(), "int8")
    assert not warming.cold(small_space(), "int8")
    assert "int8 fails on a sample" in caplog.text
    assert type(error).__name__ in caplog.text
    assert not tried


def test_a_codec_that_cannot_even_be_planned_with_is_told_of(
    tried: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(Int8, "encoded_bytes", fail)
    with caplog.at_level(logging.WARNING, "tierkv"):
        warming.warm(small_space(), "int8")
    assert not warming.cold(small_space(), "int8"), "it would be rehearsed again and again"
    assert "int8: no plan: ZeroDivisionError: odd" in caplog.text
    assert not tried


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "float8_e4m3fn", "bool", "int64"])
def test_every_dtype_can_be_rehearsed(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    layout = Layout.uniform(1, 2, 64, dtype)
    space = Space(tierkv.Identity("m", "rev1"), layout, block_tokens=16)
    for chain in ("planes", "int8+rans", "K:rot4,V:ecq2+zstd", "lowrank"):
        warming.warm(space, chain)
        assert not warming.cold(space, chain)
    assert caplog.text == ""
