"""The ``host`` tier."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tierkv.abc import OK, IoStatus, ReadRequest
from tierkv.config import Tier
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.testing.bench import BackendBench, contents, part
from tierkv_backends.host import HostBackend

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Host(BackendBench):
    def make(self, root: Path, capacity: int) -> HostBackend:
        return HostBackend(Tier("host", capacity))


async def test_small_batches_take_no_hop_and_large_ones_take_one(tmp_path: Path) -> None:
    async with Host().opened(tmp_path) as bench:
        start = bench.workers.thread_hops
        small = [part(i, 50_000) for i in range(10)]
        await bench.write(*small)
        await bench.read(*small)
        assert bench.workers.thread_hops == start
        large = [part(20 + i, 300_000) for i in range(4)]
        await bench.write(*large)
        assert bench.workers.thread_hops == start + 1
        assert await bench.read(*large) == [contents(p) for p in large]
        assert bench.workers.thread_hops == start + 2
        assert bench.backend.stats().details["bytes_copied"] == 2 * (10 * 50_000 + 4 * 300_000)


@pytest.mark.every_loop
@pytest.mark.usefixtures("no_blocking")
async def test_memory_waits_for_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = part(0, 600_000)
    async with Host().opened(tmp_path, 1 << 20) as bench:
        await bench.write(stored)
        gate, real = asyncio.Event(), bench.workers.run

        async def gated(fn: Any, *args: object) -> Any:
            await gate.wait()
            return await real(fn, *args)

        monkeypatch.setattr(bench.workers, "run", gated)
        reading = bench.workers.spawn(bench.read, stored)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        monkeypatch.setattr(bench.workers, "run", real)
        await bench.backend.delete([(stored.part, 1)])
        (result,) = await bench.write(part(1, 600_000))
        assert result.status is IoStatus.FULL, "the only room is still being read"
        gate.set()
        assert await reading.wait() == [contents(stored)]
        assert await bench.write(part(1, 600_000)) == [OK]


@pytest.mark.every_loop
async def test_a_cancelled_write_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host().opened(tmp_path) as bench:

        async def cancelled(*_: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(bench.workers, "run", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await bench.write(part(0, 600_000), part(1, 600_000))
        stats = bench.backend.stats()
        assert (stats.entries, stats.live_bytes, stats.details["arena_bytes"]) == (0, 0, 0)


async def test_wrong_lengths_are_short(tmp_path: Path) -> None:
    stored = part(0, 5000)
    async with Host().opened(tmp_path) as bench:
        await bench.write(stored)
        for offset, length, room in ((-1, 10, 10), (0, 8193, 8193), (0, 10, 11), (9000, 0, 0)):
            target = memoryview(bytearray(room))
            request = ReadRequest(stored.part, 1, offset, length)
            (result,) = await bench.backend.read([request], [target])
            assert result.status is IoStatus.SHORT
        item = bench.item(stored)
        (result,) = await bench.backend.write([item._replace(stored=part(1, 6000))])
        assert result.status is IoStatus.SHORT


async def test_warm_makes_memory_real(tmp_path: Path) -> None:
    async with Host().opened(tmp_path, 80 << 20) as bench:
        backend = bench.backend
        assert isinstance(backend, HostBackend)
        assert backend.warm(1 << 30) == 16 << 20, "64 MiB were touched while opening"
        assert backend.warm(1) == 0


@pytest.mark.every_loop
async def test_closed_backends_refuse_and_hold_nothing(tmp_path: Path) -> None:
    async with Host().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        await bench.backend.aclose()
        stats = bench.backend.stats()
        assert (stats.entries, stats.live_bytes) == (0, 0)
        with pytest.raises(ClosedError, match="not open"):
            await bench.read(part(0, 5000))


async def test_impossible_memory_is_a_backend_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="lower its capacity"):
        async with Host().opened(tmp_path, 1 << 60):
            pass


def test_options_are_strict() -> None:
    with pytest.raises(ConfigError, match="did you mean 'touch'"):
        HostBackend(Tier("host", "1MiB", options={"tuoch": 1}))
    with pytest.raises(ConfigError, match="option 'touch': not a size"):
        HostBackend(Tier("host", "1MiB", options={"touch": "all"}))


async def test_opening_twice_is_refused(tmp_path: Path) -> None:
    """The arena of the first time would be gone, with everything in it."""
    async with Host().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        with pytest.raises(BackendError, match="open already"):
            await bench.backend.open(bench.workers)
        assert await bench.read(part(0, 5000)) == [contents(part(0, 5000))]
