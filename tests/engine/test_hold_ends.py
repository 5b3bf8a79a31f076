"""How standing leases end, and what they leave alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import running, usable
from tests.engine.test_hold import BLOCKS, IDS, SPACE, chill, stored, where
from tierkv.errors import ClosedError, ConfigError
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Hanging

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


async def test_cancelled_at_each_step(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path) as (rig, keys, _):
        holds = []

        async def once() -> int:
            rig.cool()
            hold = await rig.engine.hold(None, keys)
            holds.append(hold)
            return hold.blocks

        async for run in cancel_at_each_step(once):
            if run.outcome != "cancelled":
                assert run.value == BLOCKS
            while holds:
                holds.pop().release()
            await rig.at_rest()
            assert rig.engine.stats().leases == 0
        await usable(rig, SPACE)


async def test_closing_releases_all_and_ends_those_under_way(tmp_path: Path) -> None:
    fault = Hanging("read")
    fault.active = False
    space, kv = SPACE, kit.Memory(SPACE.layout, len(IDS), seed=1)
    async with running("host+nvme", tmp_path, space=space, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, kv.view)
            await session.flush()
            keys = list(session.state.chain.keys)
        held = await rig.engine.hold(None, keys[:4])
        chill(rig)
        fault.active = True
        job = rig.engine.workers.spawn(rig.engine.hold, None, keys, closing=True)
        async with asyncio.timeout(30):
            while not fault.entered:  # noqa: ASYNC110 - a thread says so
                await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.01, fault.release)
        async with asyncio.timeout(30):
            await rig.engine.aclose()
            await job.ended.wait()
        with pytest.raises(ClosedError):
            await job.wait()
        assert not held.held
        held.release()
        assert rig.engine.core.decisions.leases() == 0
        with pytest.raises(ClosedError):
            await rig.engine.hold(None, keys)


async def test_what_its_owner_forgets_is_gone_for_lookups_and_safe_until_released(
    tmp_path: Path,
) -> None:
    async with stored("host", tmp_path) as (rig, keys, _):
        hold = await rig.engine.hold(None, keys)
        await rig.engine.reset()
        assert where(rig) == [None] * BLOCKS
        assert rig.engine.stats().tiers["host"].entries == BLOCKS  # the bytes stay
        hold.release()
        assert rig.engine.stats().tiers["host"].entries == 0


async def test_no_turn_of_a_session_is_taken(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path) as (rig, keys, _):
        session = rig.engine.session("a")
        async with session, session.match(IDS):
            async with asyncio.timeout(30):
                hold = await rig.engine.hold(None, keys)
            assert hold.blocks == BLOCKS
        hold.release()


async def test_misuse_is_told(tmp_path: Path) -> None:
    async with running("nvme", tmp_path, space=SPACE) as rig:
        with pytest.raises(ConfigError, match="host"):
            await rig.engine.hold(None, [])
    async with running("host", tmp_path, space=None) as rig:  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="space"):
            await rig.engine.hold(None, [])
        with pytest.raises(ConfigError, match="fidelity"):
            await rig.engine.hold(SPACE, [], fidelity="any")
        with pytest.raises(ConfigError):
            await rig.engine.hold(SPACE, [], deadline="soon")
    with pytest.raises(ClosedError):
        await tierkv.open(tiers=[tierkv.Tier("host", "1MiB")]).hold(SPACE, [])
