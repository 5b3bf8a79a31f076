"""Tiers that fail, lie, hang or crawl: less is loaded or stored, never anything wrong."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running, usable, wrap
from tests.engine.slow_rig import InTurn
from tierkv.abc import IoResult, IoStatus
from tierkv.decisions.types import EvictReason, MissReason, SkipReason
from tierkv.errors import BackendError, LoadIncomplete
from tierkv.testing.faults import Corrupting, Failing, Fault, Gated, Hanging, Short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.abc import ReadRequest

pytestmark = pytest.mark.anyio
BLOCKS = 6
READS: dict[str, tuple[Callable[[], Fault], MissReason]] = {
    "failing": (lambda: Failing("read", times=1), MissReason.FAILED),
    "missing": (lambda: Failing("read", times=1, status=IoStatus.MISSING), MissReason.FAILED),
    "short": (lambda: Short(times=1), MissReason.DAMAGED),
    "flipped header": (lambda: Corrupting(0.01, times=1), MissReason.DAMAGED),
    "flipped payload": (lambda: Corrupting(0.6, times=1), MissReason.DAMAGED),
}


class _One(Fault):
    """The first read comes back with one bit flipped in one of its frames."""

    def __init__(self, item: int) -> None:
        super().__init__("read", times=1)
        self._left = item

    def spoil(self, memory: memoryview) -> IoStatus:
        if self._left == 0:
            memory[len(memory) // 2] ^= 1
        self._left -= 1
        return IoStatus.OK


class _Passing(Fault):
    """A failure that the medium expects to pass."""

    def refuse(self, operation: str) -> IoResult:
        return IoResult(IoStatus.ERROR, BackendError("nvme", operation, retryable=True))


@pytest.mark.parametrize("layout", ["full", "sliding", "state"])
@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
@pytest.mark.parametrize("name", READS)
async def test_f003_a_bad_read_is_a_miss_and_the_view_stays_as_it_was(
    name: str, kinds: str, layout: str, tmp_path: Path
) -> None:
    make, reason = READS[name]
    space = kit.space(layout)
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = make()
    fault.active = False
    async with running(kinds, tmp_path, space=space, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            fault.active = True
            async with session.match(ids) as match:
                assert match.tokens == len(ids)
                back = kit.Memory(space.layout, len(ids))
                result = await match.load(into=back.view)
            assert fault.seen == 1
            assert result.tokens == 0
            assert result.reason is reason
            assert result.by_tier == {}
            assert back.untouched()
            if reason is MissReason.DAMAGED:
                page = rig.engine.metrics.scrape().decode()
                counted = [x for x in page.splitlines() if x.startswith("tierkv_corruption_total")]
                assert any("nvme" in line and not line.endswith(" 0.0") for line in counted)
            async with session.match(ids) as match:
                assert match.tokens == 0
                assert match.reason in (reason, MissReason.HOLE)
            await rig.at_rest()
            stored = await session.store(ids, kv.view)  # it heals with the next store
            assert stored.skipped == 0
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await usable(rig, space)


@pytest.mark.parametrize("block", range(BLOCKS))
async def test_damage_of_one_block_shortens_the_prefix_to_it(block: int, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("nvme", tmp_path, space=space, faults={"nvme": [_One(block)]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            tokens, back = await load(session, ids)
            assert tokens == block * space.block_tokens
            assert back.same(kv, tokens)
            assert back.untouched(tokens)
            async with session.match(ids) as match:
                assert match.tokens == block * space.block_tokens
            # a store that counts on the lost block starts earlier by itself
            stored = await session.store(ids, kv.view, start=(BLOCKS - 1) * space.block_tokens)
            assert stored.skipped == 0
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.parametrize("name", READS)
async def test_a_bad_layer_raises_and_heals(name: str, tmp_path: Path) -> None:
    make, _ = READS[name]
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = make()
    fault.active = False
    async with running("nvme", tmp_path, space=space, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            fault.active = True
            async with session.match(ids) as match:
                back = kit.Memory(space.layout, len(ids))
                with pytest.raises(LoadIncomplete) as caught:
                    async for _ in match.layers(into=back.view):
                        pass
            assert caught.value.layer == 0
            assert back.untouched()
            await session.store(ids, kv.view)
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
        await rig.at_rest()


async def test_a_retryable_fault_is_a_miss_that_costs_nothing_more(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(2)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = _Passing("read", times=1)
    async with running("nvme", tmp_path, space=space, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            assert (await load(session, ids))[0] == 0
            assert (await load(session, ids))[0] == len(ids)  # the copy was not given up
        await rig.at_rest()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_f001_a_failed_write_is_never_visible(kinds: str, code: int, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = Failing("write", code=code)
    async with (
        running(kinds, tmp_path, space=space, faults={"nvme": [fault]}) as rig,
        rig.engine.session("a") as session,
    ):
        result = await session.store(ids, kv.view)
        flushed = await session.flush()
        assert fault.seen
        assert flushed.durable == 0
        if kinds == "nvme":
            assert result.blocks[0].reason is SkipReason.FAILED
            assert result.skipped == BLOCKS
            async with session.match(ids) as match:
                assert match.tokens == 0
                assert match.reason is MissReason.FAILED
            assert next(b.reason for b in session.explain()) is MissReason.FAILED
        else:
            assert result.stored == BLOCKS
            assert flushed.missing == BLOCKS
            assert (await load(session, ids))[0] == len(ids)
        await rig.at_rest()
        fault.active = False
        await session.store(ids, kv.view)
        assert (await session.flush()).durable == BLOCKS
        assert (await load(session, ids))[0] == len(ids)


async def test_k4_a_dead_disk_does_not_clog_the_memory_tier(tmp_path: Path) -> None:
    """Nothing can be demoted any more, yet new conversations find room."""
    space = kit.space()
    options = {"write_through": False}
    async with running(
        "host+nvme",
        tmp_path,
        space=space,
        capacity="96KiB",
        options=options,
        faults={"nvme": [Failing("write")]},
        tick=60,  # none makes room between a store and its load
    ) as rig:
        loaded = []
        for seed in range(12):
            ids = kit.tokens(3, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            async with rig.engine.session(f"s{seed}") as session:
                await session.store(ids, kv.view)
                tokens, back = await load(session, ids)
                assert back.same(kv, tokens)
                loaded.append(tokens)
        assert loaded[-3:] == [48, 48, 48]
        await rig.at_rest()


async def test_results_of_a_wrong_number_are_not_believed(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(2)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running("nvme", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            inner = rig.backends["nvme"].inner.read

            async def read(
                requests: Sequence[ReadRequest], into: Sequence[memoryview]
            ) -> list[IoResult]:
                return (await inner(requests, into))[:-1]

            rig.backends["nvme"].inner.read = read  # type: ignore[method-assign]
            tokens, back = await load(session, ids)
            assert tokens == 0
            assert back.untouched()
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_deadline_ends_a_load_early(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("read")
    async with (
        running("nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, len(ids))
        async with session.match(ids) as match:
            began = asyncio.get_running_loop().time()
            result = await match.load(into=back.view, deadline="20ms")
            took = asyncio.get_running_loop().time() - began
        assert result.reason is MissReason.DEADLINE
        assert result.tokens == 0
        assert 0.015 <= took < 60
        gate.open_gate()
        await rig.at_rest()
        assert back.untouched()
        assert (await load(session, ids, deadline="10s"))[0] == len(ids)


@pytest.mark.every_loop
async def test_a_deadline_keeps_what_came_in_time(tmp_path: Path) -> None:
    """With a small window the first blocks land before the deadline, the others do not."""
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    turns = InTurn("read")
    turns.let_one_through()
    async with (
        running("nvme", tmp_path, space=space, faults={"nvme": [turns]}, staging="96KiB") as rig,
        rig.engine.session("a") as session,
        rig.engine.session("b") as other,
    ):
        await session.store(ids, kv.view)
        back, more = (kit.Memory(space.layout, len(ids)) for _ in range(2))
        async with rig.engine.match_many([(session, ids), (other, ids)]) as matches:
            results = await rig.engine.load_many(
                list(zip(matches, (back.view, more.view), strict=True)), deadline="500ms"
            )
        for result, memory in zip(results, (back, more), strict=True):
            assert result.reason is MissReason.DEADLINE
            assert memory.same(kv, result.tokens)
            assert memory.untouched(result.tokens)
        assert 0 < results[0].tokens < len(ids)
        for _ in ids:
            turns.let_one_through()
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_hanging_load_holds_up_nobody_else(tmp_path: Path) -> None:
    space = kit.space()
    cold, warm = kit.tokens(BLOCKS, seed=1), kit.tokens(BLOCKS, seed=2)
    kv = {s: kit.Memory(space.layout, len(cold), seed=s) for s in (1, 2)}
    gate = Gated("read")
    async with running("host+nvme", tmp_path, space=space, faults={"nvme": [gate]}) as rig:
        engine = rig.engine
        async with engine.session("cold") as a, engine.session("warm") as b:
            await a.store(cold, kv[1].view)
            await a.flush()
            rig.cool()
            await b.store(warm, kv[2].view)
            loads = [engine.workers.spawn(load, a, cold)]
            await gate.arrived()
            async with asyncio.timeout(30):
                tokens, back = await load(b, warm)  # RAM
                assert tokens == len(warm)
                assert back.same(kv[2], tokens)
                more = kit.tokens(1, seed=3)
                await b.store(warm + more, kit.Memory(space.layout, len(warm) + 16, seed=2).view)
            assert not loads[0].done()
            gate.open_gate()
            tokens, back = await loads[0].wait()
            assert tokens == len(cold)
            assert back.same(kv[1], tokens)
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("operation", ["read", "write", "flush", "delete", "flush+aclose"])
async def test_closing_is_bounded_whatever_hangs(operation: str, tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    hanging = Hanging(*operation.split("+"))
    tiers = kit.tiers("host+nvme", tmp_path)
    backends = wrap(tiers, {"nvme": [hanging]})
    engine = tierkv.Engine(
        tierkv.EngineConfig(tiers=tiers, close_timeout=0.3, tick=0.01),
        space=space,
        backends=list(backends.values()),
    )
    hanging.active = False
    await engine.start()
    try:
        async with engine.session("a") as session:
            await session.store(ids, kv.view)
            rig = Rig(engine, backends)
            await rig.settle()
            rig.cool()
            hanging.active = True
            if operation == "read":
                async with session.match(ids) as match:
                    back = kit.Memory(space.layout, len(ids))
                    result = await match.load(into=back.view, deadline="20ms")
                    assert result.reason is MissReason.DEADLINE
            elif operation == "delete":
                await engine.runtime.behind.drain()
                engine.forget_session("a")
                core = engine.core
                parts = [part for part, _, _ in core.decisions.parts(1)]
                core.free(core.decisions.forget(parts, EvictReason.REMOVED, core.clock()))
                await asyncio.sleep(0.05)
            else:
                await session.store(kit.tokens(BLOCKS, seed=2), kv.view)
        async with asyncio.timeout(60):
            report = await engine.aclose()
        assert report.unwritten == (BLOCKS if operation == "write" else 0)
        assert await engine.aclose() == report
    finally:
        hanging.release()


@pytest.mark.every_loop
async def test_closing_ends_loads_at_once(tmp_path: Path) -> None:
    space = kit.space()
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    gate = Gated("read")
    faults = {"nvme": [gate]}
    async with (
        running("nvme", tmp_path, space=space, faults=faults, close_timeout=100) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        back = kit.Memory(space.layout, len(ids))
        results = []

        async def loading() -> None:
            async with session.match(ids) as match:
                results.append(await match.load(into=back.view))

        async with anyio.create_task_group() as group:
            group.start_soon(loading)
            await gate.arrived()
            async with asyncio.timeout(30):
                await rig.engine.aclose()
        assert results[0].tokens == 0
        assert results[0].reason is MissReason.FAILED
        assert back.untouched()
    # and what it read is not taken for lost
    async with running("nvme", tmp_path, space=space) as rig, rig.engine.session("a") as session:
        assert (await load(session, ids))[0] == len(ids)
