"""Exact sessions, and KV that somebody went on from: what counts as exact, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import load
from tierkv.blocking import CacheManager
from tierkv.blocks import KeyChain, Media
from tierkv.decisions.index import EXACT
from tierkv.errors import ConfigError, IntegrityError, LoadIncomplete

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(6)
KV = kit.Memory(SPACE.layout, 96, seed=1)
WRONG = kit.Memory(SPACE.layout, 96, seed=2)
HOST = [tierkv.Tier("host", "4MiB")]
IMAGE, OTHER = (Media(20, digest * 32) for digest in (b"\1", b"\2"))


async def _lossy(path: Path, blocks: int = 2) -> list[tierkv.Tier]:
    """Tiers of which the slower one holds lossy copies of some blocks."""
    tiers = kit.tiers("nvme", path, codec="int8")
    async with (
        tierkv.open(tiers=tiers, space=SPACE) as engine,
        engine.session("first", fidelity="lossy") as session,
    ):
        await session.store(IDS[: blocks * kit.BLOCK], KV.view)
    return [*HOST, *tiers]


async def _matched(session: tierkv.Session, ids: list[int]) -> int:
    async with session.match(ids) as match:
        return match.tokens


async def test_i4_a_second_look_does_not_make_derived_kv_exact(tmp_path: Path) -> None:
    """Matches that load nothing, inside the one that loaded or after it."""
    tiers = await _lossy(tmp_path)
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        back = kit.Memory(SPACE.layout, 96)
        async with engine.session("in", fidelity="lossy") as session:
            async with session.match(IDS) as match:
                assert (await match.load(into=back.view)).tokens == 32
                assert await _matched(session, IDS) == 32
                assert await _matched(session, [1] * 32) == 0
                assert session.derived
            assert await _matched(session, IDS) == 32
            assert session.derived
        async with engine.session("in") as exact:  # to which there is nothing
            assert await _matched(exact, IDS) == 0
            await exact.store(IDS, WRONG.view, start=32)
            assert exact.derived
        async with engine.session("exact") as session:
            await session.store(IDS[:32], KV.view)
            assert await _matched(session, IDS) == 32


async def test_i4_what_is_computed_anew_after_a_match_in_vain_is_exact(tmp_path: Path) -> None:
    tiers = await _lossy(tmp_path)
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        async with engine.session("a", fidelity="lossy") as session:
            assert (await load(session, IDS))[0] == 32
        async with engine.session("a") as session:
            assert await _matched(session, IDS) == 0
            await session.store(IDS[:48], KV.view)  # from the first token on
            await session.store(IDS, KV.view, start=48)  # behind what was stored just now
            assert not session.derived
            tokens, back = await load(session, IDS)
            assert tokens == 96
            assert back.same(KV, 96)


async def test_i4_kv_that_outlived_its_engine_is_not_exact_to_a_lossy_session(
    tmp_path: Path,
) -> None:
    """The KV before ``start`` came about in another engine, perhaps behind lossy copies."""
    tiers = await _lossy(tmp_path)
    async with (
        tierkv.open(tiers=tiers, space=SPACE) as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        assert (await load(session, IDS))[0] == 32
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        async with engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, WRONG.view, start=32)
            assert session.derived
        async with engine.session("b", fidelity="lossy") as session:
            await session.store(IDS[:48], KV.view)
            await session.store(IDS, KV.view, start=48)
            assert not session.derived


@pytest.mark.parametrize("kinds", ["host", "nvme", "file"])
async def test_i4_an_exact_load_refuses_frames_that_say_that_they_are_derived(
    kinds: str, tmp_path: Path
) -> None:
    """Whatever the index takes them for."""
    async with tierkv.open(tiers=kit.tiers(kinds, tmp_path), space=SPACE) as engine:
        for way in ("load", "layers", "nowait"):
            async with engine.session(way, tenant=way, fidelity="lossy") as lossy:
                lossy.lineage = [tierkv.mover.load.Progress(derived="test")]
                await lossy.store(IDS, WRONG.view)
            index = engine.core.decisions._at.index
            for row in index.rows.values():
                index.flags[row] |= EXACT
            async with engine.session(way, tenant=way) as exact:
                back = kit.Memory(SPACE.layout, 96)
                async with exact.match(IDS) as match:
                    assert match.tokens == 96
                    if way == "load":
                        assert (await match.load(into=back.view)).tokens == 0
                        assert back.untouched()
                    elif way == "layers":
                        with pytest.raises(LoadIncomplete):
                            async for _ in match.layers(into=back.view):
                                pass
                    elif kinds == "host":
                        held = exact.get_nowait(0)
                        assert held is not None
                        with held, pytest.raises(IntegrityError, match="exact"):
                            held.tensor(0, "k")


async def test_i1_everything_that_takes_a_prompt_takes_its_media(tmp_path: Path) -> None:
    tiers = kit.tiers("host+nvme", tmp_path)
    async with (
        tierkv.open(tiers=tiers, space=SPACE) as engine,
        engine.session("a") as session,
    ):
        await session.store(IDS, KV.view, media=[IMAGE])
        there, not_there = ["host"] * 6, ["host", *[None] * 5]
        for media, tiers_ in (([IMAGE], there), ([OTHER], not_there), ([], not_there)):
            assert [b.tier for b in session.explain(IDS, media=media)] == tiers_
            assert [b.tier for b in await session.aexplain(IDS, media=media)] == tiers_
            assert [b.tier for b in engine.explain(IDS, media=media)] == tiers_
            async with engine.match_many([(session, IDS, 0, media)]) as (match,):
                assert match.tokens == sum(tier is not None for tier in tiers_) * kit.BLOCK
        session.remember(IDS, [IMAGE])
        assert [b.tier for b in session.explain()] == there
        assert [b.tier for b in await session.aexplain()] == there
        with pytest.raises(ConfigError, match="media"):
            session.explain(media=[IMAGE])
        with pytest.raises(ConfigError, match="media"):
            await session.aexplain(media=[IMAGE])
        with pytest.raises(ConfigError, match="media"):
            await engine.prefetch(session="a", media=[IMAGE])
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        for media, moved in (([], 1), ([OTHER], 0), ([IMAGE], 5)):
            job = await engine.prefetch(tokens=IDS, media=media)
            assert await job.wait() == moved


def test_i1_synchronous_callers_name_media_too(tmp_path: Path) -> None:
    with CacheManager(tiers=HOST, space=SPACE) as manager:
        manager.create_session("a")
        manager.store(IDS, KV.view, session="a", media=[IMAGE])
        for media, tokens in ((IMAGE, 96), (OTHER, 16)):
            back = kit.Memory(SPACE.layout, 96)
            assert manager.load(IDS, back.view, session="a", media=[media]).tokens == tokens
            assert back.same(KV, tokens)
        for session in ("a", None):
            told = manager.explain(IDS, session=session, media=[IMAGE])
            assert [block.tier for block in told] == ["host"] * 6
            assert manager.explain(IDS, session=session, media=[OTHER])[1].tier is None
            manager.prefetch(IDS, session=session, media=[IMAGE])


def test_i2_a_history_that_grew_has_the_keys_of_one_that_is_told_at_once() -> None:
    """Whatever was said before of its media, and however often the same is said."""
    root = SPACE.root("", b"")
    for before, after in (
        ([IMAGE], [IMAGE, IMAGE]),
        ([], [IMAGE]),
        ([IMAGE], [OTHER]),
        ([OTHER, IMAGE], [IMAGE]),
    ):
        grown, fresh = KeyChain(root, kit.BLOCK), KeyChain(root, kit.BLOCK)
        grown.follow(IDS[:40], before)
        shared = grown.follow(IDS, after)
        assert shared == (40 if set(before) == set(after) else IMAGE.position)
        fresh.follow(IDS, list(dict.fromkeys(after)))
        assert grown.keys == fresh.keys
