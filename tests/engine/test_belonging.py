"""Whose KV it is: media of partial blocks, KV behind lossy loads, and engines of other loops."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING

import anyio
import numpy
import pytest

import tierkv
from tests import kit
from tests.engine.rig import load
from tierkv.blocking import CacheManager
from tierkv.blocks import Media, as_token_ids
from tierkv.errors import ClosedError, LayoutError
from tierkv.workers.home import Home

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(2.5)
KV = kit.Memory(SPACE.layout, 40, seed=1)
HOST = [tierkv.Tier("host", "4MiB")]
IMAGE, OTHER = (Media(35, digest * 32) for digest in (b"\1", b"\2"))


async def _matched(session: tierkv.Session, ids: list[int], *media: Media) -> int:
    async with session.match(ids, media=media) as match:
        return match.tokens


async def test_f011_a_tail_with_another_image_is_a_miss() -> None:
    """The same placeholders in the partial block, and other content behind them."""
    async with tierkv.open(tiers=HOST, space=SPACE) as engine, engine.session("s") as session:
        await session.store(IDS, KV.view, tail=True, media=[IMAGE])
        assert await _matched(session, [*IDS, 7], IMAGE) == 40
        later = Media(40, b"\3" * 32)  # behind the tail: its KV does not depend on it
        assert await _matched(session, [*IDS, 7], IMAGE, later) == 40
        assert await _matched(session, [*IDS, 7], OTHER) == 32
        assert await _matched(session, [*IDS, 7]) == 32
        assert await _matched(session, [*IDS, 7], IMAGE, OTHER) == 32
        await session.store(IDS, KV.view, tail=True, media=[OTHER])  # not "present": another one
        assert await _matched(session, IDS, OTHER) == 40
        assert await _matched(session, IDS, IMAGE) == 32


async def test_a_tail_before_the_start_of_a_match_is_left_out() -> None:
    """The prompt went on from a partial block that is kept, and is in place up to behind it."""
    ids = [*IDS, *kit.tokens(3, seed=7)]
    async with tierkv.open(tiers=HOST, space=SPACE) as engine, engine.session("s") as session:
        await session.store(IDS, KV.view, tail=True)
        for start, tokens in ((0, 40), (32, 40), (48, 48), (80, 80)):
            async with session.match(ids, start=start) as match:
                assert match.tokens == tokens


async def test_explain_takes_a_tail_for_that_of_its_own_prompt_only() -> None:
    async with tierkv.open(tiers=HOST, space=SPACE) as engine, engine.session("s") as session:
        other = [*kit.tokens(2, seed=5), *IDS[32:]]  # other blocks, the same end
        await session.store(other, KV.view)
        await session.store(IDS, KV.view, tail=True)
        assert [block.tier for block in session.explain(IDS)] == ["host"] * 3
        assert [block.tier for block in session.explain(other)] == ["host", "host", None]
        assert await _matched(session, other) == 32


async def test_kv_behind_a_lossy_load_is_derived_in_the_next_handle_too(tmp_path: Path) -> None:
    """One handle a request, and KV that stays with the model from one request to the next."""
    ids, kv = kit.tokens(6), kit.Memory(SPACE.layout, 96, seed=1)
    wrong = kit.Memory(SPACE.layout, 96, seed=2)
    tiers = kit.tiers("nvme", tmp_path, codec="int8")
    async with (
        tierkv.open(tiers=tiers, space=SPACE) as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids[:32], kv.view)
    tiers = [*HOST, *tiers]
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        async with engine.session("a", fidelity="lossy") as session:
            assert (await load(session, ids[:32]))[0] == 32
        async with engine.session("a", fidelity="lossy") as session:
            assert session.derived
            await session.store(ids, wrong.view, start=32)
            assert session.fork("b").derived
        for fidelity in ("lossy", "exact"):
            async with engine.session("a", fidelity=fidelity) as session:
                async with session.match(ids[:48], start=32) as match:
                    assert match.tokens >= 32  # in place, and nothing of it is loaded
                assert session.derived
                await session.store(ids, wrong.view, start=32)
        async with engine.session("exact") as session:
            await session.store(ids[:32], kv.view)
            assert await _matched(session, ids) == 32
        async with engine.session("a", fidelity="lossy") as session:
            assert await _matched(session, [1] * 32) == 0  # from here on it is computed anew
            assert not session.derived


async def test_c5_an_engine_refuses_another_loop(tmp_path: Path) -> None:
    async with tierkv.open(tiers=kit.tiers("host+nvme", tmp_path), space=SPACE) as engine:
        async with engine.session("s") as session:
            await session.store(IDS, KV.view)

        async def match() -> None:
            async with engine.session("s") as other:
                await load(other, IDS)

        calls: list[Callable[[], Awaitable[object]]] = [
            match,
            session.begin_turn,
            engine.flush,
            engine.reset,
            engine.aclose,
            lambda: engine.prefetch(session="s"),
        ]
        refused: list[type[BaseException] | None] = []

        async def elsewhere() -> None:
            for call in calls:
                try:
                    await asyncio.wait_for(call(), 30)
                except Exception as error:  # noqa: BLE001 - told below
                    refused.append(type(error))
                else:
                    refused.append(None)

        await anyio.to_thread.run_sync(asyncio.run, elsewhere())
        assert refused == [ClosedError] * len(calls)
        async with engine.session("s") as session:
            assert (await load(session, IDS))[0] == 32


async def test_c5_an_engine_refuses_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tierkv.open(tiers=HOST, space=SPACE) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ClosedError, match="process that opened it"):
                async with engine.session("s"):
                    pass
        async with engine.session("s"):
            pass


def test_c5_a_forked_process_has_no_loop_and_is_refused() -> None:
    home = Home()

    async def settle() -> None:
        home.settle()
        home.refuse_elsewhere()

    asyncio.run(settle())
    with pytest.raises(ClosedError, match="process that opened it"):
        home.refuse_elsewhere()  # no loop runs, as in a child that was forked out of one


def test_sequences_that_cannot_be_sliced_are_token_ids() -> None:
    assert as_token_ids(deque([1, 2, 3])) == [1, 2, 3]


async def test_media_of_odd_types_leave_the_session_usable() -> None:
    with pytest.raises(LayoutError, match="token index"):
        Media(1.5, b"x")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="digest"):
        Media(1, "x")  # type: ignore[arg-type]
    assert type(Media(numpy.int64(3), b"x").position) is int  # type: ignore[arg-type]
    async with tierkv.open(tiers=HOST, space=SPACE) as engine, engine.session("s") as session:
        for wrong in (None, [None], "x", 5):
            with pytest.raises(LayoutError, match=r"sequence of tierkv\.Media"):
                await session.store(IDS, KV.view, media=wrong)  # type: ignore[arg-type]
        assert (await session.store(IDS, KV.view, media=[IMAGE])).stored == 2
        assert await engine.load_many([]) == []
        assert await engine.store_many([]) == []


def test_kv_behind_a_lossy_load_is_derived_for_synchronous_callers_too(tmp_path: Path) -> None:
    """Every call of a manager takes a handle of its own."""
    ids, kv = kit.tokens(6), kit.Memory(SPACE.layout, 96, seed=1)
    tiers = [*HOST, *kit.tiers("nvme", tmp_path, codec="int8")]
    for first in (True, False):
        with CacheManager(tiers=tiers, space=SPACE) as manager:
            manager.create_session("lossy", fidelity="lossy")
            if first:
                manager.store(ids[:32], kv.view, session="lossy")
                manager.flush()
                continue
            back, wrong = kit.Memory(SPACE.layout, 96), kit.Memory(SPACE.layout, 96, seed=2)
            assert manager.load(ids[:32], back.view, session="lossy").tokens == 32
            assert not back.same(kv, 32)
            manager.store(ids, wrong.view, start=32, session="lossy")
            manager.create_session("exact", fidelity="exact")
            manager.store(ids[:32], kv.view, session="exact")
            assert manager.load(ids, back.view, session="exact").tokens == 32
            assert back.same(kv, 32)
