"""Rules of compression on live engines: which blocks change their codec chain, where and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.compression_world import (
    AFTER_50,
    BLOCK,
    KINDS,
    LAYOUT,
    SPACE,
    chains,
    charges,
    idle,
    near,
    realistic,
)
from tests.engine.rig import load, running
from tierkv.decisions.log import replay
from tierkv.decisions.types import MissReason
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.testing.clock import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
Rule = tierkv.CompressionPolicy


@pytest.mark.parametrize("kind", KINDS)
async def test_raw_at_50_steps_and_int8_at_51(kind: str, tmp_path: Path) -> None:
    ids = kit.tokens(8, seed=1)
    kv = realistic(LAYOUT, len(ids), seed=1)
    async with running(kind, tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            for steps, old in ((50, 0), (51, 1), (66, 1), (67, 2)):
                await session.store(ids[: BLOCK + steps], kv.view)
                await rig.engine.flush()
                blocks = (BLOCK + steps) // BLOCK
                assert chains(session) == ["int8"] * old + ["raw"] * (blocks - old), steps
            tokens, back = await load(session, ids[: BLOCK + 67])
            assert tokens == 80
            assert near(kv, back, tokens, 1 / 127)
            raw = [t[:, 2 * BLOCK : 80] for t in kv.layers[0].values()]
            assert all(
                torch.equal(a, b[:, 2 * BLOCK : 80])
                for a, b in zip(raw, back.layers[0].values(), strict=True)
            )
        await rig.at_rest()


@pytest.mark.parametrize("kind", KINDS)
async def test_three_chains_in_one_load_from_memory(kind: str, tmp_path: Path) -> None:
    rules = [Rule("int8", after_steps=80), Rule("planes", after_steps=40)]
    ids = kit.tokens(8, seed=2)
    kv = realistic(LAYOUT, len(ids), seed=2)
    async with running(kind, tmp_path, space=SPACE, compression=rules) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(ids, kv.view)
            await rig.engine.flush()
            assert chains(session) == ["int8"] * 2 + ["planes"] * 3 + ["raw"] * 3
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert near(kv, back, tokens, 1 / 127)
            for name, tensor in kv.layers[1].items():
                assert torch.equal(tensor[:, 32:], back.layers[1][name][:, 32:]), "not lossless"
            again = kit.Memory(LAYOUT, len(ids))
            async with session.match(ids) as match:
                assert [layer async for layer in match.layers(into=again.view)] == [0, 1]
            assert again.same(back, len(ids)), "layer by layer it is the same"
        await rig.at_rest()


@pytest.mark.parametrize("kind", ["nvme", "file"])
async def test_three_chains_in_one_load_from_a_medium(kind: str, tmp_path: Path) -> None:
    rules = [Rule("int8", after_steps=80, tier=kind), Rule("planes", after_steps=40, tier=kind)]
    ids = kit.tokens(8, seed=2)
    kv = realistic(LAYOUT, len(ids), seed=2)
    async with running(f"host+{kind}", tmp_path, space=SPACE, compression=rules) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(ids, kv.view)
            flushed = await rig.engine.flush()
            assert flushed.durable == 8
            assert chains(session) == ["raw"] * 8, "the first tier has no rules"
            rig.cool()
            assert {b.tier for b in session.explain()} == {kind}
            assert chains(session)[:2] == ["int8"] * 2
            assert set(chains(session)[2:]) <= {"planes", "raw or planes"}
            layers = kit.Memory(LAYOUT, len(ids))
            async with session.match(ids) as match:
                assert [layer async for layer in match.layers(into=layers.view)] == [0, 1]
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert layers.same(back, tokens), "layer by layer it is the same"
            assert near(kv, back, tokens, 1 / 127)
            for name, tensor in kv.layers[1].items():
                assert torch.equal(tensor[:, 32:], back.layers[1][name][:, 32:]), "not lossless"
                assert not torch.equal(tensor[:, :32], back.layers[1][name][:, :32]), "not int8"
        await rig.settle()
        # what was loaded was promoted as it is: all three are in the first tier now
        async with rig.engine.session("b", fidelity="lossy") as session:
            assert chains(session, ids) == ["int8"] * 2 + ["planes"] * 3 + ["raw"] * 3
    async with (
        running(f"host+{kind}", tmp_path, space=SPACE, compression=rules) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        tokens, back = await load(session, ids)
        assert tokens == len(ids), "after a restart"
        assert near(kv, back, tokens, 1 / 127)


@pytest.mark.parametrize("kind", KINDS)
async def test_sinks_and_recent_tokens_stay_exact(kind: str, tmp_path: Path) -> None:
    rule = Rule("int8", sinks=BLOCK + 1, recent=2 * BLOCK + 1)
    ids = [*kit.tokens(8, seed=3), 1, 2, 3]
    kv = realistic(LAYOUT, len(ids), seed=3)
    async with (
        running(kind, tmp_path, space=SPACE, compression=rule) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        # 131 tokens: the last 33 begin in block 6; the first 17 end in block 1
        assert chains(session) == ["raw"] * 2 + ["int8"] * 4 + ["raw"] * 2


async def test_the_first_block_alone_can_stay_exact(tmp_path: Path) -> None:
    ids = kit.tokens(3, seed=3)
    kv = realistic(LAYOUT, len(ids), seed=3)
    async with (
        running("host", tmp_path, space=SPACE, compression=Rule("int8", sinks=1)) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert chains(session) == ["raw", "int8", "int8"]


async def test_age_in_seconds_is_found_by_the_clock_alone(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    ids = kit.tokens(2, seed=4)
    kv = realistic(LAYOUT, len(ids), seed=4)
    async with (
        running(
            "host",
            tmp_path,
            space=SPACE,
            compression=Rule("int8", after="10m"),
            clock=clock,
            tick=0.005,
        ) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        clock.advance(599)
        await session.flush()
        assert chains(session) == ["raw"] * 2
        clock.advance(1)
        await session.flush()
        assert chains(session) == ["int8"] * 2


async def test_what_matters_little_is_converted_once_that_is_said(tmp_path: Path) -> None:
    ids = kit.tokens(4, seed=4)
    kv = realistic(LAYOUT, len(ids), seed=4)
    async with (
        running(
            "host", tmp_path, space=SPACE, compression=Rule("int8", importance_below=0.5)
        ) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert chains(session) == ["raw"] * 4, "nobody has said anything"
        session.score([0.9] * BLOCK + [0.1] * BLOCK + [0.5] * BLOCK + [0.0] * BLOCK)
        await idle(rig)
        assert chains(session) == ["raw", "int8", "raw", "int8"]


async def test_on_demotion_only_the_copy_in_the_slower_tier_changes(tmp_path: Path) -> None:
    rule = Rule("int8", when="demotion")
    ids = kit.tokens(4, seed=5)
    kv = realistic(LAYOUT, len(ids), seed=5)
    async with running("host+nvme", tmp_path, space=SPACE, compression=rule) as rig:
        async with rig.engine.session("a") as exact:
            await exact.store(ids, kv.view)
            await exact.flush()
            assert chains(exact) == ["raw"] * 4
            tokens, back = await load(exact, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        small, large = max(charges(rig, 1)), min(charges(rig, 0))
        assert small < 0.7 * large
        rig.cool()
        async with rig.engine.session("a") as exact:
            assert (await load(exact, ids))[0] == 0
        async with rig.engine.session("a", fidelity="lossy") as lossy:
            tokens, back = await load(lossy, ids)
            assert tokens == len(ids)
            assert near(kv, back, tokens, 1 / 127)
            assert not back.same(kv, tokens)


async def test_a_demotion_takes_the_chain_of_the_rule_at_that_time(tmp_path: Path) -> None:
    rules = [Rule("int8", after_steps=50, tier="nvme")]
    tiers = [
        tierkv.Tier("host", "4MiB"),
        tierkv.Tier("nvme", "64MiB", path=str(tmp_path), write_through=False),
    ]
    ids = kit.tokens(6, seed=6)
    kv = realistic(LAYOUT, len(ids), seed=6)
    async with (
        tierkv.open(tiers=tiers, space=SPACE, compression=rules) as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        engine.resize("host", 0)
        await engine.flush()
        core = engine.core
        sizes = [nbytes for _, _, nbytes in core.decisions.parts(1)]
        assert len(sizes) == 6
        # 96 tokens: blocks 0 and 1 have more than 50 behind them
        assert sorted(size < 0.7 * max(sizes) for size in sizes) == [False] * 4 + [True] * 2
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert near(kv, back, tokens, 1 / 127)


async def test_blocks_that_come_back_after_a_restart_are_old_once_their_session_says_so(
    tmp_path: Path,
) -> None:
    rule = Rule("int8", after_steps=50, tier="host")
    ids = kit.tokens(6, seed=18)
    kv = realistic(LAYOUT, len(ids), seed=18)
    async with (
        running("host+nvme", tmp_path, space=SPACE) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
    async with (
        running("host+nvme", tmp_path, space=SPACE, compression=rule) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        assert (await load(session, ids))[0] == len(ids)
        await idle(rig)
        assert chains(session) == ["raw"] * 6, "promoted, and nobody knows how old they are"
        assert {b.tier for b in session.explain()} == {"host"}
        await session.store(ids, kv.view, start=len(ids))
        await session.flush()
        assert chains(session) == ["int8"] * 2 + ["raw"] * 4


# --------------------------------------------------------------------------- fidelity


@pytest.mark.parametrize("kind", KINDS)
async def test_exact_sessions_refuse_what_was_converted_and_restore_it(
    kind: str, tmp_path: Path
) -> None:
    ids = kit.tokens(6, seed=7)
    kv = realistic(LAYOUT, len(ids), seed=7)
    async with running(kind, tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            tokens, back = await load(session, ids)
            await session.flush()
            found = session.explain()
            assert [b.reason for b in found[:2]] == [MissReason.FIDELITY] * 2
            told = rig.engine.explain(ids, fidelity="lossy")
            assert [b.exact for b in told] == [False] * 2 + [True] * 4
            assert (await load(session, ids))[0] == 0
            # the exact KV, computed anew, takes the place of the lossy copy
            await session.store(ids[: 2 * BLOCK], kv.view)
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            assert not session.derived
            await session.store(ids, kv.view)
            await session.flush()
            assert (await load(session, ids))[0] == 0, "and grows old again"
        await rig.at_rest()


@pytest.mark.parametrize(("chain", "lossy"), [("int8", True), ("planes", False)])
async def test_the_log_says_whom_lossy_copies_are_for(
    chain: str, lossy: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierkv")
    async with running("host", tmp_path, space=SPACE, compression=Rule(chain, after_steps=50)):
        pass
    assert f"{chain} by rule" in caplog.text
    assert ("for sessions with fidelity='lossy'" in caplog.text) is lossy


async def test_a_lossless_rule_keeps_sessions_exact(tmp_path: Path) -> None:
    ids = kit.tokens(6, seed=8)
    kv = realistic(LAYOUT, len(ids), seed=8)
    async with (
        running("host", tmp_path, space=SPACE, compression=Rule("planes", after_steps=50)) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert chains(session) == ["planes"] * 2 + ["raw"] * 4
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)
        assert not session.derived


async def test_an_exact_copy_on_a_medium_serves_exact_sessions(tmp_path: Path) -> None:
    rule = Rule("int8", after_steps=50, tier="host")
    ids = kit.tokens(6, seed=9)
    kv = realistic(LAYOUT, len(ids), seed=9)
    async with (
        running("host+nvme", tmp_path, space=SPACE, compression=rule) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert [b.tier for b in session.explain()] == ["nvme"] * 2 + ["host"] * 4
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)


# --------------------------------------------------------------------------- the books


async def test_conversions_are_in_the_metrics_by_chain(tmp_path: Path) -> None:
    ids = kit.tokens(6, seed=15)
    kv = realistic(LAYOUT, len(ids), seed=15)
    async with (
        running("host", tmp_path, space=SPACE, compression=AFTER_50) as rig,
        rig.engine.session("a") as session,
    ):
        before = await _stored(rig.engine, session, ids, kv)
        page = rig.engine.metrics.scrape().decode()
        saved = before - rig.engine.core.decisions.used(0)
        assert saved > 0
        name = 'tierkv_recodings_total{chain="int8",result="converted",tier="host"} 2.0'
        assert name in page
        assert f'tierkv_recoding_saved_bytes_total{{tier="host"}} {float(saved)}' in page


async def _stored(
    engine: tierkv.Engine, session: tierkv.session.Session, ids: list[int], kv: kit.Memory
) -> int:
    """Bytes that a conversation took before anything was converted."""
    await session.store(ids[: 3 * BLOCK], kv.view)
    used = engine.core.decisions.used(0)
    await session.store(ids, kv.view, start=3 * BLOCK)
    await session.flush()
    return used * 2


@pytest.mark.parametrize("kinds", ["host", "device", "host+nvme"])
async def test_the_decision_log_of_a_run_with_rules_replays(kinds: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    rules = [Rule("int4", after_steps=90, sinks=1), AFTER_50]
    tiers = kit.tiers(kinds, tmp_path)
    config = tierkv.EngineConfig(tiers, compression=rules, decision_log=str(log))
    ids = kit.tokens(8, seed=16)
    kv = realistic(LAYOUT, len(ids), seed=16)
    async with (
        tierkv.open(config, space=SPACE) as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids[:90], kv.view)
        await session.store(ids, kv.view, start=80)
        await session.flush()
        await load(session, ids)
    lines = log.read_bytes().splitlines(keepends=True)
    assert any(b'"op":"recoded"' in line for line in lines)
    fresh = make_decisions(config, make_levels(config, None))
    assert list(replay(lines, fresh)) == lines


async def test_without_rules_nothing_runs_and_nothing_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running("host", tmp_path, space=SPACE, decision_log=str(log)) as rig:
        async with rig.engine.session("a") as session:
            await session.store(kit.tokens(4), realistic(LAYOUT, 64, seed=1).view)
            await session.flush()
        await idle(rig)
        assert not rig.engine.core.ages
    text = log.read_text()
    assert '"compression"' not in text
    assert '"told"' not in text
