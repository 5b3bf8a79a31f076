"""Folders of sockets: what killed workers left behind goes, and nothing else does."""

from __future__ import annotations

import fcntl
import os
import socket
from typing import TYPE_CHECKING

import pytest

from tierkv_adapters.remote.leftovers import socket_folder
from tierkv_adapters.remote.listening import listen

if TYPE_CHECKING:
    from pathlib import Path


def _left_behind(folder: Path, name: str = "rank0.sock") -> None:
    """A socket as a killed process leaves it: the file is there, and nobody listens."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(folder / name))


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")  # short: a socket's path has at most 107 bytes


def test_a_new_folder_is_private_and_new(place: Path) -> None:
    one, two = socket_folder(str(place)), socket_folder(str(place))
    assert one != two
    assert os.stat(one).st_mode & 0o777 == 0o700


def test_what_a_killed_worker_left_is_removed(place: Path) -> None:
    _left_behind(place / "tierkv-abcd0123")
    _left_behind(place / "tierkv-abcd0123", "rank1.sock")
    made = socket_folder(str(place))
    assert [str(path) for path in place.iterdir()] == [made]


def test_a_folder_with_a_living_server_stays(place: Path) -> None:
    listening = listen(place / "tierkv-abcd0123" / "rank0.sock")
    _left_behind(place / "tierkv-abcd0123", "rank1.sock")
    try:
        socket_folder(str(place))
        assert sorted(os.listdir(place / "tierkv-abcd0123")) == ["rank0.sock", "rank1.sock"]
    finally:
        listening.close()


def test_what_is_not_such_a_folder_stays(place: Path) -> None:
    _left_behind(place / "tierkv-ranks-abcd0123")  # belongs to an application
    _left_behind(place / "tierkv-abcd0124", "other.sock")
    (place / "tierkv-abcd0125").mkdir()  # empty: somebody is about to listen there
    _left_behind(place / "tierkv-abcd0126")
    (place / "tierkv-abcd0126" / "notes").write_text("mine")
    _left_behind(place / "elsewhere")
    (place / "tierkv-abcd0127").symlink_to(place / "elsewhere")
    before = sorted(os.listdir(place))
    made = os.path.basename(socket_folder(str(place)))
    assert sorted(os.listdir(place)) == sorted([*before, made])
    assert (place / "elsewhere" / "rank0.sock").exists()


def test_a_folder_in_which_a_socket_is_just_made_stays(place: Path) -> None:
    folder = place / "tierkv-abcd0123"
    _left_behind(folder)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)  # bound and not listening yet looks dead
        socket_folder(str(place))
        assert (folder / "rank0.sock").exists()
    finally:
        os.close(opened)
