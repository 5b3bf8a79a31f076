"""Sessions: turns, forks, tails, fidelity, tenants, clearing and destroying."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

import tierkv
from tests import kit
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, ConfigError, SessionBusyError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
HOST = [tierkv.Tier("host", "4MiB")]


async def test_tenants_and_salts_never_share() -> None:
    space = kit.space()
    ids = kit.tokens(2)
    kv = kit.Memory(space.layout, 32, seed=1)
    async with tierkv.open(tiers=HOST, space=space) as engine:
        async with engine.session("a", tenant="x") as a:
            await a.store(ids, kv.view)
        for other in (
            engine.session("a", tenant="y"),
            engine.session("b", tenant="x", salt=b"s"),
            engine.session("a"),
        ):
            async with other, other.match(ids) as match:
                assert match.tokens == 0
                assert match.reason is MissReason.NEVER_STORED
        async with engine.session("b", tenant="x") as b, b.match(ids) as match:
            assert match.tokens == 32  # content-addressed sharing inside a tenant


async def test_shared_blocks_are_counted_once() -> None:
    space = kit.space()
    ids = kit.tokens(2)
    kv = kit.Memory(space.layout, 32, seed=1)
    async with tierkv.open(tiers=HOST, space=space) as engine:
        async with engine.session("a") as a:
            await a.store(ids, kv.view)
            used = engine.stats().used["host"]
            async with a.fork("b") as b:
                assert b.token_ids == ids
                result = await b.store(ids, kv.view)
                assert result.present == 2
        assert engine.stats().used["host"] == used
        with pytest.raises(ConfigError, match="has a history"):
            async with engine.session("a") as a:
                a.fork("b")


async def test_a_fork_diverges_and_both_branches_hit() -> None:
    space = kit.space()
    ids, left, right = kit.tokens(2), kit.tokens(1, seed=5), kit.tokens(1, seed=6)
    kv_left = kit.Memory(space.layout, 48, seed=1)
    kv_right = kit.Memory(space.layout, 48, seed=1)
    async with tierkv.open(tiers=HOST, space=space) as engine, engine.session("a") as a:
        await a.store(ids + left, kv_left.view)
        async with a.fork("b") as b:
            await b.store(ids + right, kv_right.view, start=32)
        for session, prompt in ((a, ids + left), (a, ids + right)):
            async with session.match(prompt) as match:
                assert match.tokens == 48


async def test_turns_are_serialised_or_refused() -> None:
    space = kit.space()
    ids = kit.tokens(1)
    order: list[str] = []
    async with tierkv.open(tiers=HOST, space=space) as engine:

        async def turn(name: str) -> None:
            async with engine.session("s") as session, session.match(ids):
                order.append(name)
                await anyio.sleep(0.01)
                order.append(name)

        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(turn, name)
    assert order[0::2] == order[1::2]
    async with tierkv.open(tiers=HOST, space=space, busy="refuse") as engine:
        async with engine.session("s") as one, engine.session("s") as two, one.match(ids):
            with pytest.raises(SessionBusyError, match="turn running"):
                async with two.match(ids):
                    pass
        async with engine.session("s") as one, one.match(ids):
            pass


async def test_a_cancelled_waiter_does_not_keep_the_turn() -> None:
    space = kit.space()
    ids = kit.tokens(1)
    async with (
        tierkv.open(tiers=HOST, space=space) as engine,
        engine.session("s") as one,
        engine.session("s") as two,
    ):
        async with one.match(ids):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(two.begin_turn(), 0.01)
        async with asyncio.timeout(30):
            async with two.match(ids):
                pass


async def test_clear_and_destroy() -> None:
    space = kit.space()
    ids = kit.tokens(2.5)
    kv = kit.Memory(space.layout, 40, seed=1)
    async with tierkv.open(tiers=HOST, space=space) as engine:
        async with engine.session("a") as a:
            await a.store(ids, kv.view, tail=True)
            assert a.info().tokens == 40
            a.clear()
            assert a.info().tokens == 0
            async with a.match(ids) as match:
                assert match.tokens == 32  # shared blocks stay; the private tail is gone
            a.destroy()
            a.destroy()
        assert engine.sessions() == []


async def test_f015_f018_partial_tail_is_private_exact_and_declared() -> None:
    space = kit.space()
    ids = kit.tokens(6)
    kv = kit.Memory(space.layout, 96, seed=1)
    async with tierkv.open(tiers=HOST, space=space) as engine, engine.session("a") as a:
        await a.store(ids[:88], kv.view)  # 5.5 blocks, the tail not declared
        for length in (83, 88, 94):
            async with a.match(ids[:length]) as match:
                assert match.tokens == 80
        await a.store(ids[:88], kv.view, tail=True)
        for length, expected in ((83, 80), (88, 88), (94, 88)):
            async with a.match(ids[:length]) as match:
                assert match.tokens == expected
                back = kit.Memory(space.layout, 96)
                loaded = await match.load(into=back.view)
                assert loaded.tokens == expected
                assert back.same(kv, expected)
                assert back.untouched(expected)
        other = [*ids[:84], 1, 2, 3, 4]
        async with a.match(other) as match:
            assert match.tokens == 80
        async with engine.session("b") as b, b.match(ids[:88]) as match:
            assert match.tokens == 80  # private
        before = engine.stats().used["host"]
        await a.store(ids[:90], kv.view, tail=True)  # replaces the old tail
        assert engine.stats().used["host"] <= before + 4096


async def test_derived_kv_is_a_miss_for_exact_sessions(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, 64, seed=1)
    lossy_tier = [tierkv.Tier("host", "4MiB", codec="int8")]
    async with tierkv.open(tiers=lossy_tier, space=space) as engine:
        async with engine.session("l", fidelity="lossy") as lossy:
            await lossy.store(ids[:32], kv.view)
            async with lossy.match(ids) as match:
                assert match.tokens == 32
                back = kit.Memory(space.layout, 64)
                await match.load(into=back.view)
            await lossy.store(ids, kv.view, start=32)
            async with lossy.match(ids) as match:
                assert match.tokens == 64
        async with engine.session("e") as exact:
            async with exact.match(ids) as match:
                assert match.tokens == 0
                assert match.reason is MissReason.FIDELITY
            report = exact.explain(ids)
            assert [b.reason for b in report] == [MissReason.FIDELITY] * 4
            assert not report[3].exact


async def test_misuse_is_told_clearly() -> None:
    space = kit.space()
    ids = kit.tokens(1)
    kv = kit.Memory(space.layout, 16, seed=1)
    async with tierkv.open(tiers=HOST) as engine:
        with pytest.raises(ConfigError, match="no space"):
            engine.session("a")
        session = engine.session("a", space=space)
        with pytest.raises(ClosedError, match="not open"):
            await session.store(ids, kv.view)
        async with session:
            match = session.match(ids)
            with pytest.raises(ClosedError, match="not open"):
                await match.load(into=kv.view)
            with pytest.raises(ConfigError, match="session= or tokens="):
                await engine.prefetch()
    with pytest.raises(ClosedError):
        engine.session("a", space=space)
