"""Predictors in a running engine: what they bring, and what the engine's own books say of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv import registry
from tierkv.decisions.lines import LineLog
from tierkv.decisions.log import replay
from tierkv.decisions.prefetch_log import PREFETCH_LINE, replay_prefetching
from tierkv.decisions.types import EvictReason
from tierkv.engine.compose import make_decisions
from tierkv.engine.predicting import make_prefetching
from tierkv.errors import ConfigError
from tierkv.testing.faults import Failing, Gated

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.decisions.predict import PrefetchFigures

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(4)
KV = kit.Memory(SPACE.layout, 64, seed=1)
FRAME = 12 * 1024
BOOK = kit.tokens(32, seed=5)
BOOK_KV = kit.Memory(SPACE.layout, 512, seed=5)


def books(rig: Rig, name: str = "arrival") -> PrefetchFigures:
    return rig.engine.stats().prefetch[name]


def outcomes(figures: PrefetchFigures) -> tuple[int, ...]:
    """(issued, used, late, wasted, refused)."""
    return figures.issued, figures.used, figures.late, figures.wasted, figures.refused


async def stored(rig: Rig, name: str, ids: list[int], kv: kit.Memory) -> None:
    """A session's KV, in the slow tier alone."""
    async with rig.engine.session(name) as session:
        await session.store(ids, kv.view)
        await session.flush()
    rig.cool()


@pytest.mark.parametrize("kinds", ["host+nvme", "host+file", "device+nvme", "device+host+nvme"])
async def test_a_request_that_is_announced_is_a_fast_hit(kinds: str, tmp_path: Path) -> None:
    async with running(kinds, tmp_path, space=SPACE) as rig:
        await stored(rig, "a", IDS, KV)
        if kinds.count("+") == 2:
            await rig.settle()
            core = rig.engine.core
            core.free(
                core.decisions.dropped(
                    [(p, g) for p, g, _ in core.decisions.parts(1)],
                    1,
                    EvictReason.CAPACITY,
                    core.clock(),
                )
            )
        job = await rig.engine.prefetch(session="a")
        await job.wait()
        brought = books(rig).issued
        assert brought > 0
        slow = kinds.split("+")[-1]
        reads = rig.calls(slow, "read")
        async with rig.engine.session("a") as session:
            tokens, back = await load(session, IDS)
            assert tokens == 64
            assert back.same(KV, 64)
        assert rig.calls(slow, "read") == reads
        assert outcomes(books(rig)) == (brought, brought, 0, 0, 0)
        assert books(rig).precision == 1.0
        await rig.at_rest()


async def test_between_match_and_load_the_bytes_come_nearer(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, prefetch="arrival") as rig:
        await stored(rig, "a", IDS, KV)
        async with rig.engine.session("a") as session, session.match(IDS) as match:
            await rig.settle()  # the request waits for its turn on the model
            reads = rig.calls("nvme", "read")
            back = kit.Memory(SPACE.layout, 64)
            result = await match.load(into=back.view)
            assert result.by_tier == {"host": 64}
            assert back.same(KV, 64)
            assert rig.calls("nvme", "read") == reads == 1
        assert outcomes(books(rig)) == (4, 4, 0, 0, 0)
        await rig.at_rest()


async def test_a_load_at_once_owes_nothing_to_a_prefetch(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, prefetch="arrival") as rig:
        await stored(rig, "a", IDS, KV)
        for _ in range(2):  # from the slow tier, and then from the fast one
            async with rig.engine.session("a") as session:
                assert (await load(session, IDS))[0] == 64
            await rig.settle()
        assert rig.calls("nvme", "read") == 1
        assert outcomes(books(rig)) == (0, 0, 0, 0, 0)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_who_asks_while_it_is_on_its_way_is_early(tmp_path: Path) -> None:
    gate = Gated("read")
    async with running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        await stored(rig, "a", IDS, KV)
        job = await rig.engine.prefetch(session="a")
        await gate.arrived()
        async with rig.engine.session("a") as session:
            loading = rig.engine.workers.spawn(load, session, IDS)
            while books(rig).late < 4:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
            gate.open_gate()
            assert (await loading.wait())[0] == 64
        await job.wait()
        assert outcomes(books(rig)) == (4, 0, 4, 0, 0)
        await rig.at_rest()


async def test_what_fails_is_refused_and_gives_its_budget_back(tmp_path: Path) -> None:
    fault = Failing("read", times=1)
    async with running(
        "host+nvme", tmp_path, space=SPACE, faults={"nvme": [fault]}, prefetch_budget="1GiB"
    ) as rig:
        await stored(rig, "a", IDS, KV)
        assert await (await rig.engine.prefetch(session="a")).wait() == 0
        assert outcomes(books(rig)) == (4, 0, 0, 0, 4)
        assert not rig.engine.runtime.prefetcher.books.any_out
        await rig.at_rest()


async def test_a_predictor_that_is_wrong_turns_itself_off(tmp_path: Path) -> None:
    """Users who look at the beginning of a document only: `chain` bets on the rest in vain."""
    async with running(
        "host+nvme", tmp_path, space=SPACE, capacity=40 * FRAME, prefetch="chain"
    ) as rig:
        wrong = 0
        for number in range(12):
            ids, kv = kit.tokens(16, seed=100 + number), kit.Memory(SPACE.layout, 256, seed=number)
            await stored(rig, f"doc-{number}", ids, kv)
            async with rig.engine.session(f"reader-{number}") as session:
                assert (await load(session, ids[:32]))[0] == 32
            await rig.settle()
            rig.cool()  # the fast tier is needed for something else
            if not books(rig, "chain").enabled:
                wrong = number
                break
        got = books(rig, "chain")
        assert 8 <= wrong + 1 < 12
        assert not got.enabled
        assert (got.times_off, got.used, got.late) == (1, 0, 0)
        assert got.issued == got.wasted >= 64
        reads = rig.calls("nvme", "read")
        async with rig.engine.session("another") as session:
            assert (await load(session, BOOK[:16]))[0] == 0
        await rig.settle()
        assert (books(rig, "chain").issued, rig.calls("nvme", "read")) == (got.issued, reads)
        page = rig.engine.metrics.scrape().decode()
        assert 'tierkv_prefetch_enabled{predictor="chain"} 0.0' in page
        line = f'tierkv_prefetch_outcomes_total{{outcome="wasted",predictor="chain"}} {got.wasted}'
        assert line in page
        await rig.at_rest()


async def test_chain_brings_what_followed_last_time(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, prefetch="chain") as rig:
        await stored(rig, "book", BOOK, BOOK_KV)
        async with rig.engine.session("asker") as session:
            assert (await load(session, BOOK[:32]))[0] == 32
            await rig.settle()
            tokens, back = await load(session, BOOK)
            assert tokens == 512
            assert back.same(BOOK_KV, 512)
        assert outcomes(books(rig, "chain")) == (30, 30, 0, 0, 0)
        await rig.at_rest()


async def test_sequential_reads_ahead_of_a_reader(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE, prefetch="sequential") as rig:
        await stored(rig, "book", BOOK, BOOK_KV)
        async with rig.engine.session("reader") as session:
            for blocks in range(4, 33, 4):
                tokens, back = await load(session, BOOK[: 16 * blocks])
                assert tokens == 16 * blocks
                assert back.same(BOOK_KV, 16 * blocks)
                await rig.settle()
        got = books(rig, "sequential")
        assert (got.used, got.late, got.wasted, got.refused) == (24, 0, 0, 0)
        assert rig.calls("nvme", "read") < 8
        await rig.at_rest()


async def test_return_time_takes_a_hint(tmp_path: Path) -> None:
    async with running(
        "host+nvme", tmp_path, space=SPACE, prefetch="return_time", tick=0.01
    ) as rig:
        await stored(rig, "a", IDS, KV)
        async with rig.engine.session("a") as session:
            async with session.match(IDS):
                pass
            session.hint(next_in=0.0, stop_reason="tool_use")
            while rig.engine.explain(IDS)[-1].tier != "host":  # noqa: ASYNC110 - a tick does it
                await asyncio.sleep(0.001)
            await rig.settle()
            assert (await load(session, IDS))[0] == 64
        assert outcomes(books(rig, "return_time")) == (4, 4, 0, 0, 0)
        await rig.at_rest()


async def test_p6_a_guess_never_evicts_what_is_hotter(tmp_path: Path) -> None:
    async with running(
        "host+nvme", tmp_path, space=SPACE, capacity=8 * FRAME, prefetch="chain", tick=3600
    ) as rig:
        await stored(rig, "doc", kit.tokens(8, seed=3), kit.Memory(SPACE.layout, 128, seed=3))
        hot = kit.tokens(7, seed=4)
        async with rig.engine.session("hot") as session:
            await session.store(hot, kit.Memory(SPACE.layout, 112, seed=4).view)
            await session.flush()
            assert (await load(session, hot))[0] == 112
        async with rig.engine.session("reader") as session:
            assert (await load(session, kit.tokens(8, seed=3)[:16]))[0] == 16
        await rig.settle()
        got = books(rig, "chain")
        assert got.issued == got.refused > 0
        assert all(report.tier == "host" for report in rig.engine.explain(hot))
        await rig.at_rest()


async def test_predictions_keep_to_their_budget(tmp_path: Path) -> None:
    async with running(
        "host+nvme", tmp_path, space=SPACE, prefetch="chain", prefetch_budget=1
    ) as rig:
        await stored(rig, "book", BOOK, BOOK_KV)
        async with rig.engine.session("asker") as session:
            for _ in range(3):
                assert (await load(session, BOOK[:32]))[0] == 32
                await rig.settle()
        assert books(rig, "chain").issued == 1, "one part on credit"
        assert await (await rig.engine.prefetch(tokens=BOOK)).wait() == 29
        await rig.at_rest()


async def test_a_broken_predictor_is_off_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = ("tests.engine.wrong_predictor:Raising", "")
    monkeypatch.setitem(registry._BUILT_IN, ("predictors", "raising"), target)
    async with running("host+nvme", tmp_path, space=SPACE, prefetch="raising", tick=0.01) as rig:
        await stored(rig, "a", IDS, KV)
        for _ in range(2):
            async with rig.engine.session("a") as session:
                assert (await load(session, IDS))[0] == 64
        while "raising is off for good" not in caplog.text:  # noqa: ASYNC110 - a tick says it
            await asyncio.sleep(0.001)
        assert books(rig, "raising").broken == "RuntimeError: a plug-in's fault"
        await rig.at_rest()


async def test_a_recorded_run_is_replayed_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    options: dict[str, Any] = {
        "prefetch": "arrival,chain,sequential,return_time",
        "prefetch_budget": "1MiB",
    }
    async with running(
        "host+nvme",
        tmp_path,
        space=SPACE,
        capacity=24 * FRAME,
        tick=0.01,
        decision_log=str(path),
        **options,
    ) as rig:
        await stored(rig, "book", BOOK, BOOK_KV)
        async with rig.engine.session("reader") as session:
            for blocks in (4, 8, 12, 20, 32):
                async with session.match(BOOK[: 16 * blocks]):
                    await rig.settle()
                await load(session, BOOK[: 16 * blocks])
                session.hint(next_in=0.01)
            await asyncio.sleep(0.1)
            await (await rig.engine.prefetch(session="book")).wait()
        config, levels = rig.engine.config, rig.engine.core.levels
        expected = rig.engine.stats().prefetch
    lines = path.read_bytes().splitlines(keepends=True)
    mine = [line for line in lines if line.startswith(PREFETCH_LINE)]
    assert len(mine) > 20
    assert sum(figures.used for figures in expected.values()) > 0
    fresh = make_prefetching(config)
    assert list(replay_prefetching(lines, fresh)) == mine
    for name, figures in expected.items():
        again = next(f for f in fresh.figures(0.0) if f.name == name)
        assert again.issued >= figures.issued
    log = LineLog()
    decisions = make_decisions(config, levels)
    decisions.attach(log)
    assert list(replay(lines, decisions)) == lines


@pytest.mark.every_loop
async def test_f051_a_session_may_go_while_it_is_prefetched(tmp_path: Path) -> None:
    gate = Gated("read")
    async with running(
        "host+nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}, prefetch="arrival,return_time"
    ) as rig:
        await stored(rig, "a", IDS, KV)
        async with rig.engine.session("a") as session:
            job = await rig.engine.prefetch(session="a")
            await gate.arrived()
            session.destroy()
        gate.open_gate()
        await job.wait()
        await rig.at_rest()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefetch": "oracle"}, "future"),
        ({"prefetch": "arival"}, "did you mean 'arrival'"),
        ({"prefetch": "chain:depth=3"}, "depth"),
        ({"prefetch": 3}, "prefetch must be str"),
        ({"prefetch_budget": 0}, "must be positive"),
        ({"prefetch_budget": "much"}, "not a size"),
        ({"prefetch_floor": 1.5}, "share from 0 to 1"),
    ],
)
async def test_wrong_settings_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        async with running("host", tmp_path, space=SPACE, **settings):
            pass
