"""Loads of raw blocks out of RAM by the window: as right as block by block, with fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import load, running
from tierkv.decisions.types import MissReason
from tierkv.mover import load as loads
from tierkv.mover import plain
from tierkv.mover.landing import Landing
from tierkv.testing.cancel import cancel_at_each_step

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.rig import Rig
    from tierkv.session import Session

pytestmark = pytest.mark.anyio
SPACE = kit.space()
BLOCKS = 24
IDS = kit.tokens(BLOCKS, seed=3)
KV = kit.Memory(SPACE.layout, 16 * BLOCKS, seed=3)


class _Seen:
    """Which blocks went which way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: list[int] = []
        self.other: list[int] = []
        account, landing = plain._account, Landing

        def counted(core: Any, plan: Any, parts: Any) -> None:
            self.plain += [part.block for part in parts]
            account(core, plan, parts)

        def landed(core: Any, fetcher: Any, window: Any) -> Any:
            self.other += [step.block for step in window]
            return landing(core, fetcher, window)

        monkeypatch.setattr(plain, "_account", counted)
        monkeypatch.setattr(loads, "Landing", landed)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> _Seen:
    return _Seen(monkeypatch)


@pytest.fixture(params=["inline", "in a thread"], autouse=True)
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "inline":
        monkeypatch.setattr(plain, "INLINE_BYTES", 0)


def frame(rig: Rig, session: Session, block: int) -> memoryview:
    """The bytes of a block where they lie."""
    with session.get_nowait(block) as held:  # type: ignore[union-attr]
        found = held._frame()
    assert not found.readonly
    return found


async def test_all_of_a_history_goes_the_short_way(seen: _Seen, tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            before = rig.engine.core.bytes_copied
            hops = rig.engine.workers.thread_hops
            async with session.match(IDS) as match:
                back = kit.Memory(SPACE.layout, 16 * BLOCKS)
                done = await match.load(back.view)
                nbytes = sum(part.nbytes for part in match._found.parts)
            assert (done.tokens, done.by_tier, done.reason) == (len(IDS), {"host": len(IDS)}, None)
            assert back.same(KV, len(IDS))
            assert rig.engine.core.bytes_copied - before == nbytes, "each byte once"
            assert rig.engine.workers.thread_hops - hops <= 1
        assert (seen.plain, seen.other) == (list(range(BLOCKS)), [])
        await rig.at_rest()


async def test_windows_follow_each_other(
    seen: _Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plain, "_AT_ONCE", 7)
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert back.same(KV, tokens)
        assert seen.plain[:21] == list(range(21))
        assert seen.plain + seen.other == list(range(BLOCKS)), "a rest may be too short to pay"
        await rig.at_rest()


@pytest.mark.parametrize("bad", [0, 11, BLOCKS - 1])
@pytest.mark.parametrize("place", ["payload", "header", "padding of the header"])
async def test_damage_ends_it_before_the_block(
    bad: int, place: str, seen: _Seen, tmp_path: Path
) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            at = {"payload": -100, "header": 70, "padding of the header": 4000}[place]
            frame(rig, session, bad)[at] ^= 1
            back = kit.Memory(SPACE.layout, 16 * BLOCKS)
            async with session.match(IDS) as match:
                done = await match.load(back.view)
            assert done.tokens == 16 * bad
            assert done.reason is MissReason.DAMAGED
            assert back.same(KV, 16 * bad), "nothing of the damaged block, nor of what follows"
            assert session.get_nowait(bad) is None, "it is forgotten"
            stored = await session.store(IDS, KV.view)
            assert stored.stored >= 1
            assert (await load(session, IDS))[0] == len(IDS)
        assert seen.plain[: min(bad, 1)] == [0][: min(bad, 1)]
        await rig.at_rest()


@pytest.mark.parametrize("bad", [0, 11, BLOCKS - 1])
async def test_damage_in_a_view_of_the_engines_is_not_reported_either(
    bad: int, seen: _Seen, tmp_path: Path
) -> None:
    """It may hold wrong bytes behind the last token that is reported."""
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            frame(rig, session, bad)[-100] ^= 1
            back = kit.Memory(SPACE.layout, 16 * BLOCKS)
            async with session.match(IDS) as match:
                done = await match.load(tierkv.views.dense(back.layers, owned=True))
                assert session.lineage[-1].spilled
            assert (done.tokens, done.reason) == (16 * bad, MissReason.DAMAGED)
            assert all(
                torch.equal(t[:, : 16 * bad], KV.layers[n][name][:, : 16 * bad])
                for n, named in back.layers.items()
                for name, t in named.items()
            )
            assert seen.plain == list(range(bad))
        await rig.at_rest()


async def test_without_verification_nothing_is_summed(seen: _Seen, tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE, verify_host=False) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            frame(rig, session, 3)[-100] ^= 1
            assert (await load(session, IDS))[0] == len(IDS)
        assert seen.plain == list(range(BLOCKS))
        await rig.at_rest()


async def test_a_start_and_a_private_tail(seen: _Seen, tmp_path: Path) -> None:
    ids = [*IDS, 1, 2, 3]
    kv = kit.Memory(SPACE.layout, len(ids), seed=4)
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view, tail=True)
            back = kit.Memory(SPACE.layout, len(ids))
            async with session.match(ids, start=32) as match:
                done = await match.load(back.view)
            assert done.tokens == len(ids)
            assert done.by_tier == {"host": len(ids) - 32}
            whole = kit.Memory(SPACE.layout, len(ids))
            async with session.match(ids) as match:
                assert (await match.load(whole.view)).tokens == len(ids)
            assert whole.same(kv, len(ids))
        assert seen.plain == [*range(2, BLOCKS), *range(BLOCKS)]
        assert seen.other == [BLOCKS, BLOCKS], "the partial block"
        await rig.at_rest()


async def test_a_block_of_another_chain_is_left_to_others(seen: _Seen, tmp_path: Path) -> None:
    tiers = {"codec": "zstd"}
    async with running("host", tmp_path, space=SPACE, options=tiers) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert back.same(KV, tokens)
        assert (seen.plain, seen.other) == ([], list(range(BLOCKS)))
        await rig.at_rest()


@pytest.mark.every_loop
async def test_wherever_it_is_cancelled_nothing_is_written_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plain, "_AT_ONCE", 9)
    views: list[kit.Memory] = []
    async with (
        running("host", tmp_path, space=SPACE) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view)

        async def once() -> int:
            views.append(kit.Memory(SPACE.layout, 16 * BLOCKS))
            async with session.match(IDS) as match:
                return (await match.load(views[-1].view)).tokens

        async for run in cancel_at_each_step(once):
            before = [t.clone() for x in views[-1].layers.values() for t in x.values()]
            await rig.at_rest()
            after = [t for x in views[-1].layers.values() for t in x.values()]
            assert all(map(torch.equal, before, after)), f"written after {run}"
            if run.outcome == "completed":
                assert run.value == len(IDS)
                assert views[-1].same(KV, len(IDS))
