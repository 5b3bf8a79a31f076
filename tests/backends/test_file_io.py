"""The ``file`` tier: exactly what was put or a miss, whatever the medium does."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.backends.file_bench import File
from tests.backends.test_file_root import frames
from tierkv.abc import OK, IoStatus, ReadRequest
from tierkv.errors import BackendError
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.file.catalog import pages
from tierkv_backends.file.files import Files
from tierkv_backends.file.strand import Pool

if TYPE_CHECKING:
    from tierkv.abc import StoredPart
    from tierkv.testing.bench import Bench

pytestmark = pytest.mark.anyio
CAPACITY = 4 << 20


def file_of(root: Path, stored: StoredPart) -> Path:
    (found,) = (p for p in frames(root) if contents(stored)[:64] == p.read_bytes()[:64])
    return found


def directories(root: Path) -> list[Path]:
    return [path for path in (root / "kv").rglob("*") if path.is_dir()]


def used(bench: Bench) -> int:
    return bench.backend.stats().disk_bytes


async def test_f028_a_vanished_file_is_a_miss(tmp_path: Path) -> None:
    parts = [part(i, 5000) for i in range(3)]
    async with File().opened(tmp_path) as bench:
        await bench.write(*parts)
        file_of(tmp_path, parts[1]).unlink()
        seen = await bench.read(*parts)
        assert seen == [contents(parts[0]), IoStatus.MISSING, contents(parts[2])]
        stats = bench.backend.stats()
        assert (stats.entries, stats.details["vanished"]) == (2, 1)
        assert used(bench) == disk_usage(tmp_path / "kv")
        assert await bench.write(replace(parts[1], generation=2)) == [OK]
        assert await bench.read(parts[1]) == [IoStatus.MISSING]


async def test_f029_files_vanish_and_eviction_goes_on(tmp_path: Path) -> None:
    parts = [part(i, 100_000) for i in range(30)]
    async with File().opened(tmp_path) as bench:
        assert await bench.write(*parts) == [OK] * 30
        for path in frames(tmp_path)[::2]:
            path.unlink()
        await bench.backend.delete([(p.part, p.generation) for p in parts])
        assert bench.backend.stats().entries == 0
        assert bench.backend.stats().live_bytes == 0
        for generation in range(2, 5):
            for number in range(30):
                assert await bench.write(part(number, 100_000, generation)) == [OK]
        assert used(bench) == disk_usage(tmp_path / "kv") <= CAPACITY
    shutil.rmtree(tmp_path / "kv")


async def test_f030_d5_clean_up_spares_a_newer_entry(tmp_path: Path) -> None:
    old = part(0, 50_000, generation=1)
    fresh = replace(old, generation=2)
    async with File().opened(tmp_path) as bench:
        await bench.write(old)
        with file_of(tmp_path, old).open("r+b") as file:
            file.truncate(50_000)
        assert await bench.read(old) == [IoStatus.SHORT]
        await bench.write(fresh)  # somebody stored it again while the damage was found
        await bench.backend.delete([(old.part, 1)])
        assert await bench.read(fresh) == [contents(fresh)]
        assert len(frames(tmp_path)) == 1
    async with File().opened(tmp_path) as bench:
        assert list(bench.found) == [fresh]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.ENOSPC, IoStatus.FULL),
        (errno.EDQUOT, IoStatus.FULL),
        (errno.EROFS, IoStatus.ERROR),
        (errno.EMFILE, IoStatus.ERROR),
        (errno.EACCES, IoStatus.ERROR),
        (errno.EIO, IoStatus.ERROR),
    ],
)
@pytest.mark.parametrize("where", ["open_writer", "publish", "fsync"])
@pytest.mark.usefixtures("no_fd_leaks")
async def test_k4_a_refusing_medium_is_a_result(
    where: str, code: int, status: IoStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = part(0, 5000), part(1, 5000)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async with File(sync="write").opened(tmp_path) as bench:
        assert await bench.write(good) == [OK]
        before = used(bench)
        with monkeypatch.context() as patched:
            patched.setattr(os if where == "fsync" else Files, where, refuse)
            results = await bench.write(bad, replace(good, generation=2))
        assert [result.status for result in results] == [status] * 2
        assert isinstance(results[0].error, OSError)
        assert results[0].error.errno == code
        assert await bench.read(good, bad) == [contents(good), IoStatus.MISSING]
        assert len(frames(tmp_path)) == 1, "what was not stored has no file"
        assert used(bench) >= before
        assert await bench.write(bad) == [OK]
        assert used(bench) == disk_usage(tmp_path / "kv")
    async with File().opened(tmp_path) as bench:
        assert set(bench.found) == {good, bad}


@pytest.mark.usefixtures("no_fd_leaks")
async def test_k4_reads_that_fail_are_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = part(0, 5000)
    async with File().opened(tmp_path) as bench:
        await bench.write(stored)
        for code, status in (
            (errno.EMFILE, IoStatus.ERROR),
            (errno.EACCES, IoStatus.ERROR),
            (errno.ESTALE, IoStatus.MISSING),
        ):

            def refuse(*_: object, code: int = code) -> int:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patched:
                patched.setattr(Files, "open_reader", refuse)
                assert await bench.read(stored) == [status]
        assert bench.backend.stats().entries == 0


async def test_a_delete_that_fails_is_told_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part(i, 5000) for i in range(6)]
    unlink, keep = os.unlink, part(2, 5000)

    async with File().opened(tmp_path) as bench:
        await bench.write(*parts)
        stubborn = file_of(tmp_path, keep).name

        def refuse(path: str, **options: Any) -> None:
            if os.path.basename(path) == stubborn:
                raise OSError(errno.EROFS, "read-only")
            unlink(path, **options)

        names = [(p.part, p.generation) for p in parts]
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", refuse)
            with pytest.raises(BackendError, match="1 file"):
                await bench.backend.delete(names)
        assert await bench.read(keep) == [contents(keep)]
        stats = bench.backend.stats()
        assert (stats.entries, stats.live_bytes) == (1, bench.backend.charge(5000))
        await bench.backend.delete(names)
        assert bench.backend.stats().entries == 0
        assert used(bench) == disk_usage(tmp_path / "kv")


async def test_a_removed_directory_degrades_the_tier(tmp_path: Path) -> None:
    parts = [part(i, 5000) for i in range(4)]
    async with File().opened(tmp_path) as bench:
        await bench.write(*parts)
        shutil.rmtree(tmp_path / "kv")
        assert await bench.read(*parts) == [IoStatus.MISSING] * 4
        (result,) = await bench.write(part(9, 5000))
        assert result.status is IoStatus.ERROR
        await bench.backend.delete([(p.part, p.generation) for p in parts])


async def test_f040_short_system_calls_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, writev = os.preadv, os.writev

    def some_read(fd: int, views: list[memoryview], offset: int) -> int:
        return preadv(fd, [views[0][:777]], offset)

    def some_write(fd: int, views: list[memoryview]) -> int:
        return writev(fd, [views[0][:777]])

    monkeypatch.setattr(os, "preadv", some_read)
    monkeypatch.setattr(os, "writev", some_write)
    stored = part(0, 5000)
    async with File().opened(tmp_path) as bench:
        assert await bench.write(stored) == [OK]
        assert await bench.read(stored) == [contents(stored)]

        def nothing(*_: object) -> int:
            return 0

        monkeypatch.setattr(os, "writev", nothing)
        (result,) = await bench.write(part(1, 5000))
        assert result.status is IoStatus.ERROR
        monkeypatch.setattr(os, "preadv", nothing)
        assert await bench.read(stored) == [IoStatus.SHORT]


async def test_large_files_go_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a thread which shall stop notices it soon."""
    monkeypatch.setattr("tierkv_backends.file.files._STEP", 4096)
    stored = part(0, 5 * 4096 + 17)
    async with File().opened(tmp_path) as bench:
        assert await bench.write(stored) == [OK]
        assert await bench.read(stored) == [contents(stored)]


@pytest.mark.every_loop
async def test_a_batch_takes_as_many_hops_as_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hops, submit = 0, Pool.submit

    def counted(pool: Pool, *args: Any) -> Any:
        nonlocal hops
        hops += 1
        return submit(pool, *args)

    parts = [part(i, 5000) for i in range(16)]
    async with File(threads=3).opened(tmp_path) as bench:
        monkeypatch.setattr(Pool, "submit", counted)
        for work, most in (
            (bench.write(*parts), 3),
            (bench.read(*parts), 3),
            (bench.read(parts[0]), 1),
            (bench.backend.delete([(p.part, 1) for p in parts]), 2),
        ):
            hops = 0
            await work
            assert hops == most


def test_a_charge_tells_how_many_pages_to_read() -> None:
    backend = File().make(Path("/nowhere"), 1 << 20)
    for nbytes in (*range(1, 70_000), (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        longest = backend.longest(backend.charge(nbytes))
        assert nbytes <= longest
        assert pages(longest) == pages(nbytes)


async def test_padding_is_zeros(tmp_path: Path) -> None:
    stored = part(0, 5000)
    async with File().opened(tmp_path) as bench:
        await bench.write(stored)
        for offset in (0, 4096, 5000, 5001, 8192):
            target = memoryview(bytearray(b"\xaa" * (8192 - offset)))
            request = ReadRequest(stored.part, 1, offset, len(target))
            assert await bench.backend.read([request], [target]) == [OK]
            assert bytes(target) == (contents(stored) + bytes(3192))[offset:]


async def test_f045_every_third_write_fails_and_the_others_land(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, lock, count = Files.publish, threading.Lock(), 0

    def third(files: Files, *args: Any) -> tuple[int, dict[str, int]]:
        nonlocal count
        with lock:
            count += 1
            if count % 3 == 0:
                raise OSError(errno.EIO, "every third")
        return publish(files, *args)

    monkeypatch.setattr(Files, "publish", third)
    parts = [part(i, 1000) for i in range(99)]
    async with File().opened(tmp_path) as bench:
        results = await bench.write(*parts)
        assert sum(result == OK for result in results) == 66
        kept = [p for p, result in zip(parts, results, strict=True) if result == OK]
        assert await bench.read(*kept) == [contents(p) for p in kept]
        assert used(bench) == disk_usage(tmp_path / "kv")


@pytest.mark.every_loop
async def test_f054_many_readers_of_one_frame(tmp_path: Path) -> None:
    stored = part(0, 100_000)
    async with File().opened(tmp_path) as bench:
        await bench.write(stored)
        jobs = [bench.workers.spawn(bench.read, stored) for _ in range(50)]
        for job in jobs:
            assert await job.wait() == [contents(stored)]


@pytest.mark.every_loop
@pytest.mark.usefixtures("no_blocking")
async def test_p1_the_loop_never_waits_for_a_file(tmp_path: Path) -> None:
    parts = [part(i, 5000) for i in range(8)]
    async with File().opened(tmp_path) as bench:
        await bench.write(*parts)
        await bench.read(*parts)
        await bench.backend.delete([(p.part, p.generation) for p in parts])
        await bench.backend.flush()


@pytest.mark.every_loop
async def test_p5_the_loops_own_threads_are_not_used(tmp_path: Path) -> None:
    """Everybody's ``run_in_executor`` may be stuck: this tier goes on."""
    gate = threading.Event()
    loop = asyncio.get_running_loop()
    stuck = [loop.run_in_executor(None, gate.wait) for _ in range(40)]
    stored = part(0, 5000)
    try:
        async with asyncio.timeout(30), File().opened(tmp_path) as bench:
            assert await bench.write(stored) == [OK]
            assert await bench.read(stored) == [contents(stored)]
    finally:
        gate.set()
        await asyncio.wait(stuck)


async def test_small_frames_fill_no_more_than_the_capacity(tmp_path: Path) -> None:
    """Of sizes that just do not fit a page with their record: the real bytes decide."""
    capacity = 256 << 10
    async with File().opened(tmp_path, capacity) as bench:
        results = [(await bench.write(part(i, 4000)))[0].status for i in range(80)]
        assert set(results) == {IoStatus.OK, IoStatus.FULL}
        assert used(bench) == disk_usage(tmp_path / "kv") <= capacity
    async with File().opened(tmp_path, capacity) as bench:
        assert used(bench) == disk_usage(tmp_path / "kv") <= capacity
        assert len(bench.found) == results.count(IoStatus.OK)


@pytest.mark.parametrize("nbytes", [4096, 12_288, 50_000])
async def test_k1_usable_bytes_can_be_used(nbytes: int, tmp_path: Path) -> None:
    async with File().opened(tmp_path, 1 << 20) as bench:
        stats = bench.backend.stats()
        count = int(stats.details["usable_bytes"]) // bench.backend.charge(nbytes)
        for number in range(count):
            assert await bench.write(part(number, nbytes)) == [OK], f"{number} of {count}"
        assert used(bench) == disk_usage(tmp_path / "kv") <= 1 << 20


@pytest.mark.every_loop
async def test_p5_a_read_waits_for_one_file_of_a_batch_of_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go, ended = threading.Event(), threading.Event(), list[str]()
    publish, opens, stored = Files.publish, Files.open_reader, part(0, 5000)

    def noted(files: Files, *args: Any) -> int:
        ended.append("read")
        return opens(files, *args)

    def gated(files: Files, *args: Any) -> tuple[int, dict[str, int]]:
        entered.set()
        assert go.wait(30)
        ended.append("file")
        return publish(files, *args)

    async with File(threads=1).opened(tmp_path) as bench:
        await bench.write(stored)
        monkeypatch.setattr(Files, "publish", gated)
        monkeypatch.setattr(Files, "open_reader", noted)
        monkeypatch.setattr("tierkv_backends.file.transfer._WHILE_S", 0.0)  # its while is over
        writing = bench.workers.spawn(bench.write, *(part(i, 5000) for i in range(1, 9)))
        while not entered.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)
        reading = bench.workers.spawn(bench.read, stored)
        await anyio.wait_all_tasks_blocked()
        go.set()
        assert await reading.wait() == [contents(stored)]
        assert await writing.wait() == [OK] * 8
        assert ended.count("file") == 8
        assert ended.index("read") < 8, "it waited for the whole batch"
