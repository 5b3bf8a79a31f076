"""The root directory of a tier: ownership, format, and which kind of I/O its file system takes."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Final

from tierkv.buffers import Arena
from tierkv.errors import BackendError, RootLockedError
from tierkv_backends.nvme.transfer import PAGE, open_at, write_all
from tierkv_backends.roots import (
    SUPERBLOCK,
    make_private,
    open_directory,
    read_superblock,
    refuse_others,
)

_log = logging.getLogger("tierkv.nvme")

__all__ = ["LOCK", "Root", "Superblock"]

LOCK: Final = "LOCK"
_FORMAT: Final = "tierkv-nvme"
_VERSION: Final = 1
_KNOWN: Final = {"format": _FORMAT, "version": _VERSION}
_RANGES: Final = {"salt": range(2**64), "segment_pages": range(1, 2**32)}
_PROBE: Final = "probe"
_UNFINISHED: Final = frozenset({LOCK, SUPERBLOCK + ".tmp", _PROBE})
"""What a process that died while making a root may leave behind."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """What never changes about a root.

    Attributes:
        format: Always ``"tierkv-nvme"``.
        version: Format version of everything in the root.
        salt: Random 64-bit number that seeds the checksums of the metadata.
        segment_pages: 4 KiB pages of a segment file.
    """

    format: str
    version: int
    salt: int
    segment_pages: int


class Root:
    """An owned root directory.

    Attributes:
        path: The directory.
        fd: Its descriptor; all files are opened relative to it.
        superblock: Format of the root.
    """

    def __init__(self, tier: str, path: str, segment_pages: int) -> None:
        """Make or take the root.

        Args:
            tier: Name of the tier, for errors.
            path: The directory; made with mode 0700 if it is not there.
            segment_pages: For a new root; an old one keeps its own.

        Raises:
            RootLockedError: if another process (or engine) owns it.
            BackendError: if it is not a directory of ours, of another version, open to others, or
                not usable.
        """
        self.path = path
        self._tier = tier
        self._lock = -1
        self.fd = open_directory(tier, path)
        try:
            refuse_others(tier, path, self.fd, set(os.listdir(self.fd)) - _UNFINISHED)
            self._read_superblock()  # another version is refused before anything is touched
            self._lock = self._take_lock()
            make_private(tier, path, self.fd, _log)
            self.superblock = self._read_superblock() or self._make_superblock(segment_pages)
        except OSError as error:
            self.close()
            raise BackendError(tier, f"cannot use {path!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the root up. Idempotent."""
        if self._lock >= 0:
            # closing alone would leave it to a forked child, which has the descriptor too
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        for fd in (self.fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lock = -1

    def supports_direct(self) -> bool:
        """Whether this file system really takes O_DIRECT, not just the flag.

        Raises:
            OSError: if not even a plain file can be written.
        """
        os.close(open_at(self.fd, _PROBE, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        page = Arena(PAGE).allocate(PAGE)
        assert page is not None
        try:
            fd = open_at(self.fd, _PROBE, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwritev(fd, [page.memory], 0)
                return os.preadv(fd, [page.memory], 0) == PAGE
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
                return False
            raise
        finally:
            os.unlink(_PROBE, dir_fd=self.fd)

    def _take_lock(self) -> int:
        fd = open_at(self.fd, LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise RootLockedError(
                self._tier,
                f"{self.path!r} is in use by process {owner}; close that engine, or give each "
                "worker its own directory with '{worker}' in the path",
            ) from error
        os.ftruncate(fd, 0)
        write_all(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _read_superblock(self) -> Superblock | None:
        return read_superblock(self._tier, self.path, self.fd, Superblock, _KNOWN, _RANGES)

    def _make_superblock(self, segment_pages: int) -> Superblock:
        block = Superblock(_FORMAT, _VERSION, secrets.randbits(64), segment_pages)
        temporary = SUPERBLOCK + ".tmp"
        fd = open_at(self.fd, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, json.dumps(asdict(block)).encode() + b"\n", 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, SUPERBLOCK, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        return block
