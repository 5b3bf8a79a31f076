"""The ``file`` tier: what is a root of ours, who may use it, and what is done to others' files."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from typing import TYPE_CHECKING

import anyio.to_thread
import pytest

from tests.backends.file_bench import File
from tests.backends.one_loop import one_loop
from tierkv.abc import OK
from tierkv.config import Tier
from tierkv.errors import BackendError, ClosedError, ConfigError
from tierkv.testing.bench import contents, part
from tierkv.testing.crash import disk_usage
from tierkv.workers import Workers
from tierkv_backends.file import FileBackend
from tierkv_backends.file.root import Root, Unfinished, bits_for

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

pytestmark = pytest.mark.anyio
anyio_backend = one_loop


def everything(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def frames(root: Path) -> list[Path]:
    return sorted(p for p in everything(root / "kv") if p.parent.parent.parent == root / "kv")


@pytest.mark.usefixtures("no_thread_leaks")
async def test_several_owners_share_a_root(tmp_path: Path) -> None:
    async with File().opened(tmp_path) as first, File().opened(tmp_path) as second:
        assert await first.write(part(0, 5000)) == [OK]
        assert await second.write(part(1, 5000)) == [OK]
        async with File().opened(tmp_path) as third:
            assert set(third.found) == {part(0, 5000), part(1, 5000)}
            assert await third.read(*third.found) == [contents(p) for p in third.found]


async def test_roots_made_at_once_are_one(tmp_path: Path) -> None:
    made: list[Root] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        made.append(Root("file", str(tmp_path / "kv"), 1 << 20))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    assert len({root.superblock for root in made}) == 1
    assert os.listdir(tmp_path / "kv") == ["tierkv.json"]
    for root in made:
        root.close()


@pytest.mark.usefixtures("no_fd_leaks")
async def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o775)
    root.chmod(0o775)
    (root / "thesis.tex").write_text("years of work")
    with pytest.raises(BackendError, match="directory of its own"):
        async with File().opened(tmp_path):
            pass
    assert [p.name for p in everything(root)] == ["thesis.tex"]
    assert stat.S_IMODE(root.stat().st_mode) == 0o775


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
async def test_s3_a_root_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 100))
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(BackendError, match="cannot be trusted"):
        async with File().opened(tmp_path):
            pass
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == mode
    (tmp_path / "kv").chmod(0o755)  # readable is mended, writable would be too late
    async with File().opened(tmp_path) as bench:
        assert await bench.read(part(0, 100)) == [contents(part(0, 100))]
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


async def test_s3_nobody_else_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        async with File().opened(tmp_path) as bench:
            await bench.write(*(part(i, 5000) for i in range(20)))
    finally:
        os.umask(before)
    tree = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in tree if p.is_dir()} == {0o700}
    assert {stat.S_IMODE(p.stat().st_mode) for p in tree if p.is_file()} == {0o600}
    assert len(frames(tmp_path)) == 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_s3_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 100))
    os.chown(tmp_path / "kv", 1234, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(BackendError, match="belongs to user 1234"):
        async with File().opened(tmp_path):
            pass
    monkeypatch.undo()
    os.chown(tmp_path / "kv" / "tierkv.json", 1234, -1)
    async with File().opened(tmp_path) as bench:  # root may, but says so
        assert await bench.read(part(0, 100)) == [contents(part(0, 100))]
    assert "belongs to user 1234" in caplog.text
    os.chown(tmp_path / "kv", 0, -1)
    # a description that was slipped in while the directory was open to all
    with pytest.raises(BackendError, match="another user"):
        async with File().opened(tmp_path):
            pass


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize("version", [0, 2, "1"])
async def test_d6_other_versions_are_left_alone(version: object, tmp_path: Path) -> None:
    async with File().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
    block = tmp_path / "kv" / "tierkv.json"
    good = block.read_text()
    block.write_text(json.dumps(json.loads(good) | {"version": version}))
    before = {p: p.read_bytes() for p in everything(tmp_path)}
    with pytest.raises(BackendError, match="format version"):
        async with File().opened(tmp_path):
            pass
    assert {p: p.read_bytes() for p in everything(tmp_path)} == before
    block.write_text(good)
    async with File().opened(tmp_path) as bench:
        assert await bench.read(part(0, 5000)) == [contents(part(0, 5000))]


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[1]", "\0", "[" * 4096, '{"format": "tierkv-nvme", "version": 1}'),
        '{"format": "tierkv-file", "version": 1}',
        '{"format": "tierkv-file", "version": 1, "salt": 1.5, "bits": 1}',
        '{"format": "tierkv-file", "version": 1, "salt": 1, "bits": 60}',
        '{"format": "tierkv-file", "version": 1, "salt": 1, "bits": 1, "owner": "me"}',
    ],
)
async def test_damaged_superblocks_are_refused(text: str, tmp_path: Path) -> None:
    async with File().opened(tmp_path):
        pass
    (tmp_path / "kv" / "tierkv.json").write_text(text)
    with pytest.raises(BackendError, match="cannot be read"):
        async with File().opened(tmp_path):
            pass


@pytest.mark.usefixtures("no_fd_leaks")
async def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    stored = part(0, 5000)
    async with File().opened(tmp_path) as bench:
        await bench.write(stored)
        (path,) = frames(tmp_path)
        path.unlink()
        path.symlink_to(precious)
        (result,) = await bench.read(stored)
        assert not isinstance(result, bytes)
    async with File().opened(tmp_path) as bench:
        assert list(bench.found) == []
        assert bench.backend.stats().details["foreign"] == 1
    (tmp_path / "kv" / "tierkv.json").unlink()
    (tmp_path / "kv" / "tierkv.json").symlink_to(precious)
    with pytest.raises(BackendError, match="cannot use"):
        async with File().opened(tmp_path):
            pass
    assert precious.read_text() == "years of work"


async def test_s2_names_are_hashes_only(tmp_path: Path) -> None:
    tenants = ["../../etc/passwd\0\n", "x" * 10_000, "grün", "", "\ud800"]
    parts = [part(i, 3000 + i, tenant=tenant) for i, tenant in enumerate(tenants)]
    async with File().opened(tmp_path) as bench:
        assert await bench.write(*parts) == [OK] * len(parts)
    assert os.listdir(tmp_path) == ["kv"]
    names = "".join(p.name for p in frames(tmp_path))
    assert set(names) <= set("0123456789abcdef-")
    assert not any(p.part[:8].hex() in names for p in parts), "a key can be read off a name"
    async with File().opened(tmp_path) as bench:
        assert sorted(bench.found, key=lambda p: p.nbytes) == parts


async def test_unusable_paths_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(BackendError, match="cannot make or open the directory"):
        async with File().opened(tmp_path):
            pass
    with pytest.raises(ConfigError, match="needs a path"):
        FileBackend(Tier("file", "1MiB"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "often"}, "sync must be one of"),
        ({"threads": 0}, "threads must be a number"),
        ({"threads": "many"}, "threads must be a number"),
        ({"thread": 3}, "did you mean 'threads'"),
    ],
)
async def test_u2_options_are_strict(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        File(**options).make(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match="too small"):
        File().make(tmp_path, 64 << 10)
    assert File(threads="8", sync="none").make(tmp_path, 1 << 20).stats().mode == "closed"


@pytest.mark.usefixtures("no_fd_leaks", "no_thread_leaks")
async def test_cancelled_open_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    entered, inside = threading.Event(), Root._probe

    def slowly(root: Root) -> float:
        entered.set()
        time.sleep(0.1)  # the cancellation comes while the thread opens the root
        return inside(root)

    monkeypatch.setattr(Root, "_probe", slowly)
    workers = Workers()
    await workers.start()
    opened = workers.spawn(File().make(tmp_path, 1 << 20).open, workers)
    while not entered.is_set():  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(0.001)
    await workers.aclose()
    assert opened.done()


async def test_use_outside_its_life_is_refused(tmp_path: Path) -> None:
    backend = File().make(tmp_path, 1 << 20)
    with pytest.raises(ClosedError, match="not open"):
        await backend.flush()
    async with File().opened(tmp_path) as bench:
        assert isinstance(bench.backend, FileBackend)
        with pytest.raises(BackendError, match="open already"):
            await bench.backend.open(bench.workers)
        bench.backend._pid += 1
        with pytest.raises(BackendError, match="after the fork"):
            await bench.write(part(0, 100))
        bench.backend._pid -= 1


class TestLeftovers:
    """Temporary files: a dead writer's go, a live one's stay."""

    def unfinished(self, monkeypatch: pytest.MonkeyPatch, **facts: Any) -> str:
        mine = Unfinished()
        for name, value in facts.items():
            monkeypatch.setattr(mine, name, value)
        return mine.name()

    def leave(self, root: Path, name: str, age: float = 0.0) -> list[Path]:
        """A file of that name in the root, and one beside a frame."""
        made = [root / "kv" / name, frames(root)[0].parent / name]
        for path in made:
            path.write_bytes(b"half a frame")
            when = time.time() - age
            os.utime(path, (when, when))
        return made

    @pytest.mark.parametrize(
        ("facts", "age", "goes"),
        [
            ({}, 0.0, False),  # this process may be writing it in another engine
            ({"_pid": 2**22 + 5}, 0.0, True),  # no such process: beyond what Linux numbers
            ({"_pid": 1}, 0.0, False),
            ({"_host": "0123456789abcdef", "_pid": 2**22 + 5}, 0.0, False),
            ({"_host": "0123456789abcdef"}, 4000.0, True),
        ],
    )
    async def test_f033_whose_they_are(
        self,
        facts: dict[str, Any],
        age: float,
        goes: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        async with File().opened(tmp_path) as bench:
            await bench.write(part(0, 5000))
        made = self.leave(tmp_path, self.unfinished(monkeypatch, **facts), age)
        async with File().opened(tmp_path) as bench:
            assert list(bench.found) == [part(0, 5000)]
            assert bench.backend.stats().details["leftovers"] == (2 if goes else 0)
            assert bench.backend.stats().details["foreign"] == 0
        assert [path.exists() for path in made] == [not goes] * 2

    async def test_strange_files_are_left_alone_and_counted(self, tmp_path: Path) -> None:
        async with File().opened(tmp_path) as bench:
            await bench.write(part(0, 5000))
        strange = frames(tmp_path)[0].parent / ".nfs000000000001"
        strange.write_bytes(bytes(9000))
        (tmp_path / "kv" / "notes.txt").write_bytes(bytes(5000))
        async with File().opened(tmp_path) as bench:
            stats = bench.backend.stats()
            assert stats.details["foreign"] == 1
            assert stats.disk_bytes == disk_usage(tmp_path / "kv")
        assert strange.exists()


@pytest.mark.parametrize("capacity", ["128KiB", "1MiB", "64MiB", "8GiB", "16TiB"])
async def test_k9_directories_take_their_share(capacity: str) -> None:
    tier = Tier("file", capacity, path="/nowhere")
    bits = bits_for(tier.capacity_bytes)
    assert 0 <= bits <= 6
    assert bits == 0 or (2**bits + 4**bits) * 4096 <= tier.capacity_bytes // 64
    usable = FileBackend(tier).stats().details["usable_bytes"]
    assert 0.7 * tier.capacity_bytes < usable < tier.capacity_bytes
