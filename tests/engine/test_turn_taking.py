"""Who may use a session when: waiting, leaving, closing, and waiting for oneself."""

from __future__ import annotations

import asyncio

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load
from tierkv.errors import ClosedError, SessionBusyError
from tierkv.workers import Signal

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
SPACE = kit.space()
IDS = kit.tokens(6)
KV = kit.Memory(SPACE.layout, 96, seed=1)
HOST = [tierkv.Tier("host", "4MiB")]


async def test_a_private_tail_does_not_hide_shorter_prompts() -> None:
    async with tierkv.open(tiers=HOST, space=SPACE) as engine, engine.session("a") as session:
        await session.store(IDS[:90], KV.view, tail=True)
        for length in range(91):
            async with session.match(IDS[:length]) as match:
                assert match.tokens == (90 if length == 90 else length // 16 * 16)


async def test_closing_wakes_who_waits_for_a_turn() -> None:
    waiting, told = Signal(), []
    engine = tierkv.open(tiers=HOST, space=SPACE, close_timeout=100)  # what it need not wait for
    async with engine, engine.session("a") as one, engine.session("a") as two:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                waiting.set()
                with pytest.raises(ClosedError):
                    async with two.match(IDS):
                        pass
                told.append("closed")

            await one.begin_turn()
            one.state.gone = True  # closing finds it even if its name was forgotten
            engine.forget_session("a")
            group.start_soon(wait)
            await waiting.wait()
            async with asyncio.timeout(30):
                await engine.aclose()
        assert told == ["closed"]
        one.end_turn()


async def test_leaving_a_session_leaves_its_matches() -> None:
    async with tierkv.open(tiers=HOST, space=SPACE) as engine:
        async with engine.session("a") as session:
            await session.store(IDS, KV.view)
            forgotten = session.match(IDS)
            await forgotten.__aenter__()
            assert engine.stats().leases == 1
        assert engine.stats().leases == 0
        with pytest.raises(ClosedError):
            await forgotten.load(into=KV.view)
        forgotten.close()  # harmless
        async with asyncio.timeout(30), engine.session("a") as again:
            assert (await load(again, IDS))[0] == 96
        await Rig(engine, {}).at_rest()


async def test_a_match_that_is_entered_while_its_session_is_left() -> None:
    async with tierkv.open(tiers=HOST, space=SPACE) as engine:
        session, other = engine.session("a"), engine.session("a")
        async with session, other, anyio.create_task_group() as group:

            async def enter() -> None:
                with pytest.raises(ClosedError, match="not open"):
                    async with session.match(IDS):
                        pass

            await other.begin_turn()
            group.start_soon(enter)
            await anyio.wait_all_tasks_blocked()
            await session.__aexit__(None, None, None)
            other.end_turn()
            await anyio.wait_all_tasks_blocked()
            async with other.match(IDS):  # the turn came back
                pass
            await session.__aenter__()
        await Rig(engine, {}).at_rest()


async def test_a_task_never_waits_for_itself() -> None:
    async with (
        asyncio.timeout(30),
        tierkv.open(tiers=HOST, space=SPACE) as engine,
        engine.session("a") as one,
        engine.session("a") as two,
    ):
        async with one.match(IDS):
            with pytest.raises(SessionBusyError, match="this task"):
                async with two.match(IDS):
                    pass
            with pytest.raises(SessionBusyError, match="this task"):
                await two.store(IDS, KV.view)
            await one.store(IDS, KV.view)  # the same handle nests
        async with two.match(IDS) as match:
            assert match.tokens == 96

        async def nest() -> None:  # another task takes part in the turn, then is done with it
            async with one.match(IDS):
                pass
            async with two.match(IDS):
                pass

        await one.begin_turn()
        async with anyio.create_task_group() as group:
            group.start_soon(nest)
            await anyio.wait_all_tasks_blocked()
            one.end_turn()


@pytest.mark.parametrize("kind", ["scope", "native"])
async def test_a_cancelled_waiter_is_cancelled_and_nothing_else(kind: str) -> None:
    async with tierkv.open(tiers=HOST, space=SPACE) as engine:
        one, two, three = (engine.session("a") for _ in range(3))
        async with one, two, three, anyio.create_task_group() as group:
            await one.begin_turn()
            ended: list[str] = []

            async def wait(patience: float) -> None:
                try:
                    if kind == "native":
                        async with asyncio.timeout(patience):
                            await two.begin_turn()
                    else:
                        with anyio.fail_after(patience):
                            await two.begin_turn()
                    two.end_turn()
                    ended.append("turn")
                except TimeoutError:
                    ended.append("cancelled")

            async def last() -> None:
                await three.begin_turn()
                three.end_turn()
                ended.append("last")

            group.start_soon(wait, 0.01)
            group.start_soon(last)
            async with asyncio.timeout(30):
                while not ended:  # noqa: ASYNC110 - the end of a task says nothing
                    await asyncio.sleep(0.001)
            assert ended == ["cancelled"]
            one.end_turn()
        assert ended == ["cancelled", "last"]
