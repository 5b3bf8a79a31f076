"""Scenarios: what ends a transfer early, and what is refused."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gds.rig import PAGE, device, opened
from tierkv.abc import OK, DirectBackend, ReadRequest
from tierkv.config import Tier
from tierkv.device.cpu import CpuDevice
from tierkv.errors import BackendError, ClosedError, RootLockedError
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv.workers import Workers
from tierkv_backends.nvme import NvmeBackend
from tierkv_backends.nvme import backend as backend_module

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.gds.rig import Gds


async def _until_in_flight(bench: Gds) -> None:
    for _ in range(20_000):
        if bench.files.reaper.in_flight:
            return
        await asyncio.sleep(0.0005)
    raise AssertionError("nothing was submitted")


async def _cancelled(
    bench: Gds, start: Callable[[], Awaitable[object]], delay: float
) -> asyncio.Task[object]:
    async def run() -> object:
        return await start()

    device().driver.delay(delay)
    task = asyncio.get_running_loop().create_task(run())
    await _until_in_flight(bench)
    task.cancel()
    await asyncio.sleep(0.001)
    task.cancel()  # and again, while it waits for the end
    return task


async def cancelled_in_flight(root: Path) -> None:
    """A cancelled call ends when the device is done; nothing leaks, nothing is half there."""
    stored, other = part(0, 5 << 20), part(1, 5 << 20)
    async with opened(root, 14 << 20) as bench:  # room for two of them
        assert await bench.put(stored) == [OK]
        before = bench.backend.stats()
        source = bench.loaded(other)
        task = await _cancelled(bench, lambda: bench.way.write_device([(other, source)]), 0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
        device().driver.delay(0)
        reaper = bench.files.reaper
        assert reaper.in_flight == 0
        source.fill_(0xEE)
        after = bench.backend.stats()
        assert (after.entries, after.live_bytes) == (before.entries, before.live_bytes)
        target = bench.memory(stored.nbytes)
        request = ReadRequest(stored.part, 1, 0, stored.nbytes)
        task = await _cancelled(bench, lambda: bench.way.read_device([request], [target]), 0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reaper.in_flight == 0
        device().driver.delay(0)
        target.fill_(0x11)
        await asyncio.sleep(0.05)
        assert bool((target == 0x11).all()), "somebody still writes to it"
        assert await bench.put(other) == [OK], "the pages of the cancelled write came back"
        assert await bench.get(stored, other) == [contents(stored), contents(other)]
        assert bench.backend.stats().disk_bytes == disk_usage(root / "kv")


async def closed_in_flight(root: Path) -> None:
    """Closing waits for the device, and what comes later is refused."""
    stored = part(0, 9 << 20)
    async with opened(root) as bench:
        source = bench.loaded(stored)
        device().driver.delay(0.03)
        job = bench.workers.spawn(bench.way.write_device, [(stored, source)])
        await _until_in_flight(bench)
        await bench.backend.aclose()
        device().driver.delay(0)
        assert job.done()
        for call in (bench.put(stored), bench.get(stored)):
            with pytest.raises(ClosedError):
                await call
    async with opened(root) as bench:
        if bench.found:  # published before the door was shut, or not at all
            assert await bench.get(stored) == [contents(stored)]


async def closed_over_a_hanging_transfer(root: Path) -> None:
    """Closing is bounded: whoever waits is told, memory and root are kept until the end comes."""
    stored = part(0, 10_000)
    hang = threading.Event()

    class Hanging:
        def get(self) -> int:
            hang.wait()
            return 0

    class File:
        def pread(self, *args: object, **named: object) -> Hanging:
            return Hanging()

        def close(self) -> None:
            """Nothing is open."""

    async with opened(root) as bench:
        assert await bench.put(stored) == [OK]
        files, store = bench.files, bench.backend._store  # type: ignore[attr-defined]
        for file in files._files.values():
            file.close()
        files._files = dict.fromkeys(files._files, File())
        job = bench.workers.spawn(bench.get, stored)
        await _until_in_flight(bench)
        backend_module._CLOSE_S = 0.05  # type: ignore[misc]
        try:
            await bench.backend.aclose()
        finally:
            backend_module._CLOSE_S = 5.0  # type: ignore[misc]
        with pytest.raises(ClosedError, match="hangs"):
            await job.wait()
        assert files.reaper.in_flight == 1, "it keeps the memory"
        with pytest.raises(RootLockedError):
            async with opened(root):
                pass
        hang.set()
        for _ in range(20_000):
            if store.directory < 0:
                break
            await asyncio.sleep(0.001)
        assert files.reaper.in_flight == 0
    async with opened(root) as bench:  # the root is free again
        assert await bench.get(stored) == [contents(stored)]


async def wrong_tensors_are_refused(root: Path) -> None:
    async with opened(root) as bench:
        wrong = [
            torch.zeros(PAGE, dtype=torch.int8),
            torch.zeros(2, PAGE, dtype=torch.uint8),
            torch.zeros(2 * PAGE, dtype=torch.uint8)[::2],
        ]
        for tensor in wrong:
            with pytest.raises(ValueError, match="contiguous uint8"):
                await bench.way.write_device([(part(0, 10), tensor)])


async def f074_modes_are_told(root: Path) -> None:
    """One line says which way the bytes take, and the figures say it again."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, handler = logging.getLogger("tierkv.nvme"), Keep()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        async with opened(root / "a") as bench:
            assert isinstance(bench.backend, DirectBackend)
            assert bench.way.mode == "posix"
            assert bench.backend.stats().mode == "o_direct+posix"
            assert bench.backend.direct(device()) is bench.way
            assert bench.backend.direct(CpuDevice()) is None, "host memory needs no kvikio"
        assert [line for line in lines if "by kvikio" in line and "mode posix" in line] == lines
        workers = Workers(threads=1)
        await workers.start()
        for options in ({"gds": "off"}, {"io": "buffered"}):
            tier = Tier("nvme", 1 << 20, path=str(root / "b"), options=options)
            backend = NvmeBackend(tier)
            await backend.open(workers)
            assert backend.direct(device()) is None
            assert "posix" not in backend.stats().mode
            await backend.aclose()
        await workers.aclose()
        async with opened(root / "c", io="auto") as bench:
            stored = part(0, 10_000)
            before = device().driver.copied
            await bench.put(stored)
            assert await bench.get(stored) == [contents(stored)]
            after = device().driver.copied
            assert after[0] > before[0], "kvikio took the memory for the host's"
            assert after[1] > before[1]
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


async def forked_children_are_refused(root: Path) -> None:
    """A child of this process would hang in its first transfer: it is told instead."""
    async with opened(root / "a") as bench:
        stored = part(0, 10_000)
        await bench.put(stored)
        way = bench.way
        child = os.fork()
        if child == 0:  # no loop of its own: only the checks in front are tried
            code = 1
            try:
                said = []
                for step in (
                    lambda: way.read_device([], []).send(None),
                    lambda: _reopen(root),
                ):
                    try:
                        step()
                    except BackendError as error:
                        said.append(str(error))
                code = 0 if "after the fork" in said[0] and "by spawn" in said[1] else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - nothing else runs here
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert await bench.get(stored) == [contents(stored)]


def _reopen(root: Path) -> None:
    tier = Tier("nvme", 1 << 20, path=str(root / "child"), options={"io": "gds"})
    NvmeBackend(tier)._open_store([])
