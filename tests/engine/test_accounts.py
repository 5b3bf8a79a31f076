"""What an engine says of itself: reasons of misses, metrics, and a decision log that replays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running, wrap
from tierkv.decisions.log import replay
from tierkv.decisions.types import EvictReason, MissReason
from tierkv.engine.compose import make_decisions, make_levels
from tierkv.errors import ConfigError
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Corrupting, Failing, Gated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
IDS = kit.tokens(4)
KV = kit.Memory(SPACE.layout, len(IDS), seed=1)
FRAME = 12 * 1024


async def _reason(rig: Rig, **who: Any) -> MissReason | None:
    async with rig.engine.session("probe", **who) as probe, probe.match(IDS) as match:
        return match.reason


async def _never_stored(path: Path) -> MissReason | None:
    async with running("host", path, space=SPACE) as rig:
        return await _reason(rig)


async def _pending(path: Path) -> MissReason | None:
    gate = Gated("write")
    async with (
        running("nvme", path, space=SPACE, faults={"nvme": [gate]}) as rig,
        rig.engine.session("a") as session,
    ):
        job = rig.engine.workers.spawn(session.store, IDS, KV.view)
        await gate.arrived()
        reason = await _reason(rig)
        assert session.explain(IDS)[0].reason is MissReason.PENDING
        gate.open_gate()
        await job.wait()
        assert await _reason(rig) is None
        return reason


async def _evicted(path: Path) -> MissReason | None:
    async with running("host", path, space=SPACE, capacity=4 * FRAME) as rig:
        for seed in (1, 2):
            async with rig.engine.session("a") as session:
                ids = IDS if seed == 1 else kit.tokens(4, seed=seed)
                await session.store(ids, KV.view)
        return await _reason(rig)


async def _expired(path: Path) -> MissReason | None:
    clock = VirtualClock()
    async with running("host", path, space=SPACE, clock=clock) as rig:
        async with rig.engine.session("a", ttl=5) as session:
            await session.store(IDS, KV.view)
        clock.advance(6)
        return await _reason(rig)


async def _quota(path: Path) -> MissReason | None:
    tenants = {"t": {"quota": {"host": 2 * FRAME}}}
    async with running("host", path, space=SPACE, tenants=tenants) as rig:
        async with rig.engine.session("a", tenant="t") as session:
            await session.store(IDS, KV.view)
        return await _reason(rig, tenant="t")


async def _quota_of_the_session(path: Path) -> MissReason | None:
    tenants = {"t": {"session_quota": 2 * FRAME}}
    async with running("host", path, space=SPACE, tenants=tenants) as rig:
        async with rig.engine.session("a", tenant="t") as session:
            await session.store(IDS, KV.view)
        return await _reason(rig, tenant="t")


async def _damaged(path: Path) -> MissReason | None:
    fault = Corrupting(0.5, times=1)
    async with running("nvme", path, space=SPACE, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await load(session, IDS)
        return await _reason(rig)


async def _failed(path: Path) -> MissReason | None:
    fault = Failing("read", times=1)
    async with running("nvme", path, space=SPACE, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await load(session, IDS)
        return await _reason(rig)


async def _removed(path: Path) -> MissReason | None:
    async with running("host", path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
        await rig.engine.reset()
        return await _reason(rig)


async def _fidelity(path: Path) -> MissReason | None:
    async with running("host", path, space=SPACE, compression="int8") as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
        assert await _reason(rig, fidelity="lossy") is None
        return await _reason(rig)


async def _hole(path: Path) -> MissReason | None:
    fault = Failing("read", times=1)
    async with running("nvme", path, space=SPACE, faults={"nvme": [fault]}, history=0) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            async with session.match(IDS[:16]) as match:  # only the first block is lost
                await match.load(into=kit.Memory(SPACE.layout, 16).view)
        return await _reason(rig)


async def _deadline(path: Path) -> MissReason | None:
    gate = Gated("read")
    async with (
        running("nvme", path, space=SPACE, faults={"nvme": [gate]}) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view)
        back = kit.Memory(SPACE.layout, len(IDS))
        async with session.match(IDS) as match:
            result = await match.load(into=back.view, deadline="1ms")
        return result.reason


async def _refused(path: Path) -> MissReason | None:
    tiers = [tierkv.Tier("host", "1MiB", admission="second_use")]
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        async with engine.session("a") as session:
            await session.store(IDS, KV.view)
        return await _reason(Rig(engine, {}))


REASONS: list[tuple[MissReason, Callable[[Path], Awaitable[MissReason | None]]]] = [
    (MissReason.NEVER_STORED, _never_stored),
    (MissReason.PENDING, _pending),
    (MissReason.EVICTED, _evicted),
    (MissReason.EXPIRED, _expired),
    (MissReason.QUOTA, _quota),
    (MissReason.QUOTA, _quota_of_the_session),
    (MissReason.DAMAGED, _damaged),
    (MissReason.FAILED, _failed),
    (MissReason.REMOVED, _removed),
    (MissReason.FIDELITY, _fidelity),
    (MissReason.HOLE, _hole),
    (MissReason.DEADLINE, _deadline),
    (MissReason.REFUSED, _refused),
]


@pytest.mark.parametrize(("reason", "bring_about"), REASONS)
async def test_every_reason_of_a_miss_can_be_met(
    reason: MissReason,
    bring_about: Callable[[Path], Awaitable[MissReason | None]],
    tmp_path: Path,
) -> None:
    assert await bring_about(tmp_path) is reason


def test_no_reason_is_left_out() -> None:
    # no rule of this version compares a load with recomputing
    assert {reason for reason, _ in REASONS} == set(MissReason) - {MissReason.SLOWER}


def _value(engine: tierkv.Engine, name: str, **labels: str) -> float:
    value = engine.metrics.registry.get_sample_value(f"tierkv_{name}", labels)
    assert value is not None, f"{name}{labels} does not exist"
    return value


async def test_metrics_of_a_live_engine(tmp_path: Path) -> None:
    fault = Corrupting(0.5, times=1)
    fault.active = False
    async with running(
        "host+nvme", tmp_path, space=SPACE, capacity=6 * FRAME, faults={"nvme": [fault]}
    ) as rig:
        engine = rig.engine
        assert _value(engine, "lookups_total", tier="host", result="hit") == 0
        async with engine.session("a") as session:
            assert _value(engine, "sessions_open") == 1
            assert (await load(session, IDS))[0] == 0
            assert _value(engine, "misses_total", reason="never_stored") == 1
            await session.store(IDS, KV.view)
            await session.flush()
            async with session.match(IDS):
                assert _value(engine, "leases") == 1
            assert (await load(session, IDS))[0] == 64
            assert _value(engine, "lookups_total", tier="host", result="hit") == 2
            written = _value(engine, "io_bytes_total", tier="nvme", direction="write")
            assert 4 * 6144 <= written <= 4 * FRAME
            for seed in range(2, 5):
                await session.store(kit.tokens(4, seed=seed), KV.view)
                await rig.settle()
            assert _value(engine, "evictions_total", tier="host", reason="capacity") >= 4
            fault.active = True
            async with session.match(IDS) as match:
                assert match.tokens == 64
                result = await match.load(into=kit.Memory(SPACE.layout, 64).view)
            assert result.tokens < 64
            assert _value(engine, "corruption_total", tier="nvme", kind="checksum") == 4
            assert _value(engine, "evictions_total", tier="nvme", reason="damaged") == 4
            read = _value(engine, "io_bytes_total", tier="nvme", direction="read")
            assert read >= 6144
            reasons = sum(
                _value(engine, "misses_total", reason=reason.value) for reason in MissReason
            )
            assert reasons == 1
        assert _value(engine, "sessions_open") == 0
        assert _value(engine, "leases") == 0
        assert _value(engine, "tokens_requested_total") == 64 * 4
        for tier in ("host", "nvme"):
            used, peak, capacity = (
                _value(engine, f"tier_{what}_bytes", tier=tier)
                for what in ("used", "used_peak", "capacity")
            )
            assert 0 < used <= peak <= capacity
        await rig.at_rest()
    assert _value(engine, "sessions_open") == 0  # a scrape after the end still answers


async def _eventful(rig: Rig) -> None:
    """Turns, evictions, damage, failures, cancels, expiry, quotas."""
    engine = rig.engine
    async with engine.session("a") as a, engine.session("b", tenant="t", ttl=5) as b:
        for seed in range(8):
            ids = kit.tokens(4, seed=seed)
            kv = kit.Memory(SPACE.layout, 70, seed=seed)
            await a.store([*ids, 1, 2], kv.view, tail=True)
            await b.store(ids, kv.view)
            await load(a, kit.tokens(4, seed=seed // 2))
        await a.flush()
        rig.cool()

        async def turn() -> None:
            await load(a, kit.tokens(4, seed=7))
            rig.cool()

        async for _ in cancel_at_each_step(turn):
            await rig.settle()
        await engine.prefetch(session="a")
        a.destroy()


@pytest.mark.parametrize("kinds", ["host+nvme", "nvme"])
async def test_the_decision_log_of_a_live_run_replays_byte_for_byte(
    kinds: str, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.log"
    tiers = kit.tiers(kinds, tmp_path, 12 * FRAME)
    tenants = {"t": {"quota": {"nvme": 8 * FRAME}}}
    config = tierkv.EngineConfig(
        tiers=tiers, decision_log=str(log), tenants=tenants, history=64, tick=0.005
    )
    for _ in range(2):  # the second run recovers what the first one left
        log.unlink(missing_ok=True)
        faults = [Corrupting(0.5, times=2), Failing("write", times=1), Failing("read", times=1)]
        backends = wrap(tiers, {"nvme": faults})
        async with tierkv.open(config, space=SPACE, backends=list(backends.values())) as engine:
            rig = Rig(engine, backends)
            await _eventful(rig)
            await rig.at_rest()
        lines = log.read_bytes().splitlines(keepends=True)
        ops = {line.split(b'"')[3] for line in lines}
        assert {b"header", b"recover", b"reserve", b"commit", b"rollback", b"invalidate"} <= ops
        assert {b"begin_lookup", b"finish", b"release", b"tick"} <= ops
        fresh = make_decisions(config, make_levels(config, list(wrap(tiers).values())))
        assert list(replay(lines, fresh)) == lines
        fresh.check()


async def test_a_decision_log_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decision_log"):
        async with tierkv.open(
            tiers=kit.tiers("nvme", tmp_path), decision_log=str(tmp_path / "no" / "log")
        ):
            pass
    async with running("nvme", tmp_path, space=SPACE):  # and nothing was left locked
        pass


async def test_explain_names_tier_chain_and_time(tmp_path: Path) -> None:
    clock = VirtualClock(10.0)
    tiers = [
        tierkv.Tier("host", 3 * FRAME),
        tierkv.Tier("nvme", "1MiB", path=str(tmp_path / "n"), codec="zstd"),
    ]
    async with tierkv.open(tiers=tiers, space=SPACE, clock=clock) as engine:
        rig = Rig(engine, {})
        async with engine.session("a") as session:
            await session.store(IDS[:40], KV.view, tail=True)
            await rig.settle()
            chains = [(b.tier, b.chain) for b in session.explain()]
            assert [tier for tier, _ in chains] == ["host", "host", "host"]
            assert [chain for _, chain in chains][:2] == ["raw", "raw"]
            rig.cool()
            assert next((b.tier, b.chain) for b in session.explain()) == ("nvme", "zstd")
            await engine.reset()
            clock.advance(42)
            report = engine.explain(IDS)[0]
            assert report.reason is MissReason.REMOVED
            assert report.ago == 42
            assert "42 s ago" in str(report)
            assert EvictReason.REMOVED.value == report.reason.value


async def test_a_long_explanation_is_told_in_slices_and_says_the_same(tmp_path: Path) -> None:
    """P1: other tasks of the loop get their turn while thousands of blocks are explained."""
    ids = kit.tokens(1500, seed=7)
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            turns = 0

            async def ticking() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            job = rig.engine.workers.spawn(ticking)
            for prompt in (IDS, IDS + ids):
                assert await session.aexplain(prompt) == session.explain(prompt)
            assert await session.aexplain() == session.explain()
            before = turns
            await session.aexplain(ids)
            assert turns >= before + 1500 // 256
            assert not job.done()
        await rig.settle()
