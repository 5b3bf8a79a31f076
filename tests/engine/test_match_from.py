"""Matches from a token on: what is before it need not be stored anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.test_load_from import BLOCKS, IDS, SIZE, FromOn, in_place, stored
from tierkv.blocks import part_id
from tierkv.decisions.types import EvictReason, MissReason
from tierkv.errors import LayoutError

if TYPE_CHECKING:
    from pathlib import Path

    import tierkv
    from tests.engine.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


def lose(rig: Rig, session: tierkv.Session, *blocks: int) -> None:
    """Forget every copy of these blocks."""
    keys, core = session.state.chain.keys, rig.engine.core
    groups = range(len(session.space.layout.groups))
    parts = [part_id(keys[block], group) for block in blocks for group in groups]
    core.free(core.decisions.forget(parts, EvictReason.REMOVED, core.clock()))


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_a_match_from_a_block_on_needs_nothing_before_it(
    kinds: str, layout: str, tmp_path: Path
) -> None:
    async with stored(kinds, tmp_path, layout=layout) as (rig, session, kv):
        lose(rig, session, 0, 2)
        mine = in_place(kv, 3 * SIZE)
        async with session.match(IDS, start=3 * SIZE) as match:
            assert (match.tokens, match.worth, match.reason) == (len(IDS), len(IDS), None)
            leased = {
                block
                for block, key in enumerate(session.state.chain.keys)
                for group in range(len(session.space.layout.groups))
                if rig.engine.core.decisions.state(part_id(key, group), 0.0).leases
            }
            assert min(leased) >= 3
            result = await match.load(FromOn(mine, 3 * SIZE))  # from where the match begins
            assert (result.tokens, result.reason) == (len(IDS), None)
            assert mine.same(kv, len(IDS))
            for start in (0, 2 * SIZE):
                with pytest.raises(LayoutError, match="nothing before it was looked up"):
                    await match.load(mine.view, start=start)
            with pytest.raises(LayoutError, match="token 0"):
                match.layers(mine.view)
            assert (await match.load(mine.view, start=5 * SIZE)).tokens == len(IDS)


@pytest.mark.parametrize("layout", kit.LAYOUTS)
async def test_a_hole_behind_the_start_of_a_match(layout: str, tmp_path: Path) -> None:
    async with stored("host", tmp_path, layout=layout) as (rig, session, kv):
        lose(rig, session, 5)
        mine = in_place(kv, 3 * SIZE)
        async with session.match(IDS, start=3 * SIZE) as match:
            result = await match.load(mine.view)
        # the only state is that of the last block
        blocks, reason = (3, "never_stored") if layout == "state" else (5, "removed")
        assert result.tokens == match.tokens == blocks * SIZE
        assert match.reason is not None
        assert match.reason.value == reason
        if layout != "state":  # the memory of which holds no state of token 48
            assert mine.same(kv, result.tokens)


@pytest.mark.parametrize("layout", ["full", "sliding", "latent"])
async def test_damage_behind_the_start_of_a_match(layout: str, tmp_path: Path) -> None:
    """What is left is looked up anew, without what is missing before the start."""
    async with stored("host", tmp_path, layout=layout) as (rig, session, kv):
        lose(rig, session, 1)
        memory = rig.engine.core.levels[0].memory
        assert memory is not None
        for part, generation, _ in list(rig.engine.core.decisions.parts(0)):
            if part.startswith(session.state.chain.keys[6]):
                buffer = memory.borrow(part, generation)
                assert buffer is not None
                buffer.memory[4096] ^= 0xFF
        mine = in_place(kv, 3 * SIZE)
        async with session.match(IDS, start=3 * SIZE) as match:
            assert match.tokens == len(IDS)
            result = await match.load(mine.view)
        assert (result.tokens, result.reason) == (6 * SIZE, MissReason.DAMAGED)
        assert mine.same(kv, 6 * SIZE)


async def test_a_match_that_begins_at_its_end_needs_nothing(tmp_path: Path) -> None:
    async with stored("nvme", tmp_path) as (rig, session, kv):
        lose(rig, session, *range(BLOCKS))
        mine = kit.Memory(kv.layout, len(IDS))
        async with session.match(IDS, start=len(IDS)) as match:
            assert (match.tokens, match.reason) == (len(IDS), None)
            assert rig.engine.core.decisions.leases() == 0
            assert (await match.load(mine.view)).tokens == len(IDS)
        assert mine.untouched()


async def test_match_many_with_a_start_each(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path) as (rig, session, kv), rig.engine.session("b") as two:
        await two.store(IDS, kv.view)
        lose(rig, session, 1)
        mine = [in_place(kv, 3 * SIZE), kit.Memory(kv.layout, len(IDS))]
        async with rig.engine.match_many([(session, IDS, 3 * SIZE), (two, IDS)]) as (a, b):
            results = await rig.engine.load_many([(a, mine[0].view), (b, mine[1].view)])
        assert [result.tokens for result in results] == [len(IDS), SIZE]
        assert mine[0].same(kv, len(IDS))
        with pytest.raises(LayoutError, match="start"):
            async with rig.engine.match_many([(session, IDS, 3)]):
                pass


async def test_only_what_is_loaded_of_a_match_is_weighed(tmp_path: Path) -> None:
    async with stored("nvme", tmp_path) as (rig, session, kv):
        core = rig.engine.core
        for _ in range(4):
            core.decisions.sample(0, "read", 10_000_000, 1000.0, core.clock())
        session.computed(1_000_000, 1.0)
        lose(rig, session, 0)
        async with session.match(IDS, start=2 * SIZE) as match:
            assert match.worth == 2 * SIZE
            assert "6 blocks" in match.rule
            mine = in_place(kv, 2 * SIZE)
            result = await match.load(mine.view)
            assert (result.tokens, result.reason) == (2 * SIZE, MissReason.SLOWER)
