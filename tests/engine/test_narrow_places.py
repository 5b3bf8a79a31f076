"""Narrow places: what is waited for comes, what is held is given back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import Rig, load, running, wrap
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError
from tierkv.layout import Layout, Space
from tierkv.mover.find import find
from tierkv.testing.faults import Gated

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
SPACE = kit.space()
IDS = kit.tokens(6)
KV = kit.Memory(SPACE.layout, 96, seed=1)


async def test_a_fetch_that_cannot_even_begin_keeps_nobody_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session, asyncio.timeout(30):
            await session.store(IDS, KV.view)
            await session.flush()
            rig.cool()
            core = rig.engine.core
            reserve = core.reserve

            def broken(*args: Any, **options: Any) -> Any:
                raise RuntimeError("injected")

            core.reserve = broken  # type: ignore[method-assign]
            async with session.match(IDS) as match:
                result = await match.load(into=kit.Memory(SPACE.layout, 96).view)
            assert (result.tokens, result.reason) == (0, MissReason.FAILED)
            core.reserve = reserve  # type: ignore[method-assign]
            assert (await load(session, IDS))[0] == 96
        await rig.at_rest()
    assert "injected" in caplog.text


async def test_a_match_left_while_it_looks_for_less_gives_that_lease_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space("sliding")
    kv = kit.Memory(space.layout, 96, seed=1)
    async with running("nvme", tmp_path, space=space) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, kv.view)
            match = session.match(IDS)
            await match.__aenter__()
            lost = [p for p in match._found.parts if p.group == 1 and p.block == 4]
            await rig.backends["nvme"].inner.delete([(p.part, p.generation) for p in lost])

            async def leave_meanwhile(*args: Any) -> Any:
                found = await find(*args)
                match.close()
                return found

            monkeypatch.setattr("tierkv.session.match.find", leave_meanwhile)
            with pytest.raises(ClosedError):
                await match.load(into=kit.Memory(space.layout, 96).view)
        monkeypatch.undo()
        await rig.at_rest()


async def test_compressed_parts_move_on_to_a_tier_that_keeps_them_raw(tmp_path: Path) -> None:
    """Batches are as large as what comes out of them, not as what goes in."""
    space = Space(tierkv.Identity("m", "r"), Layout.uniform(2, 2, 64, "float32"), 16)
    ids = kit.tokens(64)
    plain = {i: {n: torch.zeros(2, 1024, 64) for n in "kv"} for i in range(2)}
    tiers = [
        tierkv.Tier("host", "4MiB", codec="zstd"),
        tierkv.Tier("nvme", "64MiB", path=str(tmp_path / "n"), codec="raw"),
    ]
    async with tierkv.open(tiers=tiers, space=space, staging="512KiB") as engine:
        async with engine.session("a") as session:
            assert (await session.store(ids, tierkv.views.dense(plain))).stored == 64
            flushed = await session.flush()
            assert (flushed.durable, flushed.missing) == (64, 0)
        await Rig(engine, {}).at_rest()


async def test_a_layer_read_that_nobody_wants_any_more_is_not_made(tmp_path: Path) -> None:
    gate = Gated("read")
    tiers = kit.tiers("nvme", tmp_path)
    backends = wrap(tiers, {"nvme": [gate]})
    async with tierkv.open(tiers=tiers, space=SPACE, backends=list(backends.values())) as engine:
        rig = Rig(engine, backends)
        async with engine.session("a") as session:
            await session.store(IDS, KV.view)
            staging = engine.core.staging
            everything = await staging.acquire(staging.limit)
            async with session.match(IDS) as match:
                layers = match.layers(into=kit.Memory(SPACE.layout, 96).view)
                job = engine.workers.spawn(layers.__anext__)
                await asyncio.sleep(0.02)  # it waits for staging memory
            everything.release()
            with pytest.raises(ClosedError):
                await job.wait()
        gate.open_gate()
        assert rig.calls("nvme", "read") == 0
        await rig.at_rest()
