"""The fault wrappers do what they say, and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tierkv.abc import OK, IoStatus, MemoryBackend, ReadRequest
from tierkv.errors import BackendError
from tierkv.testing.backend_references import DictBackend, SlabBackend
from tierkv.testing.backends import DurableBackendTests, MemoryBackendTests
from tierkv.testing.bench import BackendBench, contents, part
from tierkv.testing.faults import (
    Corrupting,
    Failing,
    Fault,
    Faulty,
    FaultyMemory,
    Gated,
    Hanging,
    Short,
    Slow,
    inject,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import Backend

pytestmark = pytest.mark.anyio
ONE = part(0, 6000)


class Broken(BackendBench):
    """A dictionary, or memory, with faults."""

    def __init__(self, *faults: Fault, memory: bool = False) -> None:
        self.faults = faults
        self.memory = memory

    def make(self, root: Path, capacity: int) -> Backend:
        kind = SlabBackend if self.memory else DictBackend
        return inject(kind(root, capacity), *self.faults)


class TestFaultlessDict(DurableBackendTests):
    def make(self, root: Path, capacity: int) -> Backend:
        return inject(DictBackend(root, capacity))


class TestFaultlessMemory(MemoryBackendTests):
    def make(self, root: Path, capacity: int) -> Backend:
        return inject(SlabBackend(root, capacity))


def test_a_wrapper_is_what_it_wraps(tmp_path: Path) -> None:
    durable, memory = inject(DictBackend(tmp_path, 1)), inject(SlabBackend(tmp_path, 4096))
    assert type(durable) is Faulty
    assert durable.durable
    assert not isinstance(durable, MemoryBackend)
    assert type(memory) is FaultyMemory
    assert not memory.durable


def test_unknown_operations_are_refused() -> None:
    for operations in (("raed",), ()):
        with pytest.raises(ValueError, match="a fault acts on"):
            Fault(*operations)


@pytest.mark.every_loop
async def test_slow(tmp_path: Path) -> None:
    slow = Slow(3600, "read")
    async with Broken(slow).opened(tmp_path) as bench:
        async with asyncio.timeout(60):
            await bench.write(ONE)
        slow.seconds = 0.2
        written = time.monotonic()
        assert await bench.read(ONE) == [contents(ONE)]
        assert time.monotonic() - written > 0.19  # uvloop counts whole milliseconds


@pytest.mark.every_loop
async def test_gated(tmp_path: Path) -> None:
    gate = Gated("read")
    async with Broken(gate).opened(tmp_path) as bench:
        await bench.write(ONE)
        reading = bench.workers.spawn(bench.read, ONE)
        async with asyncio.timeout(30):
            await gate.arrived()
        assert gate.waiting == 1
        assert not reading.done()
        assert await bench.write(part(1, 10)) == [OK], "other calls pass"
        gate.open_gate()
        assert await reading.wait() == [contents(ONE)]
        gate.close_gate()
        again = bench.workers.spawn(bench.read, ONE)
        async with asyncio.timeout(30):
            await gate.arrived(2)
        assert not again.done()
        gate.open_gate()
        await again.wait()


@pytest.mark.every_loop
async def test_hanging_cannot_be_cancelled(tmp_path: Path) -> None:
    hang = Hanging("read", times=1)
    async with Broken(hang).opened(tmp_path) as bench:
        await bench.write(ONE)
        reading = bench.workers.spawn(bench.read, ONE)
        while not hang.entered:  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.001)
        assert not reading.done()
        assert await bench.read(ONE) == [contents(ONE)], "it acts once"
        hang.release()
        assert await reading.wait() == [contents(ONE)]


async def test_failing(tmp_path: Path) -> None:
    reads, writes = Failing("read", times=1), Failing("write", status=IoStatus.FULL)
    flushes = Failing("flush", "delete")
    async with Broken(reads, writes, flushes).opened(tmp_path) as bench:
        assert [r.status for r in await bench.write(ONE)] == [IoStatus.FULL]
        writes.active = False
        assert await bench.write(ONE) == [OK]
        assert await bench.read(ONE) == [IoStatus.ERROR]
        assert await bench.read(ONE) == [contents(ONE)]
        for call in (bench.backend.flush, lambda: bench.backend.delete([(ONE.part, 1)])):
            with pytest.raises(BackendError, match="injected"):
                await call()
        flushes.active = False
        assert (reads.seen, writes.seen, flushes.seen) == (1, 1, 2)


async def test_short_and_corrupting(tmp_path: Path) -> None:
    async with Broken(Short(times=1), Corrupting(0.5)).opened(tmp_path) as bench:
        await bench.write(ONE)
        assert await bench.read(ONE) == [IoStatus.SHORT]
        (seen,) = await bench.read(ONE)
        assert isinstance(seen, bytes)
        assert [
            i for i, pair in enumerate(zip(seen, contents(ONE), strict=True)) if len({*pair}) > 1
        ] == [3000]


async def test_faults_of_memory(tmp_path: Path) -> None:
    reads, writes, flips = Failing("read"), Failing("write"), Corrupting(0.0, times=1)
    async with Broken(reads, writes, flips, memory=True).opened(tmp_path) as bench:
        backend = bench.backend
        assert isinstance(backend, FaultyMemory)
        assert backend.allocate(100) is None
        writes.active = reads.active = flips.active = False
        await bench.write(ONE)
        reads.active = True
        assert backend.borrow(ONE.part, 1) is None
        reads.active, flips.active = False, True
        borrowed = backend.borrow(ONE.part, 1)
        assert borrowed is not None
        assert bytes(borrowed.memory) != contents(ONE)


async def test_calls_are_recorded(tmp_path: Path) -> None:
    async with Broken().opened(tmp_path) as bench:
        backend = bench.backend
        assert isinstance(backend, Faulty)
        await bench.write(ONE, part(1, 5))
        await backend.read([ReadRequest(ONE.part, 1, 0, 1)], [memoryview(bytearray(1))])
        await backend.flush()
        assert backend.calls == [("open", 1), ("write", 2), ("read", 1), ("flush", 1)]
