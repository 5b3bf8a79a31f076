"""Scenarios: an engine with a device tier over an nvme tier, device memory straight to files."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import tierkv
from tests import kit
from tests.engine.rig import Rig, load
from tests.gds.rig import device
from tierkv_backends.device import DeviceBackend
from tierkv_backends.nvme import NvmeBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SPACE = kit.space()
BLOCKS = 6


@asynccontextmanager
async def running(root: Path, gds: str = "auto") -> AsyncIterator[tuple[Rig, NvmeBackend]]:
    """An open engine, and its nvme tier."""
    tiers = [
        tierkv.Tier("device", "4MiB", device="cpu"),  # told otherwise below
        tierkv.Tier("nvme", "64MiB", path=str(root / "kv"), options={"gds": gds}),
    ]
    disk = NvmeBackend(tiers[1])
    backends = [DeviceBackend(tiers[0], device()), disk]
    async with tierkv.open(tiers=tiers, backends=backends, space=SPACE) as engine:
        yield Rig(engine, {}), disk


def _figures(disk: NvmeBackend, *names: str) -> list[float]:
    details = disk.stats().details
    return [details[name] for name in names]


async def _store(rig: Rig, seed: int) -> tuple[list[int], kit.Memory]:
    ids, kv = kit.tokens(BLOCKS, seed), kit.Memory(SPACE.layout, 16 * BLOCKS, seed)
    async with rig.engine.session(f"s{seed}") as session:
        result = await session.store(ids, kv.view)
        assert result.stored == BLOCKS, result
        await session.flush()
    await rig.settle()
    return ids, kv


async def _same(rig: Rig, seed: int, ids: list[int], kv: kit.Memory, **options: Any) -> None:
    async with rig.engine.session(f"s{seed}") as session:
        count, back = await load(session, ids, **options)
        assert count == len(ids), count
        assert back.same(kv, count)


async def engine_writes_device_frames_directly(root: Path) -> None:
    """Frames go from the device's memory into files and are found again by another engine."""
    async with running(root) as (rig, disk):
        before = device().driver.copied
        ids, kv = await _store(rig, 1)
        written, direct, host = _figures(disk, "writes", "direct_writes", "direct_bytes")
        assert written == direct == BLOCKS
        assert device().driver.copied[1] - before[1] >= host > 0
        await _same(rig, 1, ids, kv)
        await rig.at_rest()
    async with running(root) as (rig, disk):
        await _same(rig, 1, ids, kv)
        await rig.settle()
        assert disk.stats().mode == "o_direct+posix"
    async with running(root, gds="off") as (rig, disk):  # the same files, through host memory
        await _same(rig, 1, ids, kv)
        assert _figures(disk, "direct_reads") == [0]


async def engine_promotes_into_the_device_directly(root: Path) -> None:
    """What is needed again comes back into the device's memory the same way."""
    async with running(root) as (rig, disk):
        ids, kv = await _store(rig, 2)
        rig.cool()
        await _same(rig, 2, ids, kv)
        await rig.settle()
        (reads,) = _figures(disk, "direct_reads")
        before = disk.stats().details["reads"]
        await _same(rig, 2, ids, kv)
        assert (reads, disk.stats().details["reads"] - before) == (BLOCKS, 0), "back on the device"
        await rig.at_rest()


async def damaged_files_are_misses(root: Path) -> None:
    """A frame that was spoilt on disk is found out on the device."""
    async with running(root) as (rig, _):
        ids, kv = await _store(rig, 3)
        rig.cool()
        (segment,) = (root / "kv").glob("segment-*")
        data = bytearray(segment.read_bytes())
        data[3 * 12 * 1024 + 8000] ^= 4  # in the payload of the fourth frame
        segment.write_bytes(data)
        async with rig.engine.session("s3") as session:
            count, back = await load(session, ids)
            assert count < len(ids)
            assert back.same(kv, count)
            assert back.untouched(count)
        await rig.settle()
        await rig.at_rest()
