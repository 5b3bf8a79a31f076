"""Loads from a device tier into that device's memory: verified there, no byte crosses over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests import kit
from tests.engine.device_rig import SPACE, make_tiers, on_device, said
from tests.engine.rig import load
from tierkv.decisions.types import MissReason
from tierkv.errors import LoadIncomplete
from tierkv.testing.cancel import cancel_at_each_step

if TYPE_CHECKING:
    from pathlib import Path

    import tierkv
    from tests.engine.device_rig import DeviceRig

pytestmark = pytest.mark.anyio


def _spoil(rig: DeviceRig, block: int, match: tierkv.session.Match) -> None:
    """Flip a bit of one leased frame in device memory."""
    (part,) = [p for p in match._found.parts if p.block == block]
    held = rig.tier.borrow(part.part, part.generation)
    assert held is not None
    held.buffer.tensor[held.header.sections[2].offset + 3] ^= 1


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim:5"])
async def test_bytes_stay_on_the_device(device: str, layerwise: bool, tmp_path: Path) -> None:
    ids, kv = said(1)
    payload = sum(t.nbytes for layer in kv.layers.values() for t in layer.values())
    async with on_device(make_tiers("device+nvme", tmp_path, device)) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await rig.settle()  # copies to the tier below are read by way of the host
            calls = rig.calls("device", "read")
            loaded = rig.sim.counters.loaded_bytes if device != "cpu" else 0
            back = kit.Memory(SPACE.layout, len(ids))
            async with session.match(ids) as match:
                if layerwise:
                    layers = match.layers(into=back.view)
                    assert [x async for x in layers] == [0, 1, 2]
                    assert layers.by_tier == {"device": len(ids)}
                else:
                    result = await match.load(into=back.view)
                    assert result.by_tier == {"device": len(ids)}
            assert back.same(kv, len(ids))
            assert rig.calls("device", "read") == calls
            if device != "cpu":
                assert rig.sim.counters.loaded_bytes - loaded == payload
        await rig.clean()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim:6"])
async def test_damage_in_device_memory_is_a_miss(
    device: str, layerwise: bool, tmp_path: Path
) -> None:
    ids, kv = said(1)
    async with on_device(make_tiers("device", tmp_path, device)) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            back = kit.Memory(SPACE.layout, len(ids))
            async with session.match(ids) as match:
                _spoil(rig, 2, match)
                if layerwise:
                    layers = match.layers(into=back.view)
                    assert await anext(layers) == 0
                    with pytest.raises(LoadIncomplete) as caught:
                        await anext(layers)
                    assert caught.value.layer == 1
                else:
                    result = await match.load(into=back.view)
                    assert (result.tokens, result.reason) == (32, MissReason.DAMAGED)
                    assert back.same(kv, 32)
                    assert back.untouched(32)
            page = rig.engine.metrics.scrape().decode()
            counted = [x for x in page.splitlines() if x.startswith("tierkv_corruption_total")]
            assert any('tier="device"' in x and not x.endswith(" 0.0") for x in counted)
            async with session.match(ids) as match:
                assert match.tokens == 32
            await session.store(ids, kv.view)  # it heals with the next store
            assert (await load(session, ids))[0] == len(ids)
        await rig.clean()


async def test_a_frame_that_the_device_cannot_verify_is_read_like_any_other(
    tmp_path: Path,
) -> None:
    ids, kv = said(1)
    async with on_device(make_tiers("device", tmp_path, "sim:7")) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            rig.backends["device"].borrow = lambda *args: None  # type: ignore[attr-defined]
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            assert rig.calls("device", "read") == 1
            del rig.backends["device"].borrow  # type: ignore[attr-defined]
        await rig.clean()


@pytest.mark.every_loop
@pytest.mark.parametrize("layerwise", [False, True])
async def test_cancelled_at_each_step_frames_stay_until_the_copies_ran(
    layerwise: bool, tmp_path: Path
) -> None:
    ids, kv = said(1)
    views: list[kit.Memory] = []
    async with on_device(make_tiers("device", tmp_path, "sim:8")) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)

            async def once() -> None:
                views.append(kit.Memory(SPACE.layout, len(ids)))
                async with session.match(ids) as match:
                    if layerwise:
                        async for _ in match.layers(into=views[-1].view):
                            pass
                    else:
                        await match.load(into=views[-1].view)

            async for run in cancel_at_each_step(once):
                before = [t.clone() for x in views[-1].layers.values() for t in x.values()]
                await rig.engine.reset()  # at once: what is freed is poisoned
                await rig.settle()
                await rig.sim.wait(rig.sim.loads.record())
                after = [t for x in views[-1].layers.values() for t in x.values()]
                assert all(map(torch.equal, before, after)), f"written after {run}"
                if run.outcome == "completed":
                    assert views[-1].same(kv, len(ids))
                await session.store(ids, kv.view)
        await rig.clean()
