"""The ``nvme`` tier: who owns a root, and what is done to a directory that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import pytest

from tests.backends.nvme_bench import Nvme
from tierkv.abc import OK
from tierkv.errors import BackendError, RootLockedError
from tierkv.testing.bench import contents, part
from tierkv.workers import Workers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def snapshot(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


async def test_two_owners_are_refused(tmp_path: Path) -> None:
    async with Nvme().opened(tmp_path) as bench:
        with pytest.raises(RootLockedError, match=f"in use by process {os.getpid()}") as caught:
            async with Nvme().opened(tmp_path):
                pass
        assert "{worker}" in str(caught.value)
        assert caught.value.tier == "nvme"
        assert await bench.write(part(0, 100)) == [OK]
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.read(part(0, 100)) == [contents(part(0, 100))]


async def test_opening_twice_is_refused(tmp_path: Path) -> None:
    async with Nvme().opened(tmp_path) as bench:
        with pytest.raises(BackendError, match="open already"):
            await bench.backend.open(bench.workers)


@pytest.mark.usefixtures("no_fd_leaks")
async def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    (root / "thesis.tex").write_text("years of work")
    with pytest.raises(BackendError, match="directory of its own"):
        async with Nvme().opened(tmp_path):
            pass
    assert snapshot(root) == {"thesis.tex": b"years of work"}


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize("version", [0, 2, "1"])
async def test_d6_other_versions_are_left_alone(version: object, tmp_path: Path) -> None:
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
    root = tmp_path / "kv"
    block = json.loads((root / "tierkv.json").read_text())
    (root / "tierkv.json").write_text(json.dumps(block | {"version": version}))
    before = snapshot(root)
    with pytest.raises(BackendError, match="format version"):
        async with Nvme().opened(tmp_path):
            pass
    assert snapshot(root) == before
    (root / "tierkv.json").write_text(json.dumps(block))
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.read(part(0, 5000)) == [contents(part(0, 5000))]


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[1]", '{"format": "tierkv-nvme", "version": 1}', "\0", "[" * 4096),
        '{"format": "tierkv-nvme", "version": 1, "salt": 1.5, "segment_pages": 8}',
        '{"format": "tierkv-nvme", "version": 1, "salt": 1, "segment_pages": "8"}',
        '{"format": "tierkv-nvme", "version": 1, "salt": 1, "segment_pages": 1e30}',
    ],
)
async def test_damaged_superblocks_are_refused(text: str, tmp_path: Path) -> None:
    async with Nvme().opened(tmp_path):
        pass
    (tmp_path / "kv" / "tierkv.json").write_text(text)
    with pytest.raises(BackendError, match="cannot be read"):
        async with Nvme().opened(tmp_path):
            pass


async def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
        for number in range(400):  # enough for a checkpoint
            await bench.write(part(1, 64, number + 1))
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "kv").iterdir()}
        assert "checkpoint" in modes
        assert set(modes.values()) == {0o600}
        assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


@pytest.mark.usefixtures("no_fd_leaks")
@pytest.mark.parametrize(
    "name", ["LOCK", "probe", "tierkv.json.tmp", "journal-000000000001", "segment-00000"]
)
async def test_planted_links_are_not_followed(name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    root = tmp_path / "kv"
    if name.startswith(("journal", "segment")):
        async with Nvme().opened(tmp_path) as bench:
            await bench.write(part(0, 5000))
        (root / name).unlink()
    else:
        root.mkdir()
    (root / name).symlink_to(precious)
    with pytest.raises(BackendError, match=r"cannot (use|open)"):
        async with Nvme().opened(tmp_path):
            pass
    assert precious.read_text() == "years of work"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 100))
    os.chown(tmp_path / "kv", 1234, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(BackendError, match="belongs to user 1234"):
        async with Nvme().opened(tmp_path):
            pass
    monkeypatch.undo()
    os.chown(tmp_path / "kv" / "tierkv.json", 1234, -1)
    async with Nvme().opened(tmp_path) as bench:  # root may, but says so
        assert await bench.read(part(0, 100)) == [contents(part(0, 100))]
    assert "belongs to user 1234" in caplog.text


async def test_s3_a_root_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """They may have put frames there, which no checksum tells from ours."""
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 100))
    (tmp_path / "kv").chmod(0o770)
    with pytest.raises(BackendError, match="cannot be trusted"):
        async with Nvme().opened(tmp_path):
            pass
    (tmp_path / "kv").chmod(0o755)  # readable is mended, writable would be too late
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.read(part(0, 100)) == [contents(part(0, 100))]
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["LOCK", "tierkv.json", "journal-000000000001", "checkpoint"])
async def test_planted_pipes_hold_nobody_up(name: str, tmp_path: Path) -> None:
    async with Nvme().opened(tmp_path) as bench:
        await bench.write(part(0, 5000))
    (tmp_path / "kv" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "kv" / name)
    with contextlib.suppress(BackendError):
        async with asyncio.timeout(30), Nvme().opened(tmp_path) as bench:
            await bench.write(part(1, 5000))


async def test_a_forked_child_does_not_keep_the_root(tmp_path: Path) -> None:
    async with Nvme().opened(tmp_path):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            os.close(writer)
            os.read(reader, 1)  # until the parent is done
            os._exit(0)
    try:
        async with Nvme().opened(tmp_path) as bench:
            assert await bench.write(part(0, 100)) == [OK]
    finally:
        os.close(writer)
        os.close(reader)
        await anyio.to_thread.run_sync(os.waitpid, child, 0)


async def test_names_of_parts_and_tenants_are_in_no_file_name(tmp_path: Path) -> None:
    stored = part(0, 5000, tenant="../../etc/passwd\0\n")
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.write(stored) == [OK]
        names = sorted(p.name for p in (tmp_path / "kv").iterdir())
        assert names == ["LOCK", "journal-000000000001", "segment-00000", "tierkv.json"]
    async with Nvme().opened(tmp_path) as bench:
        assert list(bench.found) == [stored]


async def test_a_root_half_made_is_finished(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    for name in ("LOCK", "tierkv.json.tmp", "probe"):
        (root / name).write_bytes(b"")
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.write(part(0, 100)) == [OK]


async def test_unusable_paths_say_so(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(BackendError, match="cannot make or open the directory"):
        async with Nvme().opened(tmp_path):
            pass


@pytest.mark.every_loop
@pytest.mark.usefixtures("no_fd_leaks")
async def test_cancelled_open_gives_the_root_up(tmp_path: Path) -> None:
    import asyncio

    workers = Workers()
    await workers.start()
    backend = Nvme().make(tmp_path, 1 << 20)
    inner, entered = backend._open_store, threading.Event()

    def slowly(made: list[Any]) -> Any:
        entered.set()
        time.sleep(0.1)  # the cancellation comes while the thread opens the root
        return inner(made)

    backend._open_store = slowly  # type: ignore[method-assign]
    opened = workers.spawn(backend.open, workers)
    while not entered.is_set():  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(0.001)
    await workers.aclose()
    assert opened.done()
    async with Nvme().opened(tmp_path) as bench:
        assert await bench.write(part(0, 100)) == [OK]


async def test_a_segment_size_belongs_to_its_root(tmp_path: Path) -> None:
    parts = [part(i, 60_000) for i in range(8)]
    async with Nvme(segment="128KiB").opened(tmp_path) as bench:
        await bench.write(*parts)
    async with Nvme(segment="1MiB").opened(tmp_path) as bench:
        assert await bench.read(*parts) == [contents(p) for p in parts]
        assert await bench.write(part(9, 200_000)) == [OK]
        assert await bench.read(part(9, 200_000)) == [contents(part(9, 200_000))]
