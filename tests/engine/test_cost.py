"""Load or recompute on a live engine: throttled tiers, deadlines, rules told, codecs chosen."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.rig import Rig, load, running, usable
from tierkv.abc import IoStatus
from tierkv.decisions.log import replay
from tierkv.decisions.types import EvictReason, MissReason
from tierkv.engine.compose import make_decisions
from tierkv.errors import ConfigError, LayoutError
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Fault

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.session import Session

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024  # of a block of 16 tokens


class Throttled(Fault):
    """Reads take their time on the engine's clock: no test waits for it."""

    def __init__(self, clock: VirtualClock, bandwidth: float) -> None:
        super().__init__("read")
        self.bandwidth = bandwidth
        self._clock = clock

    def spoil(self, memory: memoryview) -> IoStatus:
        """Let the time pass that this buffer takes."""
        self._clock.advance(len(memory) / self.bandwidth)
        return IoStatus.OK


async def stored(
    rig: Rig, session: Session, blocks: int, seed: int
) -> tuple[list[int], kit.Memory]:
    """A prompt that is in the second tier only."""
    ids, kv = kit.tokens(blocks, seed=seed), kit.Memory(SPACE.layout, blocks * 16, seed=seed)
    await session.store(ids, kv.view)
    await rig.engine.runtime.behind.drain()
    rig.cool()
    return ids, kv


async def quiet(rig: Rig) -> None:
    """Wait until the engine reads nothing for itself."""
    for _ in range(2000):
        if not rig.engine.core.levels[1].probing:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("a probe that nobody holds up does not end")


async def warm_up(rig: Rig, session: Session, times: int = 4) -> None:
    """Let the engine learn what reads of its second tier cost."""
    for seed in range(1000, 1000 + times):
        ids, _ = await stored(rig, session, 1 + 3 * (seed % 2), seed)
        assert (await load(session, ids))[0] == len(ids)


async def test_f073_a_throttled_tier_changes_what_is_loaded(tmp_path: Path) -> None:
    """P2: a hit never costs more than recomputing it, and the rule is told."""
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, 100 * FRAME)  # blocks a second
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            session.computed(1600, 10.0)  # 10 blocks a second
            ids, kv = await stored(rig, session, 8, seed=1)
            tokens, back = await load(session, ids)
            assert tokens == 128
            assert back.same(kv, 128)

            throttle.bandwidth = FRAME  # slower than recomputing from now on
            for seed in range(2, 8):
                ids, kv = await stored(rig, session, 8, seed)
                last = await load(session, ids)
            assert last[0] == 0
            assert session.explain(ids)[3].tier == "nvme"
            back = kit.Memory(SPACE.layout, 128)
            async with session.match(ids) as match:
                assert (match.tokens, match.worth) == (128, 0)
                result = await match.load(into=back.view)
            assert (result.tokens, result.reason) == (0, MissReason.SLOWER)
            assert result.rule.startswith("tier nvme: 8 blocks would take ")
            assert back.same(kit.Memory(SPACE.layout, 128), 128), "nothing was written"
            report = session.explain(ids)[5]
            assert (report.reason, report.about) == (MissReason.SLOWER, "nvme")
            assert "would take" in report.rule
            assert "recomputing" in str(report)

            # what is in memory comes all the same
            first = ids[: 3 * 16]
            async with rig.engine.session("b") as other:
                half = kit.Memory(SPACE.layout, 48, seed=7)
                rig.engine.forget_session("a")
                await rig.engine.reset()
                await other.store(first, half.view)
                await rig.engine.runtime.behind.drain()
                rest = kit.Memory(SPACE.layout, 128, seed=7)
                await other.store(ids, rest.view, start=48)
                await rig.engine.runtime.behind.drain()
                cool_behind(rig, other, 3)
                tokens, back = await load(other, ids)
                assert tokens == 48
                assert back.same(half, 48)
        await rig.at_rest()


def cool_behind(rig: Rig, session: Session, blocks: int) -> None:
    """Leave only the first blocks of a session in the first tier."""
    core = rig.engine.core
    parts = list(session.state.parts())[blocks:]
    for part in reversed(parts):
        generation = core.decisions.state(part, core.clock()).generation
        core.free(
            core.decisions.dropped([(part, generation)], 0, EvictReason.CAPACITY, core.clock())
        )


async def test_a_throttled_tier_is_looked_at_again(tmp_path: Path) -> None:
    """It is not read for callers, but the engine reads a little of it now and then."""
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, FRAME)
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            session.computed(1600, 10.0)
            ids, _ = await stored(rig, session, 8, seed=1)
            assert (await load(session, ids))[0] == 0
            throttle.bandwidth = 1000 * FRAME
            reads = rig.calls("nvme", "read")
            for _ in range(5):  # no time passes: no further looks
                assert (await load(session, ids))[0] == 0
            await asyncio.sleep(0.05)
            assert rig.calls("nvme", "read") <= reads + 1
            loaded = 0
            for _ in range(100):
                clock.advance(6.0)
                loaded = (await load(session, ids))[0]
                await quiet(rig)  # before any more time passes
                if loaded:
                    break
            assert loaded == 128
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_deadline_takes_what_fits(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, 10 * FRAME)
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            ids, kv = await stored(rig, session, 20, seed=1)
            back = kit.Memory(SPACE.layout, 320)
            async with session.match(ids) as match:
                assert match.worth == match.tokens == 320  # the speed of prefill is not known
                before = clock()
                result = await match.load(into=back.view, deadline=1.0)
            assert result.reason is MissReason.DEADLINE
            assert "s are left" in result.rule
            assert 0 < result.tokens < 320
            assert clock() - before <= 1.01
            assert back.same(kv, result.tokens)
        await rig.at_rest()


@pytest.mark.parametrize("layout", ["sliding", "state"])
async def test_a_trimmed_prefix_of_windows_and_states_is_a_whole_one(
    layout: str, tmp_path: Path
) -> None:
    space = kit.space(layout)
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, 1e12)
    async with running(
        "host+nvme", tmp_path, space=space, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            ids = kit.tokens(20, seed=3)
            kv = kit.Memory(space.layout, 320, seed=3)
            for blocks in range(1, 21):  # a state at every boundary
                await session.store(ids[: blocks * 16], kv.view, start=(blocks - 1) * 16)
            await rig.engine.runtime.behind.drain()
            rig.cool()
            throttle.bandwidth = 10 * 8192
            core = rig.engine.core
            for size in (8192, 65536) * 3:
                core.decisions.sample(1, "read", size, size / throttle.bandwidth, clock())
            back = kit.Memory(space.layout, 320)
            async with session.match(ids) as match:
                assert match.tokens == 320
                result = await match.load(into=back.view, deadline=1.0)
            assert result.reason is MissReason.DEADLINE
            assert 0 < result.tokens < 320
            if layout == "sliding":
                assert back.same(kv, result.tokens)
        await rig.at_rest()


async def test_layers_bring_all_or_what_is_asked_for(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, FRAME)
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            session.computed(1600, 1.0)
            ids, kv = await stored(rig, session, 4, seed=1)
            back = kit.Memory(SPACE.layout, 64)
            async with session.match(ids) as match:
                assert (match.tokens, match.worth) == (64, 0)
                assert [n async for n in match.layers(into=back.view, tokens=match.worth)] == []
                with pytest.raises(LayoutError, match=r"match\.worth"):
                    match.layers(into=back.view, tokens=16)
                assert [n async for n in match.layers(into=back.view)] == [0, 1, 2]
            assert back.same(kv, 64)
        await rig.at_rest()


async def test_saved_seconds_and_figures_are_shown(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, 100 * FRAME)
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            session.computed(1600, 10.0)
            ids, _ = await stored(rig, session, 8, seed=1)
            await load(session, ids)
        stats = rig.engine.stats()
        read = stats.traffic["nvme"][0]
        assert read.direction == "read"
        assert read.bandwidth == pytest.approx(100 * FRAME, rel=0.2)
        assert stats.breaker_open == ()
        assert stats.chains == {"host": "raw", "nvme": "raw"}
        assert stats.prefill == {SPACE.fingerprint.hex(): 160}
        page = rig.engine.metrics.scrape().decode()
        saved = next(x for x in page.splitlines() if x.startswith("tierkv_recompute_seconds_saved"))
        assert float(saved.split()[1]) == pytest.approx(0.72, rel=0.2)  # 0.8 s less 0.08 s
        assert 'tierkv_tier_bandwidth_bytes_per_second{direction="read",tier="nvme"}' in page


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 1.0), (5, 0.0), (-1, 1.0), ("5", 1.0), (10**400, 1.0)]
)
async def test_nonsense_about_speed_is_refused(tokens: Any, seconds: float, tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig, rig.engine.session("a") as session:
        with pytest.raises(ConfigError, match="positive"):
            session.computed(tokens, seconds)


async def test_a_batch_of_loads_is_weighed_too(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, FRAME)
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            session.computed(1600, 1.0)
            ids, _ = await stored(rig, session, 4, seed=1)
            async with rig.engine.match_many([(session, ids)]) as (match,):
                view = kit.Memory(SPACE.layout, 64).view
                (result,) = await rig.engine.load_many([(match, view)])
            assert (result.tokens, result.reason) == (0, MissReason.SLOWER)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_the_deadline_of_a_batch_of_loads_takes_what_fits_of_each(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, 2 * FRAME)  # blocks a second
    async with running(
        "host+nvme", tmp_path, space=SPACE, clock=clock, faults={"nvme": [throttle]}
    ) as rig:
        async with rig.engine.session("a") as a, rig.engine.session("b") as b:
            await warm_up(rig, a)
            prompts = [
                (await stored(rig, session, 6, seed))[0] for seed, session in ((1, a), (2, b))
            ]
            backs = [kit.Memory(SPACE.layout, 96) for _ in prompts]
            pairs = list(zip((a, b), prompts, strict=True))
            async with rig.engine.match_many(pairs) as matches:
                views = [(m, back.view) for m, back in zip(matches, backs, strict=True)]
                results = await rig.engine.load_many(views, deadline=1.1)
            for result in results:
                assert result.tokens == 32
                assert result.reason is MissReason.DEADLINE
                assert "1.1 s" in result.rule or "s are left" in result.rule
        await rig.at_rest()


async def test_a_live_run_with_costs_replays_byte_for_byte(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    throttle = Throttled(clock, FRAME * 3.7)
    path = tmp_path / "decisions.log"
    async with running(
        "host+nvme",
        tmp_path,
        space=SPACE,
        clock=clock,
        faults={"nvme": [throttle]},
        decision_log=str(path),
    ) as rig:
        async with rig.engine.session("a") as session:
            await warm_up(rig, session)
            session.computed(1600, 3.3)
            for seed in range(1, 5):
                ids, _ = await stored(rig, session, 4, seed)
                await load(session, ids, deadline=2.0)
        await rig.at_rest()
        again = make_decisions(rig.engine.config, rig.engine.core.levels)
    lines = path.read_bytes().splitlines(keepends=True)
    assert {json.loads(line)["op"] for line in lines} >= {"plan_load", "sample", "computed"}
    assert list(replay(lines, again)) == lines


async def test_f076_repeated_matches_of_a_long_prompt_are_cheap(tmp_path: Path) -> None:
    """P1: a waiting request that looks again each step hashes nothing and holds nobody up."""
    space = kit.space(block=1)
    async with running("host", tmp_path, space=space, capacity="32MiB", history=0) as rig:
        async with rig.engine.session("a") as session:
            ids = kit.tokens(1500, seed=1, block=1)
            kv = kit.Memory(space.layout, 1500, seed=1)
            await session.store(ids, kv.view)
            hops, jobs = rig.engine.stats().thread_hops, rig.engine.stats().tasks_spawned
            first = time.thread_time()
            for _ in range(20):
                async with session.match(ids) as match:
                    assert match.tokens == 1500
            spent = time.thread_time() - first
            assert rig.engine.stats().thread_hops == hops
            assert rig.engine.stats().tasks_spawned == jobs
            assert spent / (20 * 1500) < 1e-3  # a guard; in fact it is some 5 us a block
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("layout", ["full", "state"])
async def test_a_weighed_load_may_be_cancelled_at_each_step(layout: str, tmp_path: Path) -> None:
    space = kit.space(layout)
    clock = VirtualClock(100.0)
    ids, kv = kit.tokens(6, seed=3), kit.Memory(space.layout, 96, seed=3)
    async with running("host+nvme", tmp_path, space=space, clock=clock) as rig:
        async with rig.engine.session("a") as session:
            for blocks in range(1, 7):
                await session.store(ids[: blocks * 16], kv.view, start=(blocks - 1) * 16)
            await rig.engine.runtime.behind.drain()
            costs = rig.engine.core.decisions
            for size in (8192, 65536) * 3:
                costs.sample(1, "read", size, size / 30_000, clock())
            session.computed(100, 1e3)

            async def part_of_it() -> int:
                rig.cool()
                back = kit.Memory(space.layout, 96)
                async with session.match(ids) as match:
                    return (await match.load(into=back.view, deadline=1.0)).tokens

            async for run in cancel_at_each_step(part_of_it):
                await rig.at_rest()
                if run.outcome == "completed":
                    assert isinstance(run.value, int)
                    assert run.value < 96
                for size in (8192, 65536) * 3:  # no time passes here: keep it a slow tier
                    costs.sample(1, "read", size, size / 30_000, clock())
        await usable(rig, space)
