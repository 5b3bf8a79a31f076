"""The ``nvme`` tier: alignment, merging, short counts, errors of the medium."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK, IoStatus, ReadRequest
from tierkv.config import Tier
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.nvme import NvmeBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierkv.testing.bench import Bench

PAGE = 4096
pytestmark = pytest.mark.anyio


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """A disk asks for alignment and reads what is cached without waiting; memory does not."""
    return disk_path


def details(bench: Bench) -> dict[str, float]:
    return bench.backend.stats().details


@pytest.mark.parametrize("io", ["auto", "buffered"])
async def test_f039_sizes_and_offsets(io: str, tmp_path: Path) -> None:
    sizes = [1, 511, 4095, 4096, 4097, 3 * 4096 + 1]
    parts = [part(i, size) for i, size in enumerate(sizes)]
    async with Nvme(io=io).opened(tmp_path) as bench:
        assert await bench.write(*parts) == [OK] * len(parts)
        for stored in parts:
            whole = contents(stored)
            for offset in {0, 1, 511, 512, 4095, 4096, stored.nbytes - 1} & set(
                range(stored.nbytes)
            ):
                target = memoryview(bytearray(stored.nbytes - offset))
                request = ReadRequest(stored.part, 1, offset, len(target))
                assert await bench.backend.read([request], [target]) == [OK]
                assert bytes(target) == whole[offset:]


async def test_aligned_io_goes_straight_and_merged(tmp_path: Path) -> None:
    parts = [part(i, 20 * PAGE) for i in range(10)]
    async with Nvme().opened(tmp_path) as bench:
        if bench.backend.stats().mode != "o_direct":
            pytest.skip("this file system has no O_DIRECT")
        hops = bench.workers.thread_hops
        await bench.write(*parts)
        assert details(bench)["bounce_bytes"] == 0
        assert details(bench)["syscalls"] <= 2  # adjacent extents, at most one segment border
        await bench.read(*parts)
        assert details(bench)["syscalls"] <= 4
        assert details(bench)["bounce_bytes"] == 0
        assert bench.workers.thread_hops - hops == 2, "one hop a batch"


async def test_a_partial_page_costs_no_call_of_its_own(tmp_path: Path) -> None:
    parts = [part(i, 20 * PAGE - 100) for i in range(8)]
    async with Nvme(io="auto", segment="4MiB").opened(tmp_path) as bench:
        await bench.write(*parts)
        before = details(bench)["syscalls"]
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert details(bench)["syscalls"] - before == 1


def _short(real: Callable[..., int]) -> Callable[..., int]:
    """A call that moves at most 5000 bytes, and is interrupted every third time."""
    calls = [0]

    def call(fd: int, views: Sequence[memoryview], offset: int, *flags: int) -> int:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise InterruptedError
        cut: list[memoryview] = []
        room = 2 * PAGE if calls[0] % 2 else PAGE
        for view in views:
            cut.append(view[: room - sum(map(len, cut))])
        return real(fd, [v for v in cut if len(v)], offset, *flags)

    return call


@pytest.mark.parametrize("io", ["auto", "buffered"])
async def test_f040_short_counts(io: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part(i, size) for i, size in enumerate((3 * PAGE, 5 * PAGE + 1, 40_000))]
    async with Nvme(io=io).opened(tmp_path) as bench:
        monkeypatch.setattr(os, "preadv", _short(os.preadv))
        monkeypatch.setattr(os, "pwritev", _short(os.pwritev))
        assert await bench.write(*parts) == [OK] * 3
        assert await bench.read(*parts) == [contents(p) for p in parts]


async def test_f040_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = part(0, 3 * PAGE)
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(stored)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *_: 0)
            assert await bench.read(stored) == [IoStatus.SHORT]
            patch.setattr(os, "pwritev", lambda *_: 0)
            (result,) = await bench.write(part(1, 3 * PAGE))
            assert result.status is IoStatus.ERROR
        assert await bench.read(stored) == [contents(stored)]
        assert bench.backend.stats().entries == 1


async def test_one_bad_page_spares_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part(i, 2 * PAGE) for i in range(5)]
    async with Nvme(segment="1MiB").opened(tmp_path) as bench:
        await bench.write(*parts)
        real = os.preadv

        def preadv(fd: int, views: Sequence[memoryview], offset: int, *flags: int) -> int:
            end = offset + sum(map(len, views))
            if offset <= 5 * PAGE < end:  # a page of part 2: a merged call fails as a whole
                raise OSError(errno.EIO, "bad sector")
            return real(fd, views, offset, *flags)

        monkeypatch.setattr(os, "preadv", preadv)
        seen = await bench.read(*parts)
        assert seen.pop(2) is IoStatus.ERROR
        assert seen == [contents(p) for p in parts if p is not parts[2]]


@pytest.mark.parametrize(
    ("code", "status"), [(errno.EIO, IoStatus.ERROR), (errno.ENOSPC, IoStatus.FULL)]
)
@pytest.mark.parametrize("name", ["pwritev", "pwrite", "posix_fallocate"])
async def test_k4_write_errors_are_results(
    name: str, code: int, status: IoStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, journal or allocation fails: the item says so, nothing leaks, and it works again."""
    first, second = part(0, 20_000), part(1, 20_000)
    async with Nvme(segment="64KiB").opened(tmp_path) as bench:
        await bench.write(first)
        for i in range(10, 14 if name != "posix_fallocate" else 11):
            await bench.write(part(i, 64))
        before = bench.backend.stats()

        def fail(*_: object) -> int:
            raise OSError(code, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            big = part(2, 120_000)  # needs another segment, so that it has to allocate
            (result,) = await bench.write(big)
            assert result.status is status
            assert (result.error is None) == (status is IoStatus.FULL and result.error is None)
            assert await bench.read(big) == [IoStatus.MISSING]
            assert await bench.read(first) == [contents(first)]
        after = bench.backend.stats()
        assert (after.entries, after.live_bytes) == (before.entries, before.live_bytes)
        assert await bench.write(second, big) == [OK, OK]
        assert await bench.read(second, big) == [contents(second), contents(big)]
        await bench.backend.flush()
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")


async def test_o_direct_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refusing)
    stored = part(0, 10_001)
    with caplog.at_level(logging.WARNING, "tierkv.nvme"):
        async with Nvme().opened(tmp_path) as bench:
            assert bench.backend.stats().mode == "buffered"
            await bench.write(stored)
            assert await bench.read(stored) == [contents(stored)]
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    with pytest.raises(BackendError, match="refuses O_DIRECT"):
        async with Nvme(io="direct").opened(tmp_path):
            pass
    async with Nvme(io="buffered").opened(tmp_path) as bench:
        assert await bench.read(stored) == [contents(stored)]


@pytest.mark.every_loop
async def test_small_cached_reads_take_no_hop(tmp_path: Path) -> None:
    stored = part(0, 8000)
    async with Nvme(io="buffered").opened(tmp_path) as bench:
        await bench.write(stored)
        hops = bench.workers.thread_hops
        assert await bench.read(stored) == [contents(stored)]
        inline = details(bench)["inline_reads"]
        assert (bench.workers.thread_hops - hops, inline) in [(0, 1), (1, 0)]
        if not inline:
            pytest.skip("this file system has no RWF_NOWAIT")


async def test_padding_holds_nobodys_bytes(tmp_path: Path) -> None:
    stored = part(0, 100)
    async with Nvme().opened(tmp_path) as bench:
        item = bench.item(stored)
        item.buffer.padded[100:] = b"\xdd" * (PAGE - 100)
        await bench.backend.write([item])
        page = memoryview(bytearray(PAGE))
        await bench.backend.read([ReadRequest(stored.part, 1, 0, PAGE)], [page])
        assert bytes(page[100:]) == bytes(PAGE - 100)


@pytest.mark.every_loop
async def test_extents_wait_for_their_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a read is under way, its extents are not given to anybody else."""
    old, new = part(0, 16 * PAGE), part(1, 16 * PAGE)
    async with Nvme(segment="64KiB").opened(tmp_path, 192 << 10) as bench:
        await bench.write(old)
        gate, real = asyncio.Event(), bench.workers.run

        async def gated(fn: Callable[..., Any], *args: object) -> Any:
            await gate.wait()
            return await real(fn, *args)

        monkeypatch.setattr(bench.workers, "run", gated)
        reading = bench.workers.spawn(bench.read, old)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        monkeypatch.setattr(bench.workers, "run", real)
        await bench.backend.delete([(old.part, 1)])
        assert bench.backend.stats().entries == 0
        (result,) = await bench.write(new)
        assert result.status is IoStatus.FULL, "the only room is still being read"
        gate.set()
        assert await reading.wait() == [contents(old)]
        assert await bench.write(new) == [OK]


async def test_a_bug_of_the_caller_leaks_no_space(tmp_path: Path) -> None:
    """A buffer released too early is the caller's error; the tier goes on as before."""
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        for number in range(30):
            items = [bench.item(part(2 * number + i, 100_000)) for i in range(2)]
            for item in items:
                item.buffer.release()
            with pytest.raises(ClosedError):
                await bench.backend.write(items)
        assert bench.backend.stats().entries == 0
        assert await bench.write(*(part(i, 100_000) for i in range(8))) == [OK] * 8


@pytest.mark.every_loop
async def test_closed_and_forked_backends_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Nvme().opened(tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(BackendError, match="after the fork"):
                await bench.read(part(0, 1))
        await bench.backend.aclose()
        with pytest.raises(ClosedError):
            await bench.read(part(0, 1))
        assert bench.backend.stats().mode == "closed"


async def test_flush_failure_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "injected")

    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 100))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(BackendError, match="cannot sync"):
                await bench.backend.flush()
        with pytest.raises(BackendError, match="cannot sync"):
            await bench.backend.flush()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segmnet": 1}, "did you mean 'segment'"),
        ({"io": "fast"}, "io must be one of"),
        ({"segment": 100}, "at least 4096"),
        ({"segment": "many"}, "option 'segment': not a size"),
    ],
)
def test_options_are_strict(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Nvme(**options).make(tmp_path, 1 << 20)


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a path"):
        NvmeBackend(Tier("nvme", "1GiB"))
    with pytest.raises(ConfigError, match="too small"):
        Nvme().make(tmp_path, 100_000)
