"""Files that commands write: refused early, put in place whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.outputs import check_output, put, replacing


def test_a_file_is_put_in_place_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    check_output("--csv", path)
    assert not path.exists(), "a check makes nothing"
    put(path, b"one")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    put(path, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_d2_what_breaks_off_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    put(path, b"before")

    def break_off() -> None:
        with replacing(path) as out:
            out.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, target = tmp_path / "link", tmp_path / "real" / "file"
    target.write_bytes(b"before")
    link.symlink_to(target)
    put(link, b"after")
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    assert os.listdir(tmp_path / "real") == ["file"]


def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output("--csv", pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        put(pipe, b"rows")
        assert os.read(reader, 16) == b"rows"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left"):
        put(Path("/dev/full"), b"x")
    assert Path("/dev/full").is_char_device()


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "no" / "a", "there is no directory"),
        (tmp_path / "file" / "a", "there is no directory"),
        (Path("/proc/a.csv"), "cannot be written"),
    ):
        with pytest.raises(ConfigError, match="--csv: .*" + why):
            check_output("--csv", path)
    check_output("--csv", None)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_that_takes_nothing_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied; name another file"):
        check_output("--out", tmp_path / "a")
    tmp_path.chmod(0o700)
