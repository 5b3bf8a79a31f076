"""The ``nvme`` tier: large batches in several threads, files that grow, what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK, IoStatus
from tierkv.buffers import Arena
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.nvme import shards as shards_module
from tierkv_backends.nvme.shards import split
from tierkv_backends.nvme.transfer import Piece, Transfer
from tierkv_backends.nvme.writing import WriteJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.testing.bench import Bench

PAGE = 4096


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 128 KiB are large."""
    monkeypatch.setattr(shards_module, "SHARD", 64 << 10)


def details(bench: Bench) -> dict[str, float]:
    return bench.backend.stats().details


# ---------------------------------------------------------------------- splitting


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9000), st.integers(1, 60_000)), max_size=6
    ),
    st.integers(1, 5),
)
def test_shards_cover_everything_once(layout: list[tuple[int, int, int]], count: int) -> None:
    pieces, ends = [], {0: 0, 1: 0, 2: 0}
    for item, (fd, gap, length) in enumerate(layout):
        offset = ends[fd] + gap
        ends[fd] = offset + length
        memory = memoryview(bytearray(length))
        memory[:] = bytes((item * 31 + at) % 251 for at in range(length))
        pieces.append(Piece(item, fd, offset, memory))
    made = split(pieces, count)
    assert len(made) <= count
    assert all(made)
    flat = [piece for shard in made for piece in shard]
    assert [(p.fd, p.offset) for p in flat] == sorted((p.fd, p.offset) for p in flat)
    for item, whole in enumerate(pieces):
        mine = [p for p in flat if p.item == item]
        assert b"".join(bytes(p.memory) for p in mine) == bytes(whole.memory)
        at = whole.offset
        for cut in mine:
            assert cut.offset == at
            assert cut is mine[0] or at % PAGE == 0
            at += len(cut.memory)
    total = sum(layout_[2] for layout_ in layout)
    for shard in made:
        size = sum(len(p.memory) for p in shard)
        assert size <= -(-total // count) + PAGE * len(layout) + PAGE or len(made) == 1


# ---------------------------------------------------------------------- batches


@pytest.mark.anyio
@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.usefixtures("small_shards")
async def test_large_batches_are_split_and_counted(io: str, tmp_path: Path) -> None:
    sizes = [300_000, 1, 70_001, 4096 * 20, 150_000]
    parts = [part(i, size) for i, size in enumerate(sizes)]
    async with Nvme(io=io, segment="4MiB").opened(tmp_path, 16 << 20) as bench:
        hops = bench.workers.thread_hops
        assert await bench.write(*parts) == [OK] * len(parts)
        assert bench.workers.thread_hops - hops == 3, "a hop to grow, and one a shard"
        assert details(bench)["shards"] == 2
        seen = details(bench)["syscalls"]
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert bench.workers.thread_hops - hops == 5
        assert details(bench)["shards"] == 4
        assert details(bench)["hops"] == bench.workers.thread_hops - hops
        if bench.backend.stats().mode == "o_direct":
            assert details(bench)["syscalls"] - seen == 2, "a call for each run of extents"
        again = [part(i, size, 2) for i, size in enumerate(sizes)]
        assert await bench.write(*again) == [OK] * len(parts)
        assert await bench.write(*(part(9, 200_000, g) for g in (1, 2))) == [OK] * 2
        assert await bench.read(*again) == [contents(p) for p in again]
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")


@pytest.mark.every_loop
@pytest.mark.anyio
@pytest.mark.usefixtures("small_shards")
async def test_batches_side_by_side_are_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several batches keep the medium busy by themselves; threads are left to others."""
    parts = [part(i, 200_000) for i in range(4)]
    async with Nvme().opened(tmp_path, 16 << 20) as bench:
        await bench.write(*parts)
        before = details(bench)
        gate, real = asyncio.Event(), bench.workers.run

        async def gated(fn: Callable[..., Any], *args: object) -> Any:
            await gate.wait()
            return await real(fn, *args)

        monkeypatch.setattr(bench.workers, "run", gated)
        jobs = [bench.workers.spawn(bench.read, stored) for stored in parts]
        for _ in range(6):
            await asyncio.sleep(0)
        gate.set()
        assert [await job.wait() for job in jobs] == [[contents(p)] for p in parts]
        assert details(bench)["shards"] - before["shards"] == 2, "the first one only"


@pytest.mark.anyio
@pytest.mark.usefixtures("small_shards")
async def test_one_bad_shard_spares_the_items_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part(i, 100_000) for i in range(4)]
    async with Nvme(segment="4MiB").opened(tmp_path, 16 << 20) as bench:
        assert await bench.write(part(9, 1_000_000)) == [OK]
        await bench.backend.delete([(part(9, 0).part, 1)])
        real = os.pwritev

        def pwritev(fd: int, views: Sequence[memoryview], offset: int, *flags: int) -> int:
            end = offset + sum(map(len, views))
            if offset <= 2 * 25 * PAGE < end and end - offset < 1_000_000:
                raise OSError(errno.EIO, "bad sector")
            return real(fd, views, offset, *flags)

        monkeypatch.setattr(os, "pwritev", pwritev)
        results = await bench.write(*parts)
        assert [r.status for r in results].count(IoStatus.ERROR) == 1
        good = [p for p, r in zip(parts, results, strict=True) if r is OK]
        assert await bench.read(*good) == [contents(p) for p in good]
        assert bench.backend.stats().live_bytes == 3 * 25 * PAGE


@pytest.mark.anyio
@pytest.mark.usefixtures("small_shards")
async def test_a_shard_that_raises_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        real = Transfer.run
        calls = []

        def run(self: Transfer, pieces: Sequence[Piece]) -> None:
            calls.append(1)
            if len(calls) % 2:
                raise MemoryError("injected")
            real(self, pieces)

        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "run", run)
            for number in range(20):
                with pytest.raises(MemoryError):
                    await bench.write(part(number, 300_000))
        assert bench.backend.stats().entries == 0
        assert await bench.write(part(0, 400_000), part(1, 400_000)) == [OK] * 2


@pytest.mark.every_loop
@pytest.mark.anyio
@pytest.mark.usefixtures("small_shards")
async def test_f038_a_slow_reader_while_everything_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a read takes, its extents hold its frame: right bytes, whatever came since."""
    old = part(0, 300_000)
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        await bench.write(old)
        gate, inside, real = threading.Event(), threading.Event(), os.preadv

        def preadv(*args: Any) -> int:
            inside.set()
            gate.wait(60)
            return real(*args)

        monkeypatch.setattr(os, "preadv", preadv)
        reading = bench.workers.spawn(bench.read, old)
        for _ in range(20_000):
            if inside.is_set():
                break
            await asyncio.sleep(0.0005)
        store = bench.backend._store  # type: ignore[attr-defined]
        store.delete([(old.part, 1)])
        kept = []
        for number in range(1, 30):
            item = bench.item(part(number, 100_000))
            job = WriteJob(1)
            store.write([item], job)
            item.buffer.release()
            kept += [item.stored] if job.outcome() == [OK] else []
        gate.set()
        assert len(kept) >= 3
        assert await reading.wait() == [contents(old)]
        assert await bench.read(*kept) == [contents(p) for p in kept]
        assert await bench.write(part(50, 290_000)) == [OK], "free once nobody reads it"


@pytest.mark.every_loop
@pytest.mark.anyio
@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("turn", range(12))
async def test_a_split_write_cancelled_anywhere(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled before, between and after its threads: stored whole or not, and nothing leaks."""
    parts = [part(i, 100_000) for i in range(3)]
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        assert await bench.write(part(7, 200_000)) == [OK]
        real, started = os.pwritev, threading.Event()

        def pwritev(*args: Any) -> int:
            started.set()
            return real(*args)

        monkeypatch.setattr(os, "pwritev", pwritev)
        items = [bench.item(stored) for stored in parts]
        task = asyncio.get_running_loop().create_task(bench.backend.write(items))
        for _ in range(turn if turn < 8 else 0):
            await asyncio.sleep(0)
        for _ in range(20_000 if turn >= 8 else 0):
            if started.is_set():
                break
            await asyncio.sleep(0.0005)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            assert await task == [OK] * 3
        for item in items:
            item.buffer.memory[:] = b"\xee" * item.stored.nbytes  # nobody reads it any more
            item.buffer.release()
        entries = bench.backend.stats().entries
        assert entries in (1, 4)
        if entries == 4:
            assert await bench.read(*parts) == [contents(p) for p in parts]
            await bench.backend.delete([(p.part, 1) for p in parts])
        assert await bench.write(*(part(20 + i, 90_000) for i in range(7))) == [OK] * 7, "room"
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_pages_under_a_hanging_thread_are_kept_back(tmp_path: Path) -> None:
    """A thread that was given up may write when it wakes: not over somebody else's frame."""
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        store = bench.backend._store  # type: ignore[attr-defined]
        item = bench.item(part(0, 300_000))
        job = WriteJob(1)
        assert store.begin([item], job, grow=True)
        assert store.writer.moving(job)
        store.writer.abandon(job)
        (result,) = await bench.write(part(1, 700_000))
        assert result.status is IoStatus.FULL
        assert not store.writer.moving(job), "nothing more is written"
        assert not store.writer.moved(job, {}), "and nothing is shown when it wakes"
        assert await bench.write(part(1, 700_000)) == [OK], "the pages are free then"
        assert bench.backend.stats().entries == 1


# ---------------------------------------------------------------------- growing, counting


@pytest.mark.anyio
async def test_large_frames_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No zeros before what fills fresh extents whole; small frames get theirs written ahead."""
    parts = [part(i, (1 << 20) + 5) for i in range(6)]
    written = [0]
    real = os.pwritev

    def pwritev(fd: int, views: Sequence[memoryview], offset: int, *flags: int) -> int:
        written[0] += sum(map(len, views))
        return real(fd, views, offset, *flags)

    monkeypatch.setattr(os, "pwritev", pwritev)
    async with Nvme(segment="4MiB").opened(tmp_path, 24 << 20) as bench:
        written[0] = 0
        assert await bench.write(*parts) == [OK] * 6
        assert written[0] == sum(bench.backend.charge(p.nbytes) for p in parts)
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")
        await bench.write(part(10, 5000))
        before = written[0]
        assert before > sum(bench.backend.charge(p.nbytes) for p in parts) + (1 << 20)
        await bench.write(part(11, 5000))
        assert written[0] == before + 2 * PAGE
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")
    async with Nvme().opened(tmp_path, 24 << 20) as bench:
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")


@pytest.mark.anyio
async def test_extents_that_were_never_written_hold_no_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write into fresh extents fails; the space comes back, now and after a restart."""
    capacity = 16 << 20

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "injected")

    async with Nvme(segment="4MiB").opened(tmp_path, capacity) as bench:
        bench.arena = Arena(32 << 20)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            (result,) = await bench.write(part(0, 12 << 20))
            assert result.status is IoStatus.ERROR
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")
        assert await bench.write(part(1, 14 << 20)) == [OK]
        await bench.backend.delete([(part(1, 0).part, 1)])
    async with Nvme().opened(tmp_path, capacity) as bench:
        bench.arena = Arena(32 << 20)
        assert await bench.write(part(2, 14 << 20)) == [OK]
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv") <= capacity


@pytest.mark.anyio
async def test_half_written_fresh_extents_are_counted_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every other frame fails, the file's own map of its extents takes blocks as well."""
    parts = [part(i, 100_000) for i in range(40)]
    async with Nvme(segment="8MiB").opened(tmp_path, 16 << 20) as bench:
        real = os.pwritev

        def pwritev(fd: int, views: Sequence[memoryview], offset: int, *flags: int) -> int:
            if len(views) > 1 or offset // PAGE // 25 % 2:
                raise OSError(errno.EIO, "injected")
            return real(fd, views, offset, *flags)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            results = await bench.write(*parts)
        assert [r.status for r in results] == [IoStatus.OK, IoStatus.ERROR] * 20
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")
        assert await bench.read(*parts[::2]) == [contents(p) for p in parts[::2]]


@pytest.mark.every_loop
@pytest.mark.anyio
async def test_small_reads_by_o_direct_do_not_wait_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RWF_NOWAIT with O_DIRECT waits for the device all the same: such reads go to a thread."""
    stored = part(0, 8000)
    async with Nvme().opened(tmp_path) as bench:
        if bench.backend.stats().mode != "o_direct":
            pytest.skip("this file system has no O_DIRECT")
        await bench.write(stored)
        loop_thread, real = threading.get_ident(), os.preadv

        def preadv(*args: Any) -> int:
            assert threading.get_ident() != loop_thread
            return real(*args)

        monkeypatch.setattr(os, "preadv", preadv)
        assert await bench.read(stored) == [contents(stored)]
        assert details(bench)["inline_reads"] == 0


@pytest.mark.anyio
async def test_buffered_bytes_are_counted(tmp_path: Path) -> None:
    stored = part(0, 10_000)
    async with Nvme(io="buffered").opened(tmp_path / "a") as bench:
        await bench.write(stored)
        await bench.read(stored)
        assert details(bench)["buffered_bytes"] == 20_000
    async with Nvme().opened(tmp_path / "b") as bench:
        if bench.backend.stats().mode != "o_direct":
            pytest.skip("this file system has no O_DIRECT")
        await bench.write(stored)
        await bench.read(stored)
        assert details(bench)["buffered_bytes"] == 0
