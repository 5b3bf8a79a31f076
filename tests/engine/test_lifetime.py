"""From start to end: loops, processes, draining, a whole turn that never blocks the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import anyio
import pytest

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, Rig, is_durable, load, running, wrap
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.testing.faults import Failing, Gated, Slow

KINDS = kit.on_every_loop(COMBINATIONS, "host", "host+nvme", "device+file")
ROOT = Path(__file__).parents[2]
SPACE = kit.space()
IDS = kit.tokens(4)
KV = kit.Memory(SPACE.layout, 64, seed=1)


@pytest.mark.parametrize("kinds", COMBINATIONS)
def test_f052_one_configuration_on_two_loops(kinds: str, tmp_path: Path) -> None:
    config = tierkv.EngineConfig(tiers=kit.tiers(kinds, tmp_path))
    outside = tierkv.Engine(config, space=SPACE)  # made outside any loop

    async def first() -> int:
        async with outside, outside.session("a") as session:
            await session.store(IDS, KV.view)
            return (await load(session, IDS))[0]

    async def second() -> int:
        async with tierkv.open(config, space=SPACE) as engine, engine.session("a") as session:
            return (await load(session, IDS))[0]

    assert asyncio.run(first()) == 64
    assert asyncio.run(second()) == (64 if is_durable(kinds) else 0)
    with pytest.raises(ClosedError, match="opened once"):
        asyncio.run(outside.start())


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [ROOT, *(ROOT / part for part in ("backends", "codecs", "adapters"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("hold", ["frame", "global"])
def test_f055_a_script_that_never_closes_ends_and_warns(hold: str, tmp_path: Path) -> None:
    done = _run(
        """
        import asyncio, sys, time
        import tierkv
        from tests import kit

        async def main():
            tiers = kit.tiers("host+nvme", __import__("pathlib").Path(sys.argv[1]))
            engine = tierkv.Engine(tierkv.EngineConfig(tiers=tiers), space=kit.space())
            await engine.start()
            async with engine.session("a") as session:
                ids = kit.tokens(4)
                await session.store(ids, kit.Memory(engine.default_space.layout, 64, seed=1).view)
            if sys.argv[2] == "global":
                globals()["kept"] = engine

        began = time.monotonic()
        asyncio.run(main())
        print("ended", time.monotonic() - began)
        """,
        str(tmp_path),
        hold,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) < 60
    assert "ResourceWarning" in done.stderr
    assert "was never closed" in done.stderr


def test_an_engine_that_is_forgotten_says_so() -> None:
    async def main() -> None:
        engine = tierkv.Engine(tierkv.EngineConfig(tiers=[tierkv.Tier("host", "1MiB")]))
        await engine.start()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert any("never closed" in str(w.message) for w in caught)


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_f056_closing_drains_the_queue(tmp_path: Path) -> None:
    slow = Slow(0.02, "write")
    async with running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [slow]}) as rig:
        for seed in range(12):
            async with rig.engine.session(f"s{seed}") as session:
                await session.store(kit.tokens(4, seed=seed), KV.view)
        report = await rig.engine.aclose()
        assert report.unwritten == 0
    async with running("nvme", tmp_path, space=SPACE) as rig:
        for seed in range(12):
            async with rig.engine.session(f"s{seed}") as session:
                assert (await load(session, kit.tokens(4, seed=seed)))[0] == 64


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_f056_what_closing_drops_is_counted(tmp_path: Path) -> None:
    gate = Gated("write")
    tiers = kit.tiers("host+nvme", tmp_path)
    backends = wrap(tiers, {"nvme": [gate]})
    engine = tierkv.Engine(
        tierkv.EngineConfig(tiers=tiers, close_timeout=0.2),
        space=SPACE,
        backends=list(backends.values()),
    )
    async with engine:
        async with engine.session("a") as session:
            await session.store(IDS, KV.view)
            flush = engine.workers.spawn(session.flush)
            await gate.arrived()
        first, second = await _both(engine)
        assert first == second
        assert first.unwritten == 4
        with pytest.raises(ClosedError):
            await flush.wait()


async def _both(engine: tierkv.Engine) -> list[tierkv.engine.CloseReport]:
    reports: list[tierkv.engine.CloseReport] = []

    async def close() -> None:
        reports.append(await engine.aclose())

    async with anyio.create_task_group() as group:
        group.start_soon(close)
        group.start_soon(close)
    return reports


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_a_start_that_fails_leaves_nothing_behind(
    tmp_path: Path, no_fd_leaks: None, no_thread_leaks: None, no_task_leaks: None
) -> None:
    tiers = [
        *kit.tiers("host+nvme", tmp_path),
        tierkv.Tier("nvme", "64MiB", name="second", path=str(tmp_path / "second")),
    ]
    backends = wrap(tiers, {"second": [Failing("open", times=1)]})
    for _ in range(2):
        try:
            async with tierkv.open(tiers=tiers, backends=list(backends.values())) as engine:
                assert engine.stats().leases == 0
        except BackendError as error:
            assert "open fails" in str(error)  # noqa: PT017 - the second round succeeds
        backends = wrap(tiers)
    with pytest.raises(ConfigError, match="backends were given"):
        async with tierkv.open(tiers=tiers, backends=[]):
            pass


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_one_root_has_one_owner(tmp_path: Path) -> None:
    async with running("nvme", tmp_path, space=SPACE):
        with pytest.raises(BackendError, match="nvme"):
            async with running("nvme", tmp_path, space=SPACE):
                pass


@pytest.mark.anyio
@pytest.mark.parametrize("kinds", KINDS)
async def test_a_whole_turn_never_blocks_the_loop(
    kinds: str, tmp_path: Path, no_blocking: None
) -> None:
    space = kit.space("mixed")
    ids = kit.tokens(40)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    log = str(tmp_path / "log")
    async with running(kinds, tmp_path, space=space, decision_log=log, tick=0.005) as rig:
        engine = rig.engine
        async with engine.session("a", ttl="1h") as session:
            await (await engine.prefetch(session="a", tokens=ids)).wait()
            await session.store(ids[:600], kv.view, tail=True)
            await session.flush()
            rig.cool()
            tokens, back = await load(session, ids)
            assert back.same(kv, tokens)
            async with session.match(ids) as match:
                async for _ in match.layers(into=back.view):
                    pass
            await session.store(ids, kv.view, start=tokens)
            async with session.fork("b") as branch:
                await load(branch, ids)
            await asyncio.sleep(0.02)  # some background ticks
            session.explain()
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_two_spaces_share_an_engine(tmp_path: Path) -> None:
    names = ["full", "sliding", "latent", "state", "mixed"]
    async with running("host+nvme", tmp_path, space=SPACE, capacity="96KiB") as rig:
        memories: dict[str, kit.Memory] = {}

        async def talk(name: str) -> None:
            space = kit.space(name, model=name)
            bound = rig.engine.space(space.identity, space.layout, 16)
            memories[name] = kv = kit.Memory(space.layout, len(IDS), seed=1)
            async with bound.session("same name") as session:
                for _ in range(3):
                    await session.store(IDS, kv.view)
                    tokens, back = await load(session, IDS)
                    assert tokens == 64
                    assert back.same(kv, 64)

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(talk, name)
        assert len(rig.engine.sessions()) == len(names)
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_f051_destroy_while_it_is_loaded_and_prefetched(tmp_path: Path) -> None:
    gate = Gated("read")
    async with running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await session.flush()
            rig.cool()
            fetched = await rig.engine.prefetch(session="a")
            loading = rig.engine.workers.spawn(load, session, IDS)
            await gate.arrived()
            session.destroy()
            assert rig.engine.sessions() == []
            gate.open_gate()
            assert await fetched.wait() == 4
            tokens, back = await loading.wait()
            assert tokens == 64
            assert back.same(KV, 64)
            await session.store(IDS[:40], KV.view, tail=True)  # the handle is open still
        async with rig.engine.session("a") as session:
            assert session.token_ids == []
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_f050_a_session_is_opened_again_while_it_is_flushed(tmp_path: Path) -> None:
    gate = Gated("write")
    async with running("host+nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            flush = rig.engine.workers.spawn(session.flush)
            await gate.arrived()
        async with asyncio.timeout(30), rig.engine.session("a") as again:
            assert (await load(again, IDS))[0] == 64
            assert (await again.store(IDS, KV.view)).present == 4
        gate.open_gate()
        assert (await flush.wait()).durable == 4
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_a_broken_worker_comes_back(tmp_path: Path, caplog: Any) -> None:
    """An observer or backend that raises where it must not costs a restart, no more."""
    tiers = kit.tiers("host+nvme", tmp_path)
    backends = wrap(tiers)
    async with tierkv.open(tiers=tiers, space=SPACE, backends=list(backends.values())) as engine:
        rig = Rig(engine, backends)
        core, broken = engine.core, 1
        reserve = core.reserve

        def failing(*args: Any, **options: Any) -> Any:
            nonlocal broken
            if options.get("source") is not None and broken:
                broken -= 1
                raise RuntimeError("injected")
            return reserve(*args, **options)

        core.reserve = failing  # type: ignore[method-assign]
        async with engine.session("a") as session:
            await session.store(IDS, KV.view)
            await rig.settle()
            assert broken == 0
            value = engine.metrics.registry.get_sample_value(
                "tierkv_worker_restarts_total", {"worker": "write-behind"}
            )
            assert value == 1
            assert (await session.flush()).durable == 4
        await rig.at_rest()
    assert "injected" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("kinds", KINDS)
async def test_no_run_reuses_a_generation_of_an_earlier_one(kinds: str, tmp_path: Path) -> None:
    """Else a frame left by a crash, its record lost, could pass for the one stored after it."""
    highest = 0
    for _ in range(3):
        async with running(kinds, tmp_path, space=SPACE) as rig:
            async with rig.engine.session("a") as session:
                assert (await session.store(IDS, KV.view)).stored == 4
            generations = [g for _, g, _ in rig.engine.core.decisions.parts(0)]
            assert min(generations) > highest
            highest = max(generations)
            await rig.engine.reset()  # nothing is left from which the number could be known
