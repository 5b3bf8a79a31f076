"""The socket file: who may have it, and what becomes of one that a dead process left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
import weakref
from pathlib import Path
from typing import Final

from tierkv.errors import ConfigError

__all__ = ["Listening", "listen"]

_MOST_PATH: Final = 107  # bytes that the kernel takes
_BACKLOG: Final = 64
_PATIENCE_S: Final = 5.0
_PROBE_S: Final = 2.0
_OPEN: Final[weakref.WeakSet[Listening]] = weakref.WeakSet()


class Listening:
    """A listening socket and the file by which others find it."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.sock = sock
        self.path = path
        _OPEN.add(self)
        self._mark: tuple[int, int, int] | None = _mark(path)

    def close(self) -> None:
        """Stop listening, and remove the file if it is still this one's. Idempotent."""
        self.sock.close()
        with contextlib.suppress(OSError):
            if _mark(self.path) == self._mark:
                self.path.unlink()
        self._mark = None


def _mark(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def listen(path: str | os.PathLike[str]) -> Listening:
    """Listen at a path, for this user alone; blocks for some seconds at most.

    The folder is made if need be. A socket that a process left behind when it died is replaced.

    Raises:
        ConfigError: if the path is too long or taken (by a living server, or by something that is
            no socket), or the folder is not this user's alone.
    """
    where = Path(path).absolute()
    if len(os.fsencode(where)) > _MOST_PATH:
        raise ConfigError(
            f"{where}: a socket's path has at most {_MOST_PATH} bytes; choose a shorter folder"
        )
    folder = _own_folder(where.parent)
    try:
        _one_at_a_time(folder, where.parent)
        _clear_way(where)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(where))
            where.chmod(0o600)  # nobody else comes through the folder meanwhile
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            return Listening(sock, where)
        except OSError as error:
            sock.close()
            raise ConfigError(f"{where}: cannot listen there ({error})") from error
    finally:
        os.close(folder)


def _own_folder(folder: Path) -> int:
    """Open the folder of a socket, once it is sure to be this user's alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{folder}: no folder for a socket ({error})") from error
    found = os.fstat(opened)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(opened)
        raise ConfigError(
            f"{folder}: others may enter the folder of a socket (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}); make one of your own with mode 0700"
        )
    return opened


def _one_at_a_time(folder: int, where: Path) -> None:
    """Wait until no other process is at the point of replacing a socket in this folder."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the folder is closed
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise ConfigError(f"{where}: another process has locked this folder") from error
            time.sleep(0.01)
        else:
            return


def _clear_way(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} exists and is no socket; remove it, or choose another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # whoever made it is gone
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"{path}: cannot tell whether it is in use ({error})") from error
        else:
            raise ConfigError(f"{path} belongs to a server that runs; choose another name")


def _forked() -> None:
    # a child that kept the socket open would make it look alive when this process is dead
    for listening in list(_OPEN):
        listening.sock.close()


os.register_at_fork(after_in_child=_forked)
