"""Stores out of a device's memory: late work is waited for, nothing is copied twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.rig import load, running, usable
from tests.engine.simulated import device_of, late, simulated
from tierkv.decisions.types import SkipReason
from tierkv.frame import decode_header
from tierkv.testing.cancel import cancel_at_each_step

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.anyio

KINDS = ("host", "nvme", "host+nvme", "device", "device+host", "device+nvme")


@pytest.mark.parametrize("layout", list(kit.LAYOUTS))
@pytest.mark.parametrize("kinds", KINDS)
async def test_what_the_model_writes_late_is_stored(
    kinds: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space(layout)
    ids = kit.tokens(4.5)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with simulated(kinds, tmp_path, monkeypatch, space=space) as (rig, device):
        async with rig.engine.session("a") as session:
            result = await session.store(ids, late(device, kv).view, tail=True)
            assert [b.state for b in result.blocks] == ["stored"] * 5
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()


@pytest.mark.parametrize("codec", ["zstd", "int8"])
@pytest.mark.parametrize("kinds", ["host", "nvme", "device"])
async def test_other_chains_encode_from_a_staged_copy(
    kinds: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space("mixed")
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    plain = kit.Memory(space.layout, len(ids))
    tiers = [tierkv.Tier("host", "4MiB", codec=codec)]
    async with (
        tierkv.open(tiers=tiers, space=space) as engine,
        engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        async with session.match(ids) as match:
            await match.load(into=plain.view)  # what this chain makes of it in host memory
    options = {"codec": codec}
    async with simulated(kinds, tmp_path, monkeypatch, space=space, options=options) as (
        rig,
        device,
    ):
        async with rig.engine.session("a", fidelity="lossy") as session:
            assert (await session.store(ids, late(device, kv).view)).stored == 4
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(plain, tokens)
        await rig.at_rest()


async def test_a_store_is_one_copy_per_byte_and_one_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    ids = kit.tokens(8)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    nbytes = 8 * space.layout.groups[0].raw_bytes(16)
    async with simulated("host", tmp_path, monkeypatch, space=space, tick=60) as (rig, device):
        async with rig.engine.session("a") as session:
            before = rig.engine.stats().thread_hops
            await session.store(ids, kv.view)
            assert device.counters.submissions == 1
            assert device.counters.stored_bytes == nbytes
            assert rig.engine.core.bytes_gathered == nbytes
            assert rig.engine.stats().thread_hops == before  # it is small
            assert rig.engine.stats().staging_used == 0
        await rig.at_rest()


async def test_a_resident_store_moves_headers_only_across(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    ids = kit.tokens(8)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with simulated("device", tmp_path, monkeypatch, space=space) as (rig, device):
        async with rig.engine.session("a") as session:
            assert (await session.store(ids, late(device, kv).view)).stored == 8
            core = rig.engine.core
            assert device.counters.folded == 8 * 6
            assert rig.calls("device", "write") == 0
            tier = core.levels[0].resident
            assert tier is not None
            for part, generation, _ in core.decisions.parts(0):
                resident = tier.borrow(part, generation)
                assert resident is not None
                assert resident.header.folded
                frame = memoryview(resident.buffer.tensor.numpy().tobytes())
                assert decode_header(frame) == resident.header
        await rig.at_rest()


async def test_host_memory_goes_to_a_device_tier_folded(tmp_path: Path) -> None:
    """A view elsewhere takes the staged way, and is sealed as the device can check it."""
    space = kit.space("mixed")
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    tiers = [tierkv.Tier("device", "4MiB", device="sim:5", codec="zstd")]
    async with tierkv.open(tiers=tiers, space=space) as engine, engine.session("a") as session:
        assert (await session.store(ids, kv.view)).stored == 4
        tier = engine.core.levels[0].resident
        assert tier is not None
        for part, generation, _ in engine.core.decisions.parts(0):
            resident = tier.borrow(part, generation)
            assert resident is not None
            assert resident.header.folded
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)


@pytest.mark.parametrize("codec", ["raw", pytest.param("zstd", marks=pytest.mark.every_loop)])
@pytest.mark.parametrize("kinds", ["host", "nvme", "device"])
async def test_cancelled_at_each_step(
    kinds: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = kit.space()
    seed = 0
    options = {"codec": codec}
    async with simulated(kinds, tmp_path, monkeypatch, space=space, options=options) as (
        rig,
        device,
    ):

        async def store() -> int:
            nonlocal seed
            seed += 1
            ids = kit.tokens(3, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            memory = late(device, kv)
            try:
                async with rig.engine.session(f"s{seed}") as session:
                    return (await session.store(ids, memory.view)).stored
            finally:
                # the caller may do what it likes with its memory now
                for named in memory.layers.values():
                    for tensor in named.values():
                        device.freed(tensor)

        async for run in cancel_at_each_step(store):
            await rig.at_rest()
            ids = kit.tokens(3, seed=seed)
            kv = kit.Memory(space.layout, len(ids), seed=seed)
            async with rig.engine.session("reader") as reader:
                tokens, back = await load(reader, ids)
            assert back.same(kv, tokens)
            assert run.outcome != "completed" or (run.value == 3 and tokens == len(ids))
        await usable(rig, space)


@pytest.mark.parametrize("failing", range(4))
async def test_f058_a_device_without_memory_skips_the_store(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th allocation fails: what had memory is stored, the rest is skipped and counted."""
    space = kit.space()
    ids = kit.tokens(12)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    options = {"chunk": "16KiB"}
    monkeypatch.setattr(
        kit,
        "tiers",
        lambda *_, **__: [tierkv.Tier("device", "1MiB", device="sim:5", options=options)],
    )
    async with running("device", tmp_path, space=space) as rig:
        device = device_of(rig.engine.core)
        async with rig.engine.session("a") as session:
            with device.fail_allocations(lambda number, _: number >= failing):
                result = await session.store(ids, kv.view)
            assert result.stored + result.skipped == 12
            assert result.skipped > 0
            assert {b.reason for b in result.blocks if b.state == "skipped"} <= {
                SkipReason.FULL,
                SkipReason.NO_PARENT,
            }
            tokens, back = await load(session, ids)
            assert tokens == result.stored * 16
            assert back.same(kv, tokens)
            assert (await session.store(ids, kv.view)).stored == result.skipped
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()
