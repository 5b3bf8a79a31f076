"""The ``file`` tier: what is synced when, and what a restart finds."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.backends.file_bench import File
from tests.backends.one_loop import one_loop
from tests.backends.test_file_io import CAPACITY, directories, used
from tests.backends.test_file_root import everything, frames
from tierkv.abc import OK, IoStatus
from tierkv.errors import BackendError
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.file.records import encode

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
anyio_backend = one_loop


@pytest.mark.parametrize("sync", ["flush", "write", "none"])
async def test_f031_restart_finds_everything(sync: str, tmp_path: Path) -> None:
    parts = [part(i, 777 * i + 1) for i in range(100)]
    async with File(sync=sync).opened(tmp_path, 8 << 20) as bench:
        assert await bench.write(*parts) == [OK] * 100
        assert used(bench) == disk_usage(tmp_path / "kv")
    async with File().opened(tmp_path, 8 << 20) as bench:
        assert set(bench.found) == set(parts)
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert used(bench) == disk_usage(tmp_path / "kv") <= 8 << 20


class _Calls:
    """Records which system calls are made on what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, str]] = []
        fsync, rename = os.fsync, os.replace

        def noted_fsync(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            self.made.append(("fsync dir" if os.path.isdir(path) else "fsync file", path))
            fsync(fd)

        def noted_rename(source: str, target: str, **options: Any) -> None:
            self.made.append(("rename", target))
            rename(source, target, **options)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "replace", noted_rename)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]


async def test_f032_write_sync_rename_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with File(sync="write").opened(tmp_path) as bench:
        calls = _Calls(monkeypatch)
        await bench.write(part(0, 5000))
        assert calls.names == ["fsync file", "rename", *["fsync dir"] * 3]
        assert ".unfinished" in calls.made[0][1]
        directory = os.path.dirname(calls.made[1][1])
        assert [p for _, p in calls.made[2:]] == [
            str(tmp_path / "kv" / directory),
            str(tmp_path / "kv" / directory.split("/")[0]),
            str(tmp_path / "kv"),
        ]


async def test_f032_flush_syncs_files_before_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with File(threads=1).opened(tmp_path) as bench:
        calls = _Calls(monkeypatch)
        await bench.write(*(part(i, 5000) for i in range(4)))
        assert set(calls.names) == {"rename"}
        calls.made.clear()
        await bench.backend.delete([(part(3, 1).part, 1)])
        await bench.backend.flush()
        assert calls.names[:3] == ["fsync file"] * 3
        synced = {path for name, path in calls.made[3:] if name == "fsync dir"}
        assert synced == {str(p) for p in (tmp_path / "kv", *directories(tmp_path))}
        calls.made.clear()
        await bench.backend.flush()
        assert calls.made == []
        await bench.backend.delete([(part(0, 1).part, 1)])
        await bench.backend.flush()
        assert calls.names == ["fsync dir"], "a delete must survive too"
    monkeypatch.undo()
    async with File(threads=1).opened(tmp_path) as bench:
        calls = _Calls(monkeypatch)
        await bench.backend.flush()  # whoever wrote them may have been killed before its flush
        assert calls.names.count("fsync file") == 2
    async with File(sync="none").opened(tmp_path) as bench:
        calls.made.clear()
        await bench.write(part(7, 5000))
        await bench.backend.flush()
        assert calls.names == ["rename"]


async def test_a_sync_that_failed_stays_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the medium is gone")

    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refuse)
            with pytest.raises(BackendError, match="cannot sync"):
                await bench.backend.flush()
        with pytest.raises(BackendError, match="the medium is gone"):
            await bench.backend.flush()
    async with File().opened(tmp_path) as bench:
        await bench.backend.flush()


async def test_a_second_flush_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, fsync, done = threading.Event(), os.fsync, []

    def slowly(fd: int) -> None:
        go.wait(30)
        fsync(fd)

    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        monkeypatch.setattr(os, "fsync", slowly)

        async def flush(number: int) -> None:
            await bench.backend.flush()
            done.append(number)

        jobs = [bench.workers.spawn(flush, number) for number in range(2)]
        await asyncio.sleep(0.02)
        assert done == [], "what it was to make durable is still being synced"
        go.set()
        for job in jobs:
            await job.wait()


async def test_f037_d1_damage_at_any_place_is_found_or_the_engines(tmp_path: Path) -> None:
    """A flipped bit in the record hides the file; one in the frame is for the checksums above."""
    stored = part(0, 3000)
    async with File().opened(tmp_path) as bench:
        await bench.write(stored)
    (path,) = frames(tmp_path)
    good = path.read_bytes()
    for at in (*range(3000, len(good), 11), len(good) - 1, 0):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        async with File().opened(tmp_path) as bench:
            assert list(bench.found) == ([] if at else [stored])
            if at:
                assert bench.backend.stats().details["damaged"] == 1
                assert used(bench) == disk_usage(tmp_path / "kv")


async def test_d1_foreign_and_cut_files_go_into_a_bounded_quarantine(tmp_path: Path) -> None:
    parts = [part(i, 9000) for i in range(40)]
    async with File().opened(tmp_path) as bench:
        await bench.write(*parts)
    paths = frames(tmp_path)
    for number, path in enumerate(paths[:-4]):
        data = path.read_bytes()
        other = paths[(number + 1) % len(paths)].read_bytes()
        spoilt = [data[:-1], data + b"\0", b"", data[1:], other, bytes(len(data))]
        path.write_bytes(spoilt[number % len(spoilt)])
    async with File().opened(tmp_path) as bench:
        assert 0 < len(bench.found) <= 4
        assert await bench.read(*bench.found) == [contents(p) for p in bench.found]
        details = bench.backend.stats().details
        assert details["damaged"] == 40 - len(bench.found)
        kept = everything(tmp_path / "kv" / "damaged")
        assert len(kept) == details["damaged"] - details["damaged_removed"]
        assert 1 <= len(kept) <= 16
        assert sum(p.stat().st_size for p in kept) <= CAPACITY // 64
        assert used(bench) == disk_usage(tmp_path / "kv")
        gone = [p for p in parts if p not in bench.found]
        assert await bench.write(*gone) == [OK] * len(gone)
    async with File().opened(tmp_path) as bench:
        assert set(bench.found) == set(parts)
        assert used(bench) == disk_usage(tmp_path / "kv") <= CAPACITY


async def test_d6_a_file_of_another_root_is_no_part(tmp_path: Path) -> None:
    stored = part(0, 3000)
    async with File().opened(tmp_path / "a") as bench:
        await bench.write(stored)
    async with File().opened(tmp_path / "b") as bench:
        await bench.write(stored)
    (mine,), (theirs,) = frames(tmp_path / "a"), frames(tmp_path / "b")
    shutil.copy(theirs, mine)
    shutil.copy(theirs, mine.parent)
    async with File().opened(tmp_path / "a") as bench:
        assert list(bench.found) == []
        assert bench.backend.stats().details["damaged"] == 2


async def test_d7_lengths_in_a_record_are_not_trusted(tmp_path: Path) -> None:
    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 3000))
        salt = bench.backend._store.salt  # type: ignore[attr-defined]
    (path,) = frames(tmp_path)
    data = path.read_bytes()[:3000]
    for nbytes in (0, 2999, 3001, 2**63):
        path.write_bytes(data + encode(part(0, nbytes), salt))
        async with File().opened(tmp_path) as bench:
            assert list(bench.found) == []
        path.parent.mkdir(exist_ok=True)


async def test_older_generations_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    old, new = part(0, 3000, 1), part(0, 3000, 2)
    async with File().opened(tmp_path) as first, File().opened(tmp_path) as second:
        assert await first.write(new) == [OK]
        assert await second.write(old) == [OK]  # it cannot know, and replaces nothing
        assert await first.read(new) == [contents(new)]
        assert await second.read(old) == [contents(old)]
        assert len(frames(tmp_path)) == 2
        async with File().opened(tmp_path) as third:
            assert list(third.found) == [new]
            assert third.backend.stats().details["superseded"] == 1
            assert used(third) == disk_usage(tmp_path / "kv")
        assert await second.read(old) == [IoStatus.MISSING]
        assert await first.read(new) == [contents(new)]
