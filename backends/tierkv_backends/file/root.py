"""The root directory: whose it is, its format, and the names of unfinished files in it.

Several processes, on several hosts, may use one root at once: nobody owns it, and whatever is
visible in it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
from typing import Any, Final, NamedTuple

from tierkv.errors import BackendError
from tierkv_backends.file.records import Naming
from tierkv_backends.roots import (
    SUPERBLOCK,
    make_private,
    open_directory,
    read_superblock,
    refuse_others,
)

__all__ = ["DAMAGED", "Root", "Superblock", "Unfinished", "bits_for"]

_log = logging.getLogger("tierkv.file")

DAMAGED: Final = "damaged"
_FORMAT: Final = "tierkv-file"
_VERSION: Final = 1
_MAX_BITS: Final = 6
_KNOWN: Final = {"format": _FORMAT, "version": _VERSION}
_RANGES: Final = {"salt": range(2**64), "bits": range(_MAX_BITS + 1)}
_UNFINISHED: Final = re.compile(r"\.unfinished-([0-9a-f]{16})-([0-9]{1,10})-[0-9a-f]{12}")
_ABANDONED_S: Final = 3600.0


class Superblock(NamedTuple):
    """What never changes about a root.

    Attributes:
        format: Always ``"tierkv-file"``.
        version: Format version of everything in the root.
        salt: Random 64-bit number, in all names and checksums.
        bits: Each of the two levels of directories has ``2**bits`` of them.
    """

    format: str
    version: int
    salt: int
    bits: int


class Unfinished:
    """Names of files that are being written, which tell a dead writer's from a live one's."""

    def __init__(self) -> None:
        self._host = _host()
        self._pid = os.getpid()

    def name(self) -> str:
        """A new name of this process."""
        return f".unfinished-{self._host}-{self._pid}-{Naming.nonce().hex()}"

    @staticmethod
    def matches(name: str) -> bool:
        """Whether this is the name of an unfinished file, anybody's."""
        return _UNFINISHED.fullmatch(name) is not None

    def abandoned(self, name: str, age: float) -> bool:
        """Whether nobody will finish it: its writer is dead, or did nothing for an hour.

        Args:
            name: Its name.
            age: Seconds since it was written to, by the file system's own clock.
        """
        found = _UNFINISHED.fullmatch(name)
        if found is None:
            return False
        if age > _ABANDONED_S:
            return True
        return found[1] == self._host and not _alive(int(found[2]))


class Root:
    """An open root directory.

    Attributes:
        path: The directory.
        fd: Its descriptor; all files are named relative to it.
        superblock: Format of the root.
        unfinished: Names for files being written.
        now: Time of the file system when it was opened, in seconds.
    """

    def __init__(self, tier: str, path: str, capacity: int) -> None:
        """Make or enter the root. Blocks.

        Args:
            tier: Name of the tier, for errors.
            path: The directory; made with mode 0700 if it is not there.
            capacity: Decides how many directories a new root has; an old one keeps its own.

        Raises:
            BackendError: if it is not a directory of ours, of another version, open to others, or
                not usable; nothing is then left open, and nothing was changed.
        """
        self.path = path
        self._tier = tier
        self.unfinished = Unfinished()
        self.fd = open_directory(tier, path)
        try:
            names = {n for n in os.listdir(self.fd) if not self.unfinished.matches(n)}
            refuse_others(tier, path, self.fd, names)
            make_private(tier, path, self.fd, _log)
            self.superblock = self._read_superblock() or self._make_superblock(capacity)
            self.now = self._probe()
        except OSError as error:
            self.close()
            raise BackendError(tier, f"cannot use {path!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the directory. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _read_superblock(self) -> Superblock | None:
        return read_superblock(self._tier, self.path, self.fd, Superblock, _KNOWN, _RANGES)

    def _make_superblock(self, capacity: int) -> Superblock:
        """Write it aside and link it into place: of several processes exactly one succeeds.

        Raises:
            OSError: also if the file system has no hard links.
        """
        block = Superblock(_FORMAT, _VERSION, secrets.randbits(64), bits_for(capacity))
        temporary = self.unfinished.name()
        with self._create(temporary) as file:
            file.write(json.dumps(block._asdict()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, SUPERBLOCK, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        finally:
            os.unlink(temporary, dir_fd=self.fd)
        os.fsync(self.fd)
        made = self._read_superblock()
        if made is None:
            raise BackendError(self._tier, f"{self.path}/{SUPERBLOCK} vanished; open it again")
        return made

    def _probe(self) -> float:
        """Find out whether files can be written; the time here, whatever our own clock says."""
        temporary = self.unfinished.name()
        try:
            with self._create(temporary) as file:
                file.write(b"probe")
                file.flush()
                return os.fstat(file.fileno()).st_mtime
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.fd)

    def _create(self, name: str) -> Any:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return open(os.open(name, flags, 0o600, dir_fd=self.fd), "wb")


def bits_for(capacity: int) -> int:
    """As many directories as a capacity has room for: they take at most a 64th of it."""
    fitting = (b for b in range(_MAX_BITS, 0, -1) if (2**b + 4**b) * 4096 <= capacity // 64)
    return next(fitting, 0)


def _host() -> str:
    """Names the set of processes whose numbers mean something here: host, boot and container."""
    facts = [os.uname().nodename]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        facts.append(file.read())
    with contextlib.suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no process number at all
        return True
    return True
