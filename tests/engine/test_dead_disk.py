"""A disk that fails, vanishes or hangs: told, counted, and no burden on the memory above it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running, wrap
from tierkv.decisions.types import SkipReason
from tierkv.errors import BackendError
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Failing, Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024


def _said(seed: int) -> tuple[list[int], kit.Memory]:
    return kit.tokens(6, seed=seed), kit.Memory(SPACE.layout, 96, seed=seed)


@pytest.mark.parametrize("how", ["failing", "removed"])
async def test_a_dead_tier_makes_the_memory_above_it_no_worse(how: str, tmp_path: Path) -> None:
    """A prompt of six blocks on memory for four: four are kept each time, disk or no disk."""
    tiers = [
        tierkv.Tier("host", 4 * FRAME),
        tierkv.Tier("nvme", "1MiB", path=str(tmp_path / "nvme")),
    ]
    backends = wrap(tiers, {"nvme": [Failing("write")] if how == "failing" else []})
    # no tick comes between a store and its load: the watermarks would make room in the memory
    ways = list(backends.values())
    async with tierkv.open(tiers=tiers, space=SPACE, backends=ways, tick=60) as engine:
        if how == "removed":
            shutil.rmtree(tmp_path / "nvme")
        for seed in range(10):
            ids, kv = _said(seed)
            async with engine.session(f"s{seed}") as session, asyncio.timeout(30):
                result = await session.store(ids, kv.view)
                assert result.stored == 4, f"store {seed}: {result}"
                tokens, back = await load(session, ids)
                assert tokens == 64
                assert back.same(kv, 64)


@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_what_should_be_durable_and_is_not_is_missing(kinds: str, tmp_path: Path) -> None:
    ids, kv = _said(1)
    fault = Failing("write")
    async with running(kinds, tmp_path, space=SPACE, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            for flushed in (await session.flush(), await rig.engine.flush()):
                assert (flushed.durable, flushed.missing) == (0, 6)
            fault.active = False
            await session.store(ids, kv.view)
            for flushed in (await session.flush(), await rig.engine.flush()):
                assert (flushed.durable, flushed.missing) == (6, 0)
            async with session.match(kit.tokens(9, seed=1)):  # seen, but never stored
                pass
            assert (await session.flush()).missing == 0
            async with session.match([7, *ids]):  # another history
                pass
            assert (await session.flush()).missing == 0
        await rig.at_rest()


async def test_a_failing_tier_is_told_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierkv.mover")
    clock = VirtualClock(100.0)
    faults = {"nvme": [Failing("write")]}
    async with running("nvme", tmp_path, space=SPACE, clock=clock, faults=faults) as rig:

        async def store(*seeds: int) -> list[str]:
            caplog.clear()
            for seed in seeds:
                ids, kv = _said(seed)
                async with rig.engine.session(f"s{seed}") as session:
                    assert (await session.store(ids, kv.view)).skipped == 6
            return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

        (line,) = await store(1, 2, 3)
        assert "tier nvme: 6 write(s) failed: [Errno" in line
        clock.advance(59)
        assert await store(4) == []
        clock.advance(2)
        (line,) = await store(5)
        assert "18 more since" in line


@pytest.mark.parametrize("operation", ["delete", "flush"])
async def test_deletes_and_syncs_that_fail_are_told(
    operation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids, kv = _said(1)
    fault = Failing(operation)
    async with running("nvme", tmp_path, space=SPACE, tick=0.01, faults={"nvme": [fault]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            with pytest.raises(Exception, match=r"fault|fails"):
                await (rig.engine.reset() if operation == "delete" else session.flush())
        what = "delete" if operation == "delete" else "sync"
        assert f"tier nvme: 1 {what}(s) failed" in caplog.text
        fault.active = False


@pytest.mark.every_loop
async def test_a_tier_that_hangs_holds_up_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, clock = Gated("write"), VirtualClock(10.0)
    tiers = [
        tierkv.Tier("host", 4 * FRAME),
        tierkv.Tier("nvme", "1MiB", path=str(tmp_path / "nvme")),
    ]
    backends: Any = wrap(tiers, {"nvme": [gate]})
    async with tierkv.open(
        tiers=tiers,
        space=SPACE,
        backends=list(backends.values()),
        tier_timeout="100ms",
        tick=0.02,
        clock=clock,
    ) as engine:
        behind = engine.runtime.behind
        waits, landed = [], engine.core.landed

        def counted(*args: Any, **kwargs: Any) -> Any:
            waits.append(args)
            return landed(*args, **kwargs)

        monkeypatch.setattr(engine.core, "landed", counted)
        async with engine.session("a") as session:
            ids, kv = _said(1)
            result = await session.store(ids, kv.view)  # waits once, and no longer than it must
            assert [b.reason for b in result.blocks] == [
                *[None] * 4,
                *[SkipReason.BACKPRESSURE] * 2,
            ]
            assert len(waits) == 1
            for seed in range(2, 8):
                result = await session.store(_said(seed)[0], _said(seed)[1].view)
                assert result.blocks[-1].reason is SkipReason.BACKPRESSURE
            assert len(waits) == 1
            gate.open_gate()
            async with asyncio.timeout(30):
                await behind.drain()  # it has come back
                clock.advance(60)  # time for a probe, whatever the breaker has learned
                while not engine.core.usable(engine.core.levels[1]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # until a probe has found it so
                assert (await session.store(ids, kv.view)).skipped == 0
                tokens, back = await load(session, ids)
            assert tokens == 96
            assert back.same(kv, 96)


@pytest.mark.parametrize("kind", ["nvme", "file"])
async def test_k4_a_root_that_cannot_be_is_a_typed_error_at_open(kind: str, tmp_path: Path) -> None:
    (tmp_path / "not-a-directory").write_bytes(b"x")
    for path in ("not-a-directory", "not-a-directory/below"):
        tiers = [
            tierkv.Tier("host", 4 * FRAME),
            tierkv.Tier(kind, "1MiB", path=str(tmp_path / path)),
        ]
        with pytest.raises(BackendError, match=kind):
            async with tierkv.open(tiers=tiers, space=SPACE):
                pass
    tiers = [tierkv.Tier(kind, "1MiB", path=str(tmp_path / "missing" / "deep"))]
    async with tierkv.open(tiers=tiers, space=SPACE, close_timeout=2.0) as engine:  # made
        assert engine.stats().used == {kind: 0}


@pytest.mark.parametrize("kind", ["nvme", "file"])
async def test_k4_no_descriptor_left_degrades_one_tier(kind: str, tmp_path: Path) -> None:
    """EMFILE, for real: the tier on disk takes nothing, memory serves, and it comes back."""
    space = kit.space()
    tiers = [
        tierkv.Tier("host", 8 * FRAME),
        tierkv.Tier(kind, "4MiB", path=str(tmp_path / kind)),
    ]
    async with tierkv.open(tiers=tiers, space=space, tick=0.02) as engine:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_first_free_descriptor(), hard))
            loaded = []
            for seed in range(8):
                ids, kv = _said(seed)
                async with engine.session(f"s{seed}") as session, asyncio.timeout(30):
                    await session.store(ids, kv.view)
                    tokens, back = await load(session, ids)
                    assert back.same(kv, tokens)
                    loaded.append(tokens)
            assert min(loaded[-3:]) >= 64, "memory turns over, disk or no disk"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(400):  # a breaker may be open: a second or two
            ids, kv = _said(77)
            async with engine.session("again") as session, asyncio.timeout(30):
                await session.store(ids, kv.view)
                if (await session.flush()).missing == 0:
                    break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the tier did not come back")


def _first_free_descriptor() -> int:
    """As a limit, it lets nobody open anything more."""
    with open(os.devnull, "rb") as probe:
        return probe.fileno()
