"""The root directory of a tier: ownership, format, and which kind of I/O its file system takes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Final

from tierkv.buffers import Arena
from tierkv.errors import BackendError, RootLockedError
from tierkv_backends.nvme.transfer import PAGE, open_at, write_all

_log = logging.getLogger("tierkv.nvme")

__all__ = ["LOCK", "SUPERBLOCK", "Root", "Superblock"]

LOCK: Final = "LOCK"
SUPERBLOCK: Final = "tierkv.json"
_FORMAT: Final = "tierkv-nvme"
_VERSION: Final = 1
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
            BackendError: if it is not a directory of ours, of another version, or not usable.
        """
        self.path = path
        self._tier = tier
        self._lock = -1
        self.fd = self._open_directory()
        try:
            self._refuse_foreign()
            self._check_owner()
            self._read_superblock()  # another version is refused before anything is touched
            self._lock = self._take_lock()
            os.fchmod(self.fd, 0o700)
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

    def _open_directory(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            return os.open(self.path, flags)
        except OSError as error:
            raise BackendError(
                self._tier, f"cannot make or open the directory {self.path!r}: {error}"
            ) from error

    def _refuse_foreign(self) -> None:
        names = set(os.listdir(self.fd))
        if names - _UNFINISHED and SUPERBLOCK not in names:
            raise BackendError(
                self._tier,
                f"{self.path!r} holds files that are not tierkv's ({sorted(names)[0]!r}, ...); "
                "give it a directory of its own",
            )

    def _check_owner(self) -> None:
        info, own = os.fstat(self.fd), os.geteuid()
        if own and info.st_uid != own:
            raise BackendError(
                self._tier,
                f"{self.path!r} belongs to user {info.st_uid}; give it a directory of your own",
            )
        if (info.st_uid != own or info.st_mode & 0o022) and os.listdir(self.fd):
            _log.warning(
                "tier %r: other users could write into %r; it is private from now on",
                self._tier,
                self.path,
            )

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
        try:
            fd = open_at(self.fd, SUPERBLOCK, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            text = file.read(PAGE)
        try:
            return self._parse(json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BackendError(
                self._tier,
                f"{self.path}/{SUPERBLOCK} cannot be read ({error}); the directory is left as it "
                "is: use another one, or remove it yourself",
            ) from error

    def _parse(self, values: Any) -> Superblock:
        if values.get("format") != _FORMAT:
            raise ValueError(f"format is {values.get('format')!r}, not {_FORMAT!r}")
        if values.get("version") != _VERSION:
            raise BackendError(
                self._tier,
                f"{self.path!r} has format version {values.get('version')!r}, this program reads "
                f"{_VERSION}; use another directory, or remove this one yourself",
            )
        block = Superblock(**values)
        for name, low, high in (("salt", 0, 2**64), ("segment_pages", 1, 2**32)):
            value = getattr(block, name)
            if type(value) is not int or not low <= value < high:
                raise ValueError(f"{name} is {value!r}")
        return block

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
