"""What a load costs and where it leaves things: copies, hops, promotion, leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import tierkv
from tests import kit
from tests.engine.device_rig import make_tiers, on_device
from tests.engine.rig import load, running
from tierkv.decisions.types import EvictReason
from tierkv.layout import Layout, Space
from tierkv.mover.departing import ONE_WINDOW_BYTES, _windows
from tierkv.mover.load import LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.engine.rig import Rig
    from tierkv.abc import StoredPart
    from tierkv.mover.levels import Level

pytestmark = pytest.mark.anyio
BIG = Space(tierkv.Identity("big", "rev1"), Layout.uniform(2, 8, 64, "float32"), block_tokens=16)
PAYLOAD = 2 * 2 * 8 * 64 * 4 * 16
"""Bytes of KV of one block of BIG; its frame has one page more."""


@pytest.mark.every_loop
@pytest.mark.parametrize(
    ("kinds", "copies", "hops"), [("host", 1, 1), ("nvme", 2, 2), ("host+nvme", 2, 3)]
)
async def test_copies_and_hops_of_a_large_load(
    kinds: str, copies: int, hops: int, tmp_path: Path
) -> None:
    """RAM: one copy, one hop. A medium: one copy more; it reads in hops of its own."""
    blocks = 16
    ids = kit.tokens(blocks)
    kv = kit.Memory(BIG.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=BIG, capacity="64MiB", tick=60) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            rig.cool()
            before = rig.engine.stats()
            tokens, back = await load(session, ids)
            after = rig.engine.stats()
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            copied = after.bytes_copied - before.bytes_copied
            frames = blocks * (PAYLOAD + 4096)
            assert blocks * PAYLOAD * copies <= copied <= frames * copies
            assert after.thread_hops - before.thread_hops <= hops
        await rig.at_rest()


@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_copies_of_a_layer_wise_load(kinds: str, tmp_path: Path) -> None:
    blocks = 16
    ids = kit.tokens(blocks)
    kv = kit.Memory(BIG.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=BIG, capacity="64MiB", tick=60) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            before = rig.engine.stats()
            back = kit.Memory(BIG.layout, len(ids))
            async with session.match(ids) as match:
                assert [x async for x in match.layers(into=back.view)] == [0, 1]
            assert back.same(kv, len(ids))
            copied = rig.engine.stats().bytes_copied - before.bytes_copied
            copies = 1 if kinds == "host" else 2
            assert blocks * PAYLOAD * copies <= copied <= blocks * (PAYLOAD + 4096) * copies
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_small_load_from_ram_takes_no_hop_and_no_job() -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    host = [tierkv.Tier("host", "4MiB")]
    async with tierkv.open(tiers=host, space=space, tick=60) as engine, engine.session("a") as a:
        await a.store(ids, kv.view)
        before = engine.stats()
        assert (await load(a, ids))[0] == len(ids)
        back = kit.Memory(space.layout, len(ids))
        async with a.match(ids) as match:
            assert len([x async for x in match.layers(into=back.view)]) == 3
        after = engine.stats()
        assert after.thread_hops == before.thread_hops
        assert after.tasks_spawned == before.tasks_spawned


@pytest.mark.parametrize("chain", ["device+host+nvme", "host+nvme"])
async def test_what_is_read_lands_in_the_fastest_memory_tier_above(
    chain: str, tmp_path: Path
) -> None:
    space = kit.space()
    ids = kit.tokens(4)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    told: list[tuple[str, int]] = []

    def promoted(level: Level, parts: Sequence[StoredPart], where: Space) -> None:
        assert where == space
        told.append((level.name, len(parts)))

    if "device" in chain:
        tiers = make_tiers(chain, tmp_path, "sim:3")
        async with on_device(tiers) as on:
            await _lands_in_host(on, ids, kv, promoted)
            # from the host's memory it is offered to the device once more: it is still not there
            assert told == [("host", 1)] * 8
    else:
        async with running(chain, tmp_path, space=space) as rig:
            await _lands_in_host(rig, ids, kv, promoted)
            assert told == []


async def _lands_in_host(rig: Rig, ids: list[int], kv: kit.Memory, promoted: object) -> None:
    core, levels = rig.engine.core, {level.name: level for level in rig.engine.core.levels}
    async with rig.engine.session("a") as session:
        await session.store(ids, kv.view)
        await session.flush()
        await rig.settle()
        rig.engine.runtime.fetcher.promoted = promoted  # type: ignore[assignment]
        for name in ("device", "host"):
            if name in levels:
                _empty(rig, levels[name])
        for calls in (1, 1):
            before = rig.calls("nvme", "read")
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
            assert core.decisions.entries(levels["host"].index) == 4
            assert rig.calls("nvme", "read") - before <= calls
        assert rig.calls("nvme", "read") - before == 0
    await rig.at_rest()


def _empty(rig: Rig, level: Level) -> None:
    core = rig.engine.core
    left = [(p, g) for p, g, _ in core.decisions.parts(level.index)]
    while left:  # leaves first
        drops = core.decisions.dropped(left, level.index, EvictReason.CAPACITY, core.clock())
        core.free(drops)
        gone = {drop.part for drop in drops if drop.tier == level.index}
        assert gone
        left = [(p, g) for p, g in left if p not in gone]


@pytest.mark.parametrize("lookups", [500, pytest.param(10_000, marks=pytest.mark.stress)])
async def test_f047_lookups_that_are_never_loaded_hold_nothing(lookups: int) -> None:
    space = kit.space()
    ids, other = kit.tokens(4), kit.tokens(4, seed=2)
    kv, more = (kit.Memory(space.layout, 64, seed=seed) for seed in (1, 2))
    host = [tierkv.Tier("host", "48KiB")]  # room for these blocks and no more
    async with tierkv.open(tiers=host, space=space, tick=60) as engine:
        async with engine.session("a") as session:
            assert (await session.store(ids, kv.view)).stored == 4
            for _ in range(lookups):
                async with session.match(ids) as match:
                    assert match.tokens == len(ids)
        assert engine.stats().leases == 0
        async with engine.session("b") as session:  # all of it gives way
            assert (await session.store(other, more.view)).stored == 4
            assert (await load(session, other))[0] == 64


async def test_windows_of_a_long_load(tmp_path: Path) -> None:
    """Short ones are one window; long ones are cut so that filling and draining stays small."""
    async with running("nvme", tmp_path, space=BIG) as rig:
        core = rig.engine.core
        from tierkv.blocks import BlockKey, part_id
        from tierkv.decisions.types import Found, FoundPart

        key = BlockKey(bytes(32))

        def windows(blocks: int, tier: int = 0) -> list[int]:
            parts = tuple(
                FoundPart(part_id(key, 0), n, 0, tier, 1, PAYLOAD + 4096) for n in range(blocks)
            )
            found = Found(blocks, blocks * 16, parts, 0, None)
            view = kit.Memory(BIG.layout, 16).view
            plan = LoadPlan(BIG, key, (), found, None, view)  # type: ignore[arg-type]
            return [len(window) for window in _windows(core, [plan])]

        frame = PAYLOAD + 4096
        assert windows(8) == [8]
        assert len(windows(ONE_WINDOW_BYTES // frame)) == 1
        many = windows(400)
        assert sum(many) == 400
        assert max(many) * 16 <= 400
        assert max(many) * frame <= core.window_bytes
