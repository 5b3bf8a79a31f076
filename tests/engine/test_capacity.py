"""Limits are kept: capacities, quotas, reserved shares, times to live. Eviction goes on."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, Rig, load, running, usable
from tierkv.decisions.types import EvictReason, MissReason, SkipReason
from tierkv.layout import Layout, Space
from tierkv.mover.load import Progress
from tierkv.testing.clock import VirtualClock

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.session import StoreResult

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


SPACE = kit.space()
FRAME = 12 * 1024  # what one block of SPACE takes in a tier


def _du(path: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in (path, *path.rglob("*")))


def _said(seed: int, blocks: int) -> tuple[list[int], kit.Memory]:
    """A prompt and its KV: a longer one of the same seed begins with a shorter one."""
    most = 100 if blocks > 10 else 10
    return kit.tokens(most, seed=seed)[: 16 * blocks], kit.Memory(SPACE.layout, 16 * most, seed)


async def _store(rig: Rig, seed: int, blocks: int = 3, **who: Any) -> StoreResult:
    ids, kv = _said(seed, blocks)
    async with rig.engine.session(f"s{seed}", **who) as session:
        return await session.store(ids, kv.view)


async def _loaded(rig: Rig, seed: int, blocks: int = 3, **who: Any) -> int:
    ids, kv = _said(seed, blocks)
    async with rig.engine.session(f"s{seed}", **who) as session:
        tokens, back = await load(session, ids)
        assert back.same(kv, tokens)
        assert back.untouched(tokens)
        return tokens


def _small(kinds: str, path: Path, host: str = "128KiB", nvme: str = "512KiB") -> list[Any]:
    small, on_disk = ("device", "host"), ("nvme", "file")
    return [
        tierkv.Tier(
            kind,
            host if kind in small else nvme,
            path=str(path / kind) if kind in on_disk else None,
        )
        for kind in kinds.split("+")
    ]


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f061_f066_capacity_alone_is_enough(kinds: str, tmp_path: Path) -> None:
    tiers = _small(kinds, tmp_path)
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        rig = Rig(engine, {})
        for seed in range(40):  # several times what fits
            result = await _store(rig, seed)
            assert result.stored == 3
            assert await _loaded(rig, seed) == 48  # the newest is there
            for tier in tiers:
                stats = engine.stats().tiers[tier.name]
                assert engine.stats().used[tier.name] <= tier.capacity_bytes
                assert max(stats.live_bytes, stats.disk_bytes) <= tier.capacity_bytes
        assert await _loaded(rig, 0) == 0
        async with engine.session("probe") as probe:
            async with probe.match(_said(0, 3)[0]) as match:
                assert match.reason is MissReason.EVICTED
            assert probe.explain(_said(0, 3)[0])[0].reason is MissReason.EVICTED
        await rig.at_rest()
        if "nvme" in kinds:
            await engine.flush()
            assert _du(tmp_path / "nvme") <= 512 * 1024
            assert _du(tmp_path / "nvme") == engine.stats().tiers["nvme"].disk_bytes


async def test_f062_a_smaller_capacity_evicts_at_open(tmp_path: Path) -> None:
    async with tierkv.open(tiers=_small("nvme", tmp_path, nvme="1MiB"), space=SPACE) as engine:
        for seed in range(20):
            await _store(Rig(engine, {}), seed)
    for size in ("512KiB", "256KiB"):
        tiers = _small("nvme", tmp_path, nvme=size)
        async with tierkv.open(tiers=tiers, space=SPACE) as engine:
            rig = Rig(engine, {})
            used = engine.stats().used["nvme"]
            assert 0 < used <= tiers[0].capacity_bytes
            await rig.at_rest()
            # the newest first: a tick may make room meanwhile, and whoever was asked for less
            # recently than the others goes then, which may be the newest if it is asked for last
            hits = [seed for seed in reversed(range(20)) if await _loaded(rig, seed) == 48]
            assert hits[:1] == [19]  # the newest stay


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f063_the_same_block_again_and_again(kinds: str, tmp_path: Path) -> None:
    async with running(kinds, tmp_path, space=SPACE) as rig:
        await _store(rig, 1)
        await rig.engine.flush()
        used = rig.engine.stats().used
        for _ in range(100):
            assert (await _store(rig, 1)).present == 3
        assert rig.engine.stats().used == used
        await rig.at_rest()


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f064_the_books_agree_at_each_step(kinds: str, tmp_path: Path) -> None:
    """Store, overwrite by exact KV, load, expire, destroy, reset: at random."""
    dice = random.Random(7)
    clock = VirtualClock(1000.0)
    async with tierkv.open(
        tiers=_small(kinds, tmp_path), space=SPACE, clock=clock, tick=0.002
    ) as engine:
        rig = Rig(engine, {})
        for step in range(120):
            seed = dice.randrange(12)
            act = dice.choice(("store", "store", "load", "derived", "expire", "destroy", "reset"))
            if act == "store":
                await _store(rig, seed, blocks=dice.randrange(1, 5), ttl=dice.choice((None, 30)))
            elif act == "load":
                await _loaded(rig, seed)
            elif act == "derived":
                await _store_derived(rig, seed)
            elif act == "expire":
                clock.advance(dice.choice((1, 20, 60)))
            elif act == "destroy":
                engine.forget_session(f"s{seed}")
            elif step % 10 == 0:
                await engine.reset()
            await rig.at_rest()


async def _store_derived(rig: Rig, seed: int) -> None:
    """KV that an exact store replaces later."""
    ids, kv = _said(seed, 3)
    async with rig.engine.session(f"s{seed}", fidelity="lossy") as session:
        progress = Progress(derived="test")
        session.lineage.append(progress)
        await session.store(ids, kv.view)


async def test_f065_one_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    small, big = SPACE, Space(tierkv.Identity("big", "r"), Layout.uniform(2, 8, 64, "float32"), 16)
    async with tierkv.open(tiers=_small("host", tmp_path, host="64KiB"), space=small) as engine:
        rig = Rig(engine, {})
        for seed in range(2):
            await _store(rig, seed, blocks=2)
        async with engine.session("big", space=big) as session:
            kv = kit.Memory(big.layout, 32, seed=1)
            result = await session.store(kit.tokens(2), kv.view)
            assert [b.reason for b in result.blocks] == [SkipReason.TOO_LARGE, SkipReason.NO_PARENT]
        assert [await _loaded(rig, seed, blocks=2) for seed in range(2)] == [32, 32]
        await rig.at_rest()


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f068_probes_keep_nothing_alive(kinds: str, tmp_path: Path) -> None:
    async with tierkv.open(tiers=_small(kinds, tmp_path), space=SPACE) as engine:
        rig = Rig(engine, {})
        for seed in range(30):
            result = await _store(rig, seed)
            assert result.stored == 3
            for known in range(seed + 1):
                engine.explain(_said(known, 3)[0])
                if known % 5 == 0:
                    await (await engine.prefetch(tokens=_said(known, 3)[0], guess=True)).wait()
        assert await _loaded(rig, 0) == 0
        await rig.at_rest()


async def test_f069_a_stale_copy_on_disk_costs_a_miss_not_the_truth(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        await _store(rig, 1)
        await rig.engine.flush()
        core = rig.engine.core
        parts = [(part, generation) for part, generation, _ in core.decisions.parts(1)]
        await rig.backends["nvme"].inner.delete(parts)  # behind our back
        assert await _loaded(rig, 1) == 48  # from memory
        rig.cool()  # its copy in memory goes, in good faith
        assert await _loaded(rig, 1) == 0
        assert rig.engine.explain(_said(1, 3)[0])[0].reason is MissReason.FAILED
        assert (await _store(rig, 1)).stored == 3
        assert await _loaded(rig, 1) == 48
        await rig.at_rest()


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
async def test_f070_what_was_just_demoted_is_not_the_next_victim(
    policy: str, tmp_path: Path
) -> None:
    tiers = [
        tierkv.Tier("host", 4 * FRAME, high=1.0, low=1.0),
        tierkv.Tier("nvme", "256KiB", path=str(tmp_path / "n"), write_through=False),
    ]
    async with tierkv.open(tiers=tiers, space=SPACE, policy=policy, tick=60) as engine:
        rig = Rig(engine, {})
        for seed in range(12):
            assert (await _store(rig, seed, blocks=2)).stored == 2
        on_disk = [
            seed for seed in range(12) if engine.explain(_said(seed, 2)[0])[0].tier == "nvme"
        ]
        assert on_disk
        newest = max(on_disk)
        assert newest == 9  # 10 and 11 fill the memory tier
        assert await _loaded(rig, newest, blocks=2) == 32
        await rig.at_rest()


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f071_more_than_fits_gives_a_result_per_block(kinds: str, tmp_path: Path) -> None:
    tiers = _small(kinds, tmp_path, host="128KiB", nvme="256KiB")
    async with tierkv.open(tiers=tiers, space=SPACE) as engine:
        rig = Rig(engine, {})
        result = await _store(rig, 1, blocks=100)
        assert [b.index for b in result.blocks] == list(range(100))
        assert 0 < result.stored < 100
        assert result.stored + result.skipped == 100
        states = [b.state for b in result.blocks]
        assert states == sorted(states, reverse=True)  # first stored ones, then skipped ones
        assert result.blocks[-1].reason in (SkipReason.NO_PARENT, SkipReason.FULL)
        assert await _loaded(rig, 1, blocks=100) == 16 * result.stored
        await rig.at_rest()


async def test_dirty_parts_are_demoted_when_memory_passes_the_mark(tmp_path: Path) -> None:
    tiers = [
        tierkv.Tier("host", 20 * FRAME, high=0.8, low=0.5),
        tierkv.Tier("nvme", "4MiB", path=str(tmp_path / "n"), write_through=False),
    ]
    async with tierkv.open(tiers=tiers, space=SPACE, tick=0.005) as engine:
        rig = Rig(engine, {})
        for seed in range(12):
            await _store(rig, seed, blocks=3)
        for _ in range(1000):
            await rig.settle()
            if engine.stats().used["host"] <= 0.8 * 20 * FRAME:
                break
            await asyncio.sleep(0.005)
        assert engine.stats().used["host"] <= 0.8 * 20 * FRAME
        assert engine.stats().used["nvme"] > 0
        tiers_seen = {engine.explain(_said(s, 3)[0])[0].tier for s in range(12)}
        assert tiers_seen == {"host", "nvme"}
        assert [await _loaded(rig, seed) for seed in range(12)] == [48] * 12  # nothing was lost
        labels = {"tier": "host", "reason": EvictReason.DEMOTED.value}
        value = engine.metrics.registry.get_sample_value("tierkv_evictions_total", labels)
        assert value
        await rig.at_rest()


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_parts_and_sessions_expire_on_the_injected_clock(kinds: str, tmp_path: Path) -> None:
    clock, wall = VirtualClock(50.0), VirtualClock(1e9)
    async with running(kinds, tmp_path, space=SPACE, clock=clock, wall=wall, tick=0.002) as rig:
        await _store(rig, 1, ttl="60s")
        await _store(rig, 2)
        clock.advance(59)
        assert await _loaded(rig, 1, ttl="60s") == 48  # a use renews
        clock.advance(59)
        assert [i.id for i in rig.engine.sessions()] == ["s1", "s2"]
        assert await _loaded(rig, 1, ttl="60s") == 48
        clock.advance(61)
        ids = _said(1, 3)[0]
        async with rig.engine.session("probe") as probe, probe.match(ids) as match:
            assert match.tokens == 0
            assert match.reason is MissReason.EXPIRED
        for _ in range(500):
            await asyncio.sleep(0.005)
            if "s1" not in {i.id for i in rig.engine.sessions()}:
                break
        assert "s1" not in {i.id for i in rig.engine.sessions()}
        assert await _loaded(rig, 2) == 48
        await rig.engine.flush()
    if not {"nvme", "file"} & set(kinds.split("+")):
        return
    wall.advance(3600)
    async with running(kinds, tmp_path, space=SPACE, clock=clock, wall=wall) as rig:
        assert await _loaded(rig, 2) == 48
        assert await _loaded(rig, 1) == 0
        await rig.at_rest()


async def test_what_expires_during_a_restart_is_gone(tmp_path: Path) -> None:
    clock, wall = VirtualClock(50.0), VirtualClock(1e9)
    async with running("nvme", tmp_path, space=SPACE, clock=clock, wall=wall) as rig:
        await _store(rig, 1, ttl=60)
    wall.advance(59)
    async with running("nvme", tmp_path, space=SPACE, clock=clock, wall=wall) as rig:
        assert await _loaded(rig, 1, ttl=60) == 48
    wall.advance(2)
    async with running("nvme", tmp_path, space=SPACE, clock=clock, wall=wall) as rig:
        assert await _loaded(rig, 1) == 0
        assert rig.engine.stats().used == {"nvme": 0}


async def test_a_tenants_quota_costs_that_tenant_only(tmp_path: Path) -> None:
    tenants = {"small": {"quota": {"host": 4 * FRAME}}}
    async with running("host", tmp_path, space=SPACE, capacity="1MiB", tenants=tenants) as rig:
        await _store(rig, 100, tenant="other")
        for seed in range(6):
            assert (await _store(rig, seed, tenant="small")).stored == 3
            used = rig.engine.core.decisions.tenant_bytes("small", 0)
            assert used <= 4 * FRAME
        assert await _loaded(rig, 5, tenant="small") == 48
        assert await _loaded(rig, 0, tenant="small") == 0
        assert await _loaded(rig, 100, tenant="other") == 48
        async with rig.engine.session("s0", tenant="small") as session:
            assert session.explain(_said(0, 3)[0])[0].reason is MissReason.QUOTA
        big = await _store(rig, 50, blocks=8, tenant="small")
        assert 0 < big.stored <= 4
        assert SkipReason.TENANT_QUOTA in {b.reason for b in big.blocks}
        await rig.at_rest()


async def test_k8_a_flood_leaves_the_reserved_share_alone(tmp_path: Path) -> None:
    tenants = {"vip": {"reserved": {"host": 6 * FRAME}}}
    async with running("host", tmp_path, space=SPACE, capacity=12 * FRAME, tenants=tenants) as rig:
        for seed in range(2):
            assert (await _store(rig, seed, tenant="vip")).stored == 3
        for seed in range(10, 40):
            assert (await _store(rig, seed, tenant="crowd")).stored == 3
        assert [await _loaded(rig, seed, tenant="vip") for seed in range(2)] == [48, 48]
        await rig.at_rest()


async def test_a_session_quota_counts_what_it_refers_to(tmp_path: Path) -> None:
    tenants = {"t": {"session_quota": 4 * FRAME}}
    async with running("host", tmp_path, space=SPACE, tenants=tenants) as rig:
        result = await _store(rig, 1, blocks=7, tenant="t")
        assert result.stored == 4
        assert result.blocks[4].reason is SkipReason.SESSION_QUOTA
        (info,) = rig.engine.sessions()
        assert info.nbytes == 4 * FRAME
        ids = _said(1, 7)[0]
        async with (
            rig.engine.session("s1", tenant="t") as session,
            session.match(ids) as match,
        ):
            assert match.tokens == 64
            assert match.reason is MissReason.QUOTA
        await rig.at_rest()
        await usable(rig, SPACE)
