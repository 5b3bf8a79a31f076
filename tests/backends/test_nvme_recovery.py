"""The ``nvme`` tier: what a restart finds, whatever happened to the files."""

from __future__ import annotations

import errno
import logging
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK, IoStatus
from tierkv.extents import Extent
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv_backends.nvme import records

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv.abc import StoredPart

pytestmark = pytest.mark.anyio
CAPACITY = 4 << 20


def journals(root: Path) -> list[Path]:
    return sorted((root / "kv").glob("journal-*"))


async def fill(root: Path, count: int, nbytes: int = 5000) -> list[StoredPart]:
    parts = [part(i, nbytes) for i in range(count)]
    async with Nvme().opened(root) as bench:
        assert await bench.write(*parts) == [OK] * count
        await bench.backend.flush()
    return parts


async def test_f031_restart_finds_everything(tmp_path: Path) -> None:
    parts = await fill(tmp_path, 100)
    async with Nvme().opened(tmp_path) as bench:
        assert set(bench.found) == set(parts)
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")


async def test_f028_a_segment_file_is_unlinked(tmp_path: Path) -> None:
    parts = [part(i, 100_000) for i in range(20)]
    async with Nvme(segment="512KiB").opened(tmp_path) as bench:
        await bench.write(*parts)
        (tmp_path / "kv" / "segment-00001").unlink()
        seen = await bench.read(*parts)  # the open file is still whole
        assert seen == [contents(p) for p in parts]
    async with Nvme(segment="512KiB").opened(tmp_path) as bench:
        found = list(bench.found)
        assert 0 < len(found) < 20
        assert await bench.read(*found) == [contents(p) for p in found]
        lost = [p for p in parts if p not in found]
        assert await bench.read(*lost) == [IoStatus.MISSING] * len(lost)
        assert await bench.write(*lost) == [OK] * len(lost)
        assert await bench.read(*parts) == [contents(p) for p in parts]


async def test_f029_files_vanish_and_eviction_goes_on(tmp_path: Path) -> None:
    parts = await fill(tmp_path, 30, 100_000)
    for name in ("segment-00000", "segment-00002", "checkpoint"):
        (tmp_path / "kv" / name).unlink(missing_ok=True)
    async with Nvme().opened(tmp_path) as bench:
        await bench.backend.delete([(p.part, p.generation) for p in parts])
        assert bench.backend.stats().entries == 0
        for generation in range(2, 5):
            for number in range(25):
                assert await bench.write(part(number, 100_000, generation)) == [OK]
        stats = bench.backend.stats()
        assert stats.entries == 25
        assert stats.disk_bytes == disk_usage(tmp_path / "kv") <= CAPACITY


async def test_f030_d5_clean_up_spares_a_newer_entry(tmp_path: Path) -> None:
    damaged = part(0, 50_000, generation=1)
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(damaged)
        fresh = replace(damaged, generation=2)
        await bench.write(fresh)  # somebody stored it again while the damage was found
        await bench.backend.delete([(damaged.part, 1)])
        assert await bench.read(fresh) == [contents(fresh)]
    async with Nvme().opened(tmp_path) as bench:
        assert list(bench.found) == [fresh]


async def test_f032_flush_syncs_data_before_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def name(fd: int) -> str:
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split("-")[0]

    def record(call: str, real: Any) -> Any:
        def wrapped(fd: int) -> None:
            calls.append(f"{call} {name(fd)}")
            real(fd)

        return wrapped

    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        monkeypatch.setattr(os, "fdatasync", record("fdatasync", os.fdatasync))
        monkeypatch.setattr(os, "fsync", record("fsync", os.fsync))
        await bench.backend.flush()
        data, journal = calls.index("fdatasync segment"), calls.index("fdatasync journal")
        assert data < journal
        assert calls[journal + 1] == "fsync kv", "the names of new files must survive too"


async def test_f032_checkpoints_are_published_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_rename, real_fsync, real_unlink = os.rename, os.fsync, os.unlink

    def rename(source: str, target: str, **named: Any) -> None:
        calls.append(f"rename {source} {target}")
        real_rename(source, target, **named)

    def fsync(fd: int) -> None:
        calls.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    def unlink(path: str, **named: Any) -> None:
        calls.append(f"unlink {path}")
        real_unlink(path, **named)

    async with Nvme().opened(tmp_path) as bench:
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "unlink", unlink)
        for generation in range(1, 600):
            await bench.write(part(0, 64, generation))
            if bench.backend.stats().details["checkpoints"]:
                break
    assert calls[:4] == [
        "fsync checkpoint.tmp",
        "rename checkpoint.tmp checkpoint",
        "fsync kv",
        "unlink journal-000000000001",
    ]


async def test_checkpoints_bound_the_journal(tmp_path: Path) -> None:
    parts = {n: part(n, 64) for n in range(20)}
    async with Nvme().opened(tmp_path) as bench:
        for generation in range(2, 1500):
            number = generation % 20
            parts[number] = part(number, 64, generation)
            assert await bench.write(parts[number]) == [OK]
        details = bench.backend.stats().details
        assert details["checkpoints"] >= 3
        assert sum(path.stat().st_size for path in journals(tmp_path)) <= 128 << 10
        assert len(journals(tmp_path)) == 1
    async with Nvme().opened(tmp_path) as bench:
        assert set(bench.found) == set(parts.values())


@pytest.mark.parametrize("step", ["fsync", "rename", "unlink"])
async def test_d3_checkpoints_cut_short(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that fails half way costs nothing: old files stay, and it is tried again."""
    real = getattr(os, step)
    failures = [3]

    def fail(target: Any, *args: Any, **named: Any) -> Any:
        if failures[0] and str(target) != "probe":
            failures[0] -= 1
            raise OSError(errno.EIO, "injected")
        return real(target, *args, **named)

    expected: dict[int, StoredPart] = {}
    async with Nvme().opened(tmp_path) as bench:
        with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            for generation in range(1, 1600):
                number = generation % 10
                expected[number] = part(number, 64, generation)
                assert await bench.write(expected[number]) == [OK]
        assert failures == [0]
        assert "checkpoint" in caplog.text
        assert bench.backend.stats().details["checkpoints"] >= 1
        assert bench.backend.stats().disk_bytes == disk_usage(tmp_path / "kv")
    async with Nvme().opened(tmp_path) as bench:
        assert set(bench.found) == set(expected.values())
        assert not (tmp_path / "kv" / "checkpoint.tmp").exists()


async def test_d3_leftovers_are_removed(tmp_path: Path) -> None:
    await fill(tmp_path, 3)
    (tmp_path / "kv" / "checkpoint.tmp").write_bytes(b"half a checkpoint")
    async with Nvme().opened(tmp_path) as bench:
        assert len(bench.found) == 3
        assert not (tmp_path / "kv" / "checkpoint.tmp").exists()


async def test_old_journals_beside_a_checkpoint_do_not_matter(tmp_path: Path) -> None:
    """Killed between publishing a checkpoint and removing the journals that it replaces."""
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 64))
        await bench.backend.delete([(part(0, 64).part, 1)])
        await bench.write(part(1, 64))
        await bench.backend.flush()
        old = journals(tmp_path)[0].read_bytes()
        for generation in range(2, 400):
            await bench.write(part(1, 64, generation))
        assert bench.backend.stats().details["checkpoints"] >= 1
    (tmp_path / "kv" / "journal-000000000001").write_bytes(old)
    async with Nvme().opened(tmp_path) as bench:
        assert list(bench.found) == [part(1, 64, 399)]


@pytest.mark.parametrize("seed", range(4))
async def test_d1_damaged_metadata_loses_only_what_it_hits(seed: int, tmp_path: Path) -> None:
    parts = await fill(tmp_path, 40)
    rng = random.Random(seed)
    path = journals(tmp_path)[-1]
    data = bytearray(path.read_bytes())
    used = max(i for i, byte in enumerate(data) if byte) + 1
    at = rng.randrange(used)
    data[at : at + 40] = rng.randbytes(40)
    path.write_bytes(data)
    async with Nvme().opened(tmp_path) as bench:
        assert len(bench.found) >= 38, "only the records that were hit"
        assert set(bench.found) <= set(parts)
        assert await bench.read(*bench.found) == [contents(p) for p in bench.found]
        assert bench.backend.stats().details["damaged_records"] >= 1
        lost = [p for p in parts if p not in bench.found]
        assert await bench.write(*lost) == [OK] * len(lost)
    async with Nvme().opened(tmp_path) as bench:
        assert set(bench.found) == set(parts)


async def test_records_of_another_root_count_for_nothing(tmp_path: Path) -> None:
    await fill(tmp_path / "a", 5)
    await fill(tmp_path / "b", 3)
    stolen = journals(tmp_path / "a")[0].read_bytes()
    (tmp_path / "b" / "kv" / "journal-000000000009").write_bytes(stolen)
    async with Nvme().opened(tmp_path / "b") as bench:
        assert len(bench.found) == 3


async def test_deletes_that_cannot_be_journalled_keep_their_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [part(i, 100_000) for i in range(8)]
    async with Nvme(segment="128KiB").opened(tmp_path, 1 << 20) as bench:
        await bench.write(*parts)

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            await bench.backend.delete([(p.part, 1) for p in parts])
        assert "cannot be journalled" in caplog.text
        assert await bench.read(*parts) == [IoStatus.MISSING] * 8
        (result,) = await bench.write(part(20, 700_000))
        assert result.status is IoStatus.FULL, "after a crash the old records would be back"
        await bench.backend.flush()
        assert await bench.write(part(20, 700_000)) == [OK]
    async with Nvme().opened(tmp_path, 1 << 20) as bench:
        assert list(bench.found) == [part(20, 700_000)]


# --------------------------------------------------------------------------- records

names = st.integers(0, 1000)
stored_parts = st.builds(
    part,
    names,
    st.integers(0, 2**40),
    st.integers(1, 2**63),
    tenant=st.text(max_size=60),
    exact=st.booleans(),
    lossless=st.booleans(),
    expires=st.none() | st.floats(0, 1e12),
)
extent_lists = st.lists(
    st.builds(Extent, st.integers(0, 2**50), st.integers(1, 2**31)), min_size=1, max_size=40
)


@given(stored_parts, extent_lists, st.integers(0, 2**63), st.integers(0, 2**64 - 1))
def test_records_round_trip(
    stored: StoredPart, extents: list[Extent], sequence: int, salt: int
) -> None:
    record = records.encode_put(stored, extents, sequence, salt)
    assert len(record) % records.UNIT == 0
    assert records.scan(record, salt) == ([record], len(record), 0)
    assert records.stored_of(record) == stored
    assert records.extents_of(record) == extents
    assert records.first_page_of(record) == extents[0].start
    assert (records.part_of(record), records.sequence_of(record)) == (stored.part, sequence)
    assert records.generation_of(record) == stored.generation
    assert records.nbytes_of(record) == stored.nbytes
    assert records.is_put(record)
    assert records.scan(record, salt ^ 1)[0] == []


@given(st.lists(stored_parts, max_size=6), st.randoms(use_true_random=False))
def test_scan_survives_any_damage(parts: list[StoredPart], rng: random.Random) -> None:
    made = [records.encode_put(p, [Extent(0, 1)], i, 7) for i, p in enumerate(parts)]
    made += [records.encode_delete(p.part, p.generation, 99, 7) for p in parts[:2]]
    data = bytearray(b"".join(made))
    if data:
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(1, 90)] = rng.randbytes(rng.randrange(1, 90))
    found, end, _ = records.scan(bytes(data), 7)
    assert set(found) <= set(made), "never a record that nobody wrote"
    assert end <= len(data)
