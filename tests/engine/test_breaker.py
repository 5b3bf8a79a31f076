"""Breakers on a live engine: a tier that hangs or fails costs a bounded time, then nothing."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import kit
from tests.engine.rig import Rig, load, running, usable
from tests.engine.slow_rig import InTurn, Timers
from tierkv.decisions.types import MissReason, SkipReason
from tierkv.errors import LoadIncomplete
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Failing, Gated, Hanging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkv.session import Session

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
SPACE = kit.space()
FRAME = 12 * 1024
GUARD_S = 60  # nothing below takes as long, unless it hangs


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait for something that must come."""
    for _ in range(GUARD_S * 200):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited {GUARD_S} s in vain: {what}")


async def cold(rig: Rig, session: Session, seed: int, blocks: int = 4) -> list[int]:
    """A prompt that is in the second tier only."""
    ids, kv = kit.tokens(blocks, seed=seed), kit.Memory(SPACE.layout, blocks * 16, seed=seed)
    await session.store(ids, kv.view)
    await rig.engine.runtime.behind.drain()
    rig.cool()
    return ids


def under_way(rig: Rig, direction: str, tier: int = 1) -> Callable[[], bool]:
    """Tells whether a batch of a tier is being read or written that is not known to hang."""
    level = rig.engine.core.levels[tier]
    return lambda: any(b.direction == direction and not b.late for b in level.flying)


async def load_in_vain(rig: Rig, timers: Timers, session: Session, ids: list[int]) -> int:
    """Load out of a tier that hangs, let its time-out pass; the tokens that came."""
    job = rig.engine.workers.spawn(load, session, ids)
    await until(under_way(rig, "read"), "a read")
    timers.advance(0.5)
    return (await job.wait())[0]


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """Time-outs pass when told to, so that a machine that stands still changes nothing."""
    return Timers(monkeypatch)


@pytest.fixture
def freeze() -> Iterator[Hanging]:
    """Switched off; whatever happens, no thread hangs longer than its test."""
    fault = Hanging("read", "write")
    fault.active = False
    yield fault
    fault.active = False
    fault.release()


def is_open(rig: Rig, tier: str = "nvme") -> bool:
    return tier in rig.engine.stats().breaker_open


async def test_f075_a_frozen_tier_costs_a_bounded_time_once_and_recovers(
    freeze: Hanging, tmp_path: Path, timers: Timers
) -> None:
    """SIGSTOP: the first calls end after the time-out, further ones at once; SIGCONT: it is back.

    What hung goes on hanging in a thread of its own; its memory is given to nobody.
    """
    async with running(
        "host+nvme",
        tmp_path,
        space=SPACE,
        faults={"nvme": [freeze]},
        tier_timeout="400ms",
        tick=0.02,
        threads=8,
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            prompts = [await cold(rig, session, seed) for seed in range(3)]
            freeze.active = True
            first = rig.engine.workers.spawn(load, session, prompts[0])
            await until(under_way(rig, "read"), "a read")
            timers.advance(0.3)
            assert not is_open(rig)
            timers.advance(0.2)
            assert is_open(rig)
            assert (await first.wait())[0] == 0
            assert rig.engine.core.decisions.reserved(0) > 0, "the thread may still write there"

            calls = rig.calls("nvme", "read")
            async with session.match(prompts[1]) as match:  # it is not even asked
                assert (match.tokens, match.reason) == (0, MissReason.FAILED)
            report = session.explain(prompts[1])[0]
            assert (report.tier, report.reason, report.about) == (None, MissReason.FAILED, "nvme")
            assert "left out" in report.rule
            for seed in range(10, 14):  # stores go on in memory, without the disk
                ids, kv = kit.tokens(2, seed=seed), kit.Memory(SPACE.layout, 32, seed=seed)
                assert (await session.store(ids, kv.view)).stored == 2
                tokens, back = await load(session, ids)
                assert tokens == 32
                assert back.same(kv, 32)
            flushed = await session.flush()  # it is not waited for, nor believed
            assert (flushed.durable, flushed.missing) == (0, 2)
            assert rig.calls("nvme", "read") <= calls + 1  # a probe, and it hangs, too

            freeze.active = False
            freeze.release()
            await until(lambda: rig.engine.core.usable(rig.engine.core.levels[1]), "it is back")
            for seed, ids in enumerate(prompts):  # a hang loses nothing
                tokens, back = await load(session, ids)
                assert tokens == 64
                assert back.same(kit.Memory(SPACE.layout, 64, seed=seed), 64)
            ids = await cold(rig, session, 77)
            await until(lambda: not is_open(rig), "writes are back as well")
            assert (await load(session, ids))[0] == 64
        await rig.at_rest()
        page = rig.engine.metrics.scrape().decode()
        assert 'tierkv_breaker_transitions_total{tier="nvme",to="closed"} 2.0' in page
        assert 'tierkv_breaker_open{direction="read",tier="nvme"} 0.0' in page


async def test_f075_while_it_is_open_calls_cost_next_to_nothing(
    freeze: Hanging, tmp_path: Path, timers: Timers
) -> None:
    """P3: a match, a load and a store end although no time-out passes, tier out."""
    async with running(
        "host+nvme",
        tmp_path,
        space=SPACE,
        faults={"nvme": [freeze]},
        tier_timeout="400ms",
        threads=8,
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            ids = await cold(rig, session, 1)
            freeze.active = True
            assert await load_in_vain(rig, timers, session, ids) == 0
            for _ in range(15):
                assert (await load(session, ids))[0] == 0
                await session.store(ids, kit.Memory(SPACE.layout, 64, seed=1).view)
            freeze.release()
        await rig.settle()


async def test_a_hanging_layer_raises_in_time(tmp_path: Path, timers: Timers) -> None:
    gate = Gated("read")
    gate.open_gate()
    async with running(
        "host+nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}, tier_timeout="400ms"
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            ids = await cold(rig, session, 1)
            gate.close_gate()

            async def by_layer() -> None:
                async with session.match(ids) as match:
                    with pytest.raises(LoadIncomplete):
                        async for _ in match.layers(into=kit.Memory(SPACE.layout, 64).view):
                            pass

            job = rig.engine.workers.spawn(by_layer)
            await until(under_way(rig, "read"), "a read")
            timers.advance(0.5)
            await job.wait()
            gate.open_gate()
        await rig.settle()


async def test_a_slow_tier_that_moves_on_is_no_hanging_one(tmp_path: Path, timers: Timers) -> None:
    """Each batch takes a good part of the time-out, many of them far more: there is progress.

    The time-out runs on time that passes when told to: a busy machine changes nothing. Where the
    tier stops in the end, it is found out: the time-out does run.
    """
    turns = InTurn("read")
    async with running(
        "host+nvme",
        tmp_path,
        space=SPACE,
        clock=VirtualClock(100.0),
        faults={"nvme": [turns]},
        tier_timeout=1.0,
    ) as rig:

        def fewer(than: int) -> bool:
            return len(rig.engine.core.levels[1].flying) < than

        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            prompts = [await cold(rig, session, seed) for seed in range(5)]
            for ids in prompts[:4]:  # one after the other
                one = rig.engine.workers.spawn(load, session, ids)
                await until(lambda: turns.waiting == 1, "a read")
                timers.advance(0.6)
                turns.let_one_through()
                assert (await one.wait())[0] == 64
                assert not is_open(rig)
            rig.cool()
            some = [rig.engine.workers.spawn(load, session, ids) for ids in prompts]
            await until(lambda: turns.waiting == len(prompts), "reads side by side")
            for left in range(len(prompts), 0, -1):  # the last one takes three time-outs
                timers.advance(0.6)
                assert not is_open(rig)
                turns.let_one_through()
                await until(partial(fewer, left), "it moves on")
            assert [(await one.wait())[0] for one in some] == [64] * len(prompts)
            rig.cool()
            last = rig.engine.workers.spawn(load, session, prompts[0])
            await until(lambda: turns.waiting == 1, "one more read")
            timers.advance(0.9)
            assert not is_open(rig)
            timers.advance(0.2)
            assert is_open(rig), "this one stands still"
            assert (await last.wait())[0] == 0
            turns.let_one_through()
        await rig.at_rest()


async def test_five_failed_batches_open_it_and_one_good_probe_closes_it(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    fault = Failing("read")
    fault.active = False
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [fault]}, tick=0.005
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            prompts = [await cold(rig, session, seed, blocks=1) for seed in range(8)]
            fault.active = True
            for ids in prompts[:5]:
                assert not is_open(rig)
                assert (await load(session, ids))[0] == 0
            assert is_open(rig)
            calls = rig.calls("nvme", "read")
            assert (await load(session, prompts[5]))[0] == 0
            await asyncio.sleep(0.05)
            assert rig.calls("nvme", "read") == calls
            clock.advance(1.0)  # a probe, which fails: the pause doubles
            await until(lambda: rig.calls("nvme", "read") == calls + 1, "a probe")
            await rig.settle()
            clock.advance(1.5)
            await asyncio.sleep(0.05)
            assert rig.calls("nvme", "read") == calls + 1
            fault.active = False
            clock.advance(0.6)
            await until(lambda: not is_open(rig), "the second probe is a good one")
            for ids in prompts[5:]:  # what nobody tried while it was broken is there
                assert (await load(session, ids))[0] == 16
        await rig.at_rest()


async def test_reads_of_a_tier_that_cannot_be_written_go_on(tmp_path: Path) -> None:
    """EROFS: the disk still gives what it has, the memory above it keeps on turning over."""
    fault = Failing("write")
    fault.active = False
    async with running(
        "host+nvme", tmp_path, space=SPACE, capacity=1 << 20, faults={"nvme": [fault]}
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            ids = await cold(rig, session, 1)
            fault.active = True
            for seed in range(10, 60):
                more, kv = kit.tokens(6, seed=seed), kit.Memory(SPACE.layout, 96, seed=seed)
                assert (await session.store(more, kv.view)).skipped == 0
                assert (await load(session, more))[0] == 96
            assert is_open(rig)
            tokens, _ = await load(session, ids)
            assert tokens == 64
            writes = rig.calls("nvme", "write")
            assert writes <= 20, "it is left alone"
            page = rig.engine.metrics.scrape().decode()
            assert 'tierkv_breaker_open{direction="read",tier="nvme"} 0.0' in page
            assert 'tierkv_breaker_open{direction="write",tier="nvme"} 1.0' in page
        await rig.at_rest()


async def test_a_store_into_a_hanging_tier_alone_is_told_why(
    freeze: Hanging, tmp_path: Path, timers: Timers
) -> None:
    freeze.active = True
    async with running(
        "nvme", tmp_path, space=SPACE, faults={"nvme": [freeze]}, tier_timeout="400ms", threads=8
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            kv = kit.Memory(SPACE.layout, 32, seed=1)
            job = rig.engine.workers.spawn(session.store, kit.tokens(2, seed=1), kv.view)
            await until(under_way(rig, "write", tier=0), "a write")
            timers.advance(0.5)
            assert (await job.wait()).skipped == 2
            for seed in range(2, 12):
                result = await session.store(kit.tokens(2, seed=seed), kv.view)
                assert {b.reason for b in result.blocks} == {SkipReason.BACKPRESSURE}
            freeze.active = False
            freeze.release()
            await rig.settle()
            core = rig.engine.core
            await until(lambda: core.usable(core.levels[0]), "a probe")
        await usable(rig, SPACE)
        assert not is_open(rig)
        await rig.at_rest()


async def test_a_probe_that_closing_cuts_short_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timers: Timers
) -> None:
    clock = VirtualClock(100.0)
    gate = Gated("read")
    gate.open_gate()
    async with (
        running(
            "host+nvme",
            tmp_path,
            space=SPACE,
            clock=clock,
            faults={"nvme": [gate]},
            tier_timeout="400ms",
            tick=0.005,
            close_timeout=1.0,
        ) as rig,
        rig.engine.session("a") as session,
        asyncio.timeout(GUARD_S),
    ):
        ids = await cold(rig, session, 1)
        gate.close_gate()
        assert await load_in_vain(rig, timers, session, ids) == 0
        calls = rig.calls("nvme", "read")
        clock.advance(1.0)
        await until(lambda: rig.calls("nvme", "read") > calls, "a probe")
    assert "Traceback" not in caplog.text
    assert rig.engine.core.staging.used == 0


async def test_the_log_names_the_tier_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    fault = Failing("read")
    fault.active = False
    async with (
        running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [fault]}) as rig,
        rig.engine.session("a") as session,
    ):
        prompts = [await cold(rig, session, seed, blocks=1) for seed in range(12)]
        fault.active = True
        for ids in prompts:
            await load(session, ids)
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert said == ["tier nvme fails or hangs: reads are left out for a while"]


async def test_a_part_in_a_tier_that_is_out_is_stored_again_above_it(
    freeze: Hanging, tmp_path: Path, timers: Timers
) -> None:
    """Else a prompt would stay a miss for as long as the disk is out, however often it comes."""
    async with running(
        "host+nvme", tmp_path, space=SPACE, faults={"nvme": [freeze]}, tier_timeout="400ms"
    ) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(GUARD_S):
            other, ids = await cold(rig, session, 2), await cold(rig, session, 1)
            kv = kit.Memory(SPACE.layout, 64, seed=1)
            freeze.active = True
            assert await load_in_vain(rig, timers, session, other) == 0
            assert (await load(session, ids))[0] == 0
            await session.store(ids, kv.view)
            tokens, back = await load(session, ids)
            assert tokens == 64
            assert back.same(kv, 64)
            freeze.active = False
            freeze.release()
        await rig.at_rest()
