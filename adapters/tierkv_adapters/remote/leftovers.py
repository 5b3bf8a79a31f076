"""Folders of sockets that nobody serves any more: a serving engine may kill its workers at its end.

vLLM does so wherever it is given no time to shut down, which is its default.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["socket_folder"]

_PREFIX: Final = "tierkv-"
_MADE: Final = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as mkdtemp names them
_SOCKET: Final = re.compile(r"rank[0-9]+\.sock")
_PROBE_S: Final = 2.0


def socket_folder(within: str | None = None) -> str:
    """Make a private folder for sockets, and remove those of this user whose servers are dead.

    Args:
        within: Where; None takes the system's folder for temporary files.

    Raises:
        OSError: if none can be made.
    """
    place = Path(within or tempfile.gettempdir())
    with contextlib.suppress(OSError):  # tidying up is no reason not to start
        for name in os.listdir(place):
            if _MADE.fullmatch(name):
                _remove_if_dead(place / name)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=place)  # 0700


def _remove_if_dead(folder: Path) -> None:
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(opened).st_uid != os.geteuid():
                return
            # who makes a socket holds this lock until it listens, see `listening`
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sockets = [folder / name for name in os.listdir(folder)]
            if not sockets or not all(_is_dead(path) for path in sockets):
                return  # an empty one may be about to be used
            for path in sockets:
                path.unlink()
            folder.rmdir()
        finally:
            os.close(opened)


def _is_dead(path: Path) -> bool:
    """Whether this is a rank's socket, and nobody listens at it."""
    if not _SOCKET.fullmatch(path.name) or not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
