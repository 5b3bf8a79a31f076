"""The ``nvme`` tier: what reaches the medium, and what a medium that fails leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK, IoStatus
from tierkv.extents import Extent
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.nvme.journal import Journal
from tierkv_backends.nvme.segments import Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_flush_covers_what_an_earlier_process_left_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.write(*(part(i, 50_000) for i in range(40))) == [OK] * 40
    synced: set[str] = set()
    data, whole = os.fdatasync, os.fsync

    def noting(sync: Callable[[int], None], fd: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", partial(noting, data))
    monkeypatch.setattr(os, "fsync", partial(noting, whole))
    async with Nvme().opened(tmp_path) as bench:
        await bench.backend.flush()
        wanted = {p.name for p in (tmp_path / "kv").iterdir()} - {"LOCK", "tierkv.json"}
        assert len(wanted) > 3
        assert synced >= wanted - {"checkpoint"} | {"kv"}  # a checkpoint is synced as it is made


async def test_a_checkpoint_that_breaks_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, broken = Journal.publish, [MemoryError("no room for it")]

    def once(self: Journal, live: Iterable[bytes], before: int) -> None:
        if broken:
            raise broken.pop()
        publish(self, live, before)

    monkeypatch.setattr(Journal, "publish", once)
    async with Nvme().opened(tmp_path) as bench:
        more = 0
        with contextlib.suppress(MemoryError):
            while broken:
                more += 1
                await bench.write(part(0, 100, more))
        while not bench.backend.stats().details["checkpoints"] and more < 5000:
            more += 1
            assert await bench.write(part(0, 100, more)) == [OK]
        assert bench.backend.stats().details["checkpoints"] >= 1
        assert await bench.read(part(0, 100, more)) == [contents(part(0, 100, more))]


async def test_i5_records_of_a_failed_append_are_not_found_by_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part(i, 5000) for i in range(7)]

    def torn(fd: int, data: bytes, offset: int) -> None:
        os.pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(errno.EIO, "the medium is gone")

    async with Nvme().opened(tmp_path) as bench:
        with monkeypatch.context() as patched:
            patched.setattr("tierkv_backends.nvme.journal.write_all", torn)
            results = await bench.write(*parts[:6])
        assert {result.status for result in results} == {IoStatus.ERROR}
        assert await bench.write(parts[6]) == [OK]
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")
    async with Nvme().opened(tmp_path) as bench:
        assert list(bench.found) == [parts[6]]
        assert await bench.read(parts[6]) == [contents(parts[6])]


async def test_segments_of_any_number_are_found_again(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(2):
            segments = Segments(root, 1, direct=False)
            segments.back(Extent(123_456, 1))
            segments.close()
        again = Segments(root, 1, direct=False)
        assert again.indices() == [123_456]
        again.close()
    finally:
        os.close(root)


@pytest.mark.every_loop
async def test_p5_a_long_sync_holds_no_write_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes go on while the disk syncs; a second flush waits for the first all the same."""
    entered, go = threading.Event(), threading.Event()
    sync = os.fdatasync

    def gated(fd: int) -> None:
        entered.set()
        assert go.wait(30)
        sync(fd)

    async with Nvme().opened(tmp_path) as bench:
        assert await bench.write(part(0, 5000)) == [OK]
        monkeypatch.setattr(os, "fdatasync", gated)
        first = bench.workers.spawn(bench.backend.flush)
        while not entered.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            assert await bench.write(part(1, 5000)) == [OK]
            await bench.backend.delete([(part(0, 1).part, 1)])
            assert await bench.read(part(1, 5000)) == [contents(part(1, 5000))]
        second = bench.workers.spawn(bench.backend.flush)
        await asyncio.sleep(0.02)
        assert not first.done()
        assert not second.done()
        go.set()
        await first.wait()
        await second.wait()
    async with Nvme().opened(tmp_path) as bench:
        assert list(bench.found) == [part(1, 5000)]
