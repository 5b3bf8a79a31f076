"""The ``nvme`` tier: capacity, accounting, fragmentation, shrinking."""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK, IoStatus, StoredPart
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.nvme import segments
from tierkv_backends.nvme.transfer import list_at

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tierkv.testing.bench import Bench

PAGE = 4096
pytestmark = pytest.mark.anyio


def check(bench: Bench, root: Path, capacity: int, live: Iterable[StoredPart]) -> None:
    """The sums are exact, and the file system agrees."""
    stats = bench.backend.stats()
    parts = list(live)
    assert stats.entries == len(parts)
    assert stats.live_bytes == sum(bench.backend.charge(p.nbytes) for p in parts)
    assert stats.disk_bytes == disk_usage(root / "kv")
    assert stats.live_bytes <= stats.disk_bytes <= capacity


async def test_f061_capacity_is_kept_without_any_other_setting(tmp_path: Path) -> None:
    capacity = 2 << 20
    async with Nvme().opened(tmp_path, capacity) as bench:
        live: list[StoredPart] = []
        written = 0
        for number in range(400):
            stored = part(number, 30_000)
            while (await bench.write(stored))[0].status is IoStatus.FULL:
                oldest = live.pop(0)
                await bench.backend.delete([(oldest.part, oldest.generation)])
            live.append(stored)
            written += stored.nbytes
            if number % 20 == 0:
                check(bench, tmp_path, capacity, live)
        assert written > 5 * capacity
        check(bench, tmp_path, capacity, live)
        assert await bench.read(*live) == [contents(p) for p in live]


@pytest.mark.parametrize(
    ("mebibytes", "nbytes"), [(1, 8192), (8, 40_000), (8, 300_000), (16, 49_152), (24, 40_960)]
)
async def test_usable_bytes_can_be_counted_on(mebibytes: int, nbytes: int, tmp_path: Path) -> None:
    """Frames whose charges sum up to ``usable_bytes`` are never FULL, also after long use."""
    capacity = mebibytes << 20
    async with Nvme().opened(tmp_path, capacity) as bench:
        usable = bench.backend.stats().details["usable_bytes"]
        assert usable >= 0.8 * capacity
        count = int(usable) // bench.backend.charge(nbytes)
        for number in range(3 * count):
            if number >= count:
                await bench.backend.delete([(part(number - count, 0).part, 1)])
            assert await bench.write(part(number, nbytes)) == [OK], number
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv") <= capacity


async def test_f062_reopen_with_half_the_capacity(tmp_path: Path) -> None:
    capacity = 4 << 20
    parts = [part(i, 100_000) for i in range(36)]
    async with Nvme(segment="512KiB").opened(tmp_path, capacity) as bench:
        assert await bench.write(*parts) == [OK] * 36
    async with Nvme(segment="512KiB").opened(tmp_path, capacity // 2) as bench:
        assert len(bench.found) == 36, "whoever decides must see all of it"
        (result,) = await bench.write(part(99, 10_000))
        assert result.status is IoStatus.FULL
        await bench.backend.delete([(p.part, p.generation) for p in parts[::2]])
        check(bench, tmp_path, capacity // 2, parts[1::2])
        assert await bench.read(*parts[1::2]) == [contents(p) for p in parts[1::2]]
    async with Nvme(segment="512KiB").opened(tmp_path, capacity // 2) as bench:
        check(bench, tmp_path, capacity // 2, parts[1::2])
        await bench.backend.delete([(p.part, p.generation) for p in parts[1:20:2]])
        more = [part(100 + i, 50_000) for i in range(8)]
        assert await bench.write(*more) == [OK] * 8
        check(bench, tmp_path, capacity // 2, [*parts[21::2], *more])
        assert await bench.read(*more) == [contents(p) for p in more]
    async with Nvme().opened(tmp_path, 2 * capacity) as bench:  # and it may grow again
        big = [part(200 + i, 250_000) for i in range(20)]
        assert await bench.write(*big) == [OK] * 20
        check(bench, tmp_path, 2 * capacity, [*parts[21::2], *more, *big])


async def test_f062_without_hole_punching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no holes can be punched, files are cut at their ends."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "injected")

    monkeypatch.setattr(segments, "_punch", refuse)
    parts = [part(i, 100_000) for i in range(36)]
    async with Nvme(segment="512KiB").opened(tmp_path, 4 << 20) as bench:
        assert await bench.write(*parts) == [OK] * 36
    async with Nvme().opened(tmp_path, 2 << 20) as bench:
        await bench.backend.delete([(p.part, p.generation) for p in parts[10:]])
        check(bench, tmp_path, 2 << 20, parts[:10])
        assert await bench.read(*parts[:10]) == [contents(p) for p in parts[:10]]


async def test_f063_the_same_part_again(tmp_path: Path) -> None:
    stored = part(0, 30_000)
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        await bench.write(stored)
        before = bench.backend.stats().live_bytes
        for _ in range(300):
            assert await bench.write(stored) == [OK]
        assert bench.backend.stats().live_bytes == before
        check(bench, tmp_path, 1 << 20, [stored])


@pytest.mark.parametrize("seed", [1, 2])
async def test_f064_random_operations(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    capacity = 1 << 20
    live: dict[int, StoredPart] = {}
    async with Nvme(segment="128KiB").opened(tmp_path, capacity) as bench:
        for step in range(150):
            number = rng.randrange(40)
            if rng.random() < 0.35 and live:
                gone = live.pop(rng.choice(sorted(live)))
                await bench.backend.delete([(gone.part, gone.generation)])
            else:
                stored = part(number, rng.choice([1, 4096, 9000, 50_000, 120_000]), step + 1)
                (result,) = await bench.write(stored)
                if result == OK:
                    live[number] = stored
                assert result.status in (IoStatus.OK, IoStatus.FULL)
            check(bench, tmp_path, capacity, live.values())
        found = list(live.values())
        assert await bench.read(*found) == [contents(p) for p in found]
    async with Nvme().opened(tmp_path, capacity) as bench:
        check(bench, tmp_path, capacity, live.values())
        assert await bench.read(*found) == [contents(p) for p in found]


async def test_fragmentation_refuses_nothing(tmp_path: Path) -> None:
    """Half of the room is free in single pages: one large frame still fits, split up."""
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        small = []
        for number in range(1000):
            stored = part(number, PAGE)
            if (await bench.write(stored))[0] != OK:
                break
            small.append(stored)
        await bench.backend.delete([(p.part, p.generation) for p in small[::2]])
        large = part(5000, len(small) // 4 * PAGE - 5)
        assert await bench.write(large) == [OK]
        assert await bench.read(large) == [contents(large)]
        kept = small[1::2]
        assert await bench.read(*kept) == [contents(p) for p in kept]
        check(bench, tmp_path, 1 << 20, [large, *kept])
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        assert await bench.read(large) == [contents(large)]


async def test_f067_many_tiny_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are packed: few files however many parts, and no lookup lists a directory."""
    parts = [part(i, 64) for i in range(2000)]
    async with Nvme().opened(tmp_path, 16 << 20) as bench:
        for at in range(0, 2000, 250):
            assert await bench.write(*parts[at : at + 250]) == [OK] * 250
        assert len(os.listdir(tmp_path / "kv")) < 16

        def forbidden(*_: object) -> None:
            raise AssertionError("a lookup lists a directory")

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", forbidden)
            patch.setattr(os, "scandir", forbidden)
            assert await bench.read(*parts[:100]) == [contents(p) for p in parts[:100]]
            assert await bench.read(part(9999, 64)) == [IoStatus.MISSING]


async def test_empty_frames(tmp_path: Path) -> None:
    stored = part(0, 0)
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        assert await bench.write(stored) == [OK]
        assert await bench.read(stored) == [b""]
        check(bench, tmp_path, 1 << 20, [stored])


async def test_k1_files_that_only_look_like_segments_count(tmp_path: Path) -> None:
    """Nobody reads, grows or removes them; the room that they take is not the tier's to give."""
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
    root = tmp_path / "kv"
    for name in ("segment-000003", "segment-1", "segment-00001x"):
        (root / name).write_bytes(bytes(70_000))
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(bytes(70_000))
    async with Nvme().opened(tmp_path) as bench:
        assert bench.backend.stats().disk_bytes == disk_usage(root)
        assert await bench.read(part(0, 5000)) == [contents(part(0, 5000))]
        await bench.backend.delete([(part(0, 1).part, 1)])
    assert (root / "segment-000003").stat().st_size == 70_000


def test_a_root_is_listed_whole_while_another_thread_is_in_the_middle_of_it(
    tmp_path: Path,
) -> None:
    """A checkpoint looks for journals while the disk use is counted: through one descriptor."""
    names = [f"journal-{number}" for number in range(5)]
    for name in names:
        (tmp_path / name).touch()
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(root) as other:
            next(other)
            assert sorted(list_at(root)) == names
    finally:
        os.close(root)
