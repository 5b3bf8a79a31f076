"""Admission, hints, importance and rules of a running engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv.decisions.types import MissReason, SkipReason
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
BLOCKS = 4
IDS = kit.tokens(BLOCKS)
KV = kit.Memory(SPACE.layout, len(IDS), seed=1)


def options(**by_tier: Any) -> list[tierkv.Tier]:
    """Tiers from keyword arguments: name=(settings)."""
    return [tierkv.Tier(kind, **settings) for kind, settings in by_tier.items()]


async def test_what_is_used_once_goes_to_the_slower_tier_only(tmp_path: Path) -> None:
    tiers = options(
        host={"capacity": "4MiB", "admission": "second_use"},
        file={"capacity": "4MiB", "path": str(tmp_path)},
    )
    async with tierkv.open(tiers=tiers, space=SPACE) as engine, engine.session("a") as session:
        assert (await load(session, IDS))[0] == 0
        stored = await session.store(IDS, KV.view)
        assert [b.tier for b in stored.blocks] == ["file"] * BLOCKS
        assert (await load(session, IDS))[0] == len(IDS)  # asked for twice now: it comes up
        await Rig(engine, {}).settle()
        assert [b.tier for b in session.explain()] == ["host"] * BLOCKS
        loaded, back = await load(session, IDS)
        assert loaded == len(IDS)
        assert back.same(KV, len(IDS))


async def test_explain_says_refused(tmp_path: Path) -> None:
    del tmp_path
    tiers = options(host={"capacity": "4MiB", "admission": "second_use"})
    async with tierkv.open(tiers=tiers, space=SPACE) as engine, engine.session("a") as session:
        stored = await session.store(IDS, KV.view)
        assert stored.blocks[0].reason is SkipReason.REFUSED
        assert stored.skipped == BLOCKS
        report = session.explain(IDS)[0]
        assert (report.reason, report.about) == (MissReason.REFUSED, "host")
        assert str(report).startswith("block 0: refused 0 s ago in host")


async def test_a_write_budget_stops_writing_and_nothing_is_lost_by_that(tmp_path: Path) -> None:
    tiers = options(
        host={"capacity": "16MiB"},
        file={"capacity": "16MiB", "path": str(tmp_path), "admission": "write_budget:40KiB"},
    )
    ids = kit.tokens(16)
    kv = kit.Memory(SPACE.layout, len(ids), seed=2)
    async with tierkv.open(tiers=tiers, space=SPACE) as engine, engine.session("a") as session:
        await session.store(ids, kv.view)
        flushed = await session.flush()
        decisions = engine.core.decisions
        assert 0 < decisions.used(1) <= 40 << 10
        assert flushed.missing > 0
        assert {b.tier for b in session.explain()} == {"host"}
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, len(ids))


async def test_dirty_parts_make_way_where_the_budget_is_spent(tmp_path: Path) -> None:
    tiers = options(
        host={"capacity": "256KiB"},
        file={"capacity": "16MiB", "path": str(tmp_path), "admission": "write_budget:16KiB"},
    )
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        for number in range(30):  # several times what the host holds: no store may get stuck
            ids = kit.tokens(BLOCKS, seed=number)
            kv = kit.Memory(SPACE.layout, len(ids), seed=number)
            async with engine.session(f"s{number}") as session:
                stored = await session.store(ids, kv.view)
                assert stored.stored == BLOCKS
        assert engine.core.decisions.used(1) <= 16 << 10
        tokens, back = await load_of(engine, "s29", kit.tokens(BLOCKS, seed=29))
        assert tokens == len(IDS)
        assert back.same(kv, tokens)


async def load_of(engine: tierkv.Engine, name: str, ids: list[int]) -> tuple[int, kit.Memory]:
    async with engine.session(name) as session:
        return await load(session, ids)


async def test_hints_and_importance_are_recorded_and_checked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running("host", tmp_path, space=SPACE, decision_log=str(log)) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            session.hint(stop_reason="tool_use")
            session.hint(next_in="2m", stop_reason="end_turn")
            session.score(0.25)
            session.score([0.1, 0.9, 0.3], start=15)
            parts = list(session.state.parts())
            importance = [rig.engine.core.decisions.importance(part) for part in parts]
            assert importance == [0.1, 0.9, 0.25, 0.25]
            for wrong in ({}, {"next_in": "soon"}, {"next_in": -1}, {"stop_reason": ""}):
                with pytest.raises(ConfigError):
                    session.hint(**wrong)
            wrong_scores: list[tuple[Any, int]]
            wrong_scores = [(2.0, 0), (0.5, 65), (0.5, -1), ([0.5] * 65, 0), ([0.5, -1], 0)]
            for value, start in [*wrong_scores, ("high", 0), ([None], 0), (None, 0)]:
                with pytest.raises(ConfigError, match=r"importance|start|values"):
                    session.score(value, start)
        with pytest.raises(ClosedError):
            session.hint(stop_reason="end_turn")
        with pytest.raises(ClosedError):
            session.score(0.5)
    told = [json.loads(line) for line in log.read_bytes().splitlines()]
    hints = [line["args"][1:] for line in told if line["op"] == "hint"]
    assert hints == [[1, "tool_use", None], [1, "end_turn", 120.0]]
    assert sum(line["op"] == "score" for line in told) == 2


async def test_the_coldest_session_is_swapped_out_whole(tmp_path: Path) -> None:
    tiers = [
        tierkv.Tier("host", "256KiB", write_through=False),
        tierkv.Tier("file", "16MiB", path=str(tmp_path), write_through=False),
    ]
    policy = tierkv.Policy("lru", unit="session", action="demote", to="file")
    async with tierkv.open(tiers=tiers, space=SPACE, policy=policy) as engine:
        where: dict[str, set[str | None]] = {}
        for number in range(20):
            ids = kit.tokens(BLOCKS, seed=number)
            kv = kit.Memory(SPACE.layout, len(ids), seed=number)
            async with engine.session(f"s{number}") as session:
                assert (await session.store(ids, kv.view)).stored == BLOCKS
        await Rig(engine, {}).settle()
        for number in range(20):
            async with engine.session(f"s{number}") as session:
                where[session.id] = {b.tier for b in session.explain()}
                tokens, back = await load(session, kit.tokens(BLOCKS, seed=number))
                assert tokens == len(IDS)
                assert back.same(kit.Memory(SPACE.layout, len(IDS), seed=number), tokens)
        assert all(len(tiers) == 1 for tiers in where.values())  # none is in two places
        assert where["s0"] == {"file"}
        assert where["s19"] == {"host"}


def test_an_unknown_admission_is_refused_at_start(tmp_path: Path) -> None:
    del tmp_path
    config = tierkv.EngineConfig([tierkv.Tier("host", "4MiB", admission="tinylfo")])
    with pytest.raises(ConfigError, match="did you mean 'tinylfu'"):
        make_decisions(config, make_levels(config, None))
