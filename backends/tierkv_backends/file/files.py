"""What is done to files in a root, each in one call of a worker thread."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from typing import TYPE_CHECKING, Final

from tierkv_backends.file.catalog import pages
from tierkv_backends.results import SHORT, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierkv.abc import IoResult
    from tierkv_backends.file.root import Root

__all__ = ["Files", "ShortFileError", "StoppedError", "gone", "real_bytes", "result_of"]

_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})
_BASE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a named pipe holds nobody up
_STEP: Final = 8 << 20  # so soon a thread notices that it shall stop
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BASE


class ShortFileError(OSError):
    """A file has another length than the one that was published."""


class StoppedError(Exception):
    """Nobody wants the file any more."""


class Files:
    """Blocking operations on the files of one root. Thread-safe.

    Args:
        root: The root; all paths are relative to it.
        sync_writes: Whether a write is synced before it is acknowledged.
    """

    def __init__(self, root: Root, *, sync_writes: bool) -> None:
        self._root = root
        self._sync_writes = sync_writes

    def read(
        self,
        path: str,
        size: int,
        offset: int,
        target: memoryview,
        stopped: Callable[[], bool],
    ) -> None:
        """Fill ``target`` with the bytes of a file of ``size`` bytes from ``offset`` on.

        Raises:
            ShortFileError: if it has another length.
            StoppedError: if ``stopped`` meanwhile.
            OSError: of the medium; also if it is a symbolic link.
        """
        if stopped():
            raise StoppedError
        fd = self.open_reader(path, size)
        try:
            done = 0
            while done < len(target):
                if stopped():
                    raise StoppedError
                count = os.preadv(fd, [target[done : done + _STEP]], offset + done)
                if not count:
                    raise ShortFileError(errno.EIO, "the file was cut short")
                done += count
        finally:
            os.close(fd)

    def write(
        self,
        temporary: str,
        path: str,
        views: Sequence[memoryview],
        stopped: Callable[[], bool],
    ) -> tuple[int, dict[str, int]]:
        """Write a file aside, then put it in its place.

        Args:
            temporary: Name to write it under.
            path: Its place.
            views: Its bytes.
            stopped: Whether nobody wants it any more; there is no file then.

        Returns:
            Real bytes of the file, and of each directory above it.

        Raises:
            StoppedError: if ``stopped`` before it was in its place.
            OSError: of the medium; there is no file then.
        """
        if stopped():
            raise StoppedError
        fd = self.open_writer(temporary)
        try:
            with io.FileIO(fd, "wb") as file:
                _fill(fd, views, stopped)
                return self.publish(file, temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the next process to open the root tries again
                self.erase(temporary)
            raise

    def open_reader(self, path: str, size: int) -> int:
        """Open a file of ``size`` bytes for reading.

        Raises:
            ShortFileError: if it has another length.
            OSError: of the medium; also if it is a symbolic link.
        """
        fd = os.open(path, os.O_RDONLY | _BASE, dir_fd=self._root.fd)
        try:
            if os.fstat(fd).st_size != size:
                raise ShortFileError(errno.EIO, "the file has another length than was published")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_writer(self, path: str) -> int:
        """Make a private file, and its directories if need be.

        Raises:
            OSError: of the medium; also if the file is there.
        """
        try:
            return os.open(path, _NEW, 0o600, dir_fd=self._root.fd)
        except FileNotFoundError:
            upper, _, _ = path.partition("/")
            for directory in (upper, os.path.dirname(path)):
                try:
                    os.mkdir(directory, 0o700, dir_fd=self._root.fd)
                except FileExistsError:
                    continue
            return os.open(path, _NEW, 0o600, dir_fd=self._root.fd)

    def publish(self, raw: io.FileIO, temporary: str, path: str) -> tuple[int, dict[str, int]]:
        """Finish a file and put it in its place.

        Args:
            raw: The file, open and written; closed here.
            temporary: Its name.
            path: Its place.

        Returns:
            Real bytes of the file, and of each directory above it.

        Raises:
            OSError: of the medium; the file is then not in its place.
        """
        if self._sync_writes:
            os.fsync(raw.fileno())
        info = os.fstat(raw.fileno())
        raw.close()  # some network file systems say only here that there was no room
        os.replace(temporary, path, src_dir_fd=self._root.fd, dst_dir_fd=self._root.fd)
        try:
            directories = self.measure(path)
            if self._sync_writes:
                self.sync(directories)
        except BaseException:
            self.erase(path)
            raise
        return real_bytes(info), directories

    def measure(self, path: str) -> dict[str, int]:
        """Real bytes of each directory above a file, the root included."""
        upper, _, _ = path.partition("/")
        return {
            directory: _blocks(os.stat(directory, dir_fd=self._root.fd))
            for directory in (os.path.dirname(path), upper, ".")
        }

    def erase(self, path: str) -> bool:
        """Remove a file; whether it is gone now, by whomever.

        Raises:
            OSError: of the medium.
        """
        try:
            os.unlink(path, dir_fd=self._root.fd)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        return True

    def erase_all(self, paths: Iterable[str], results: list[OSError | None]) -> None:
        """Remove files; append to ``results`` None for each, or why not."""
        for path in paths:
            try:
                self.erase(path)
                results.append(None)
            except OSError as error:
                results.append(error)

    def sync(self, paths: Iterable[str]) -> None:
        """Make files or directories survive a crash of the machine; those that are gone may be.

        Raises:
            OSError: if the medium refuses.
        """
        for path in paths:
            try:
                fd = os.open(path, os.O_RDONLY | _BASE, dir_fd=self._root.fd)
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _fill(fd: int, views: Sequence[memoryview], stopped: Callable[[], bool]) -> None:
    """Write ``views`` to a new file, however short the single calls are."""
    rest = [view for view in views if len(view)]
    while True:
        if stopped():
            raise StoppedError
        if not rest:
            return
        first = rest[0]
        whole = len(first) <= _STEP  # the record behind it takes no call of its own then
        done = os.writev(fd, rest[:2]) if whole else os.write(fd, first[:_STEP])
        if not done:
            raise OSError(errno.EIO, "the file accepts no more bytes")
        while rest and done >= len(rest[0]):
            done -= len(rest.pop(0))
        if done:
            rest[0] = rest[0][done:]


def real_bytes(info: os.stat_result) -> int:
    """Bytes that a file takes; a file system that allocates late may not know yet."""
    return max(_blocks(info), pages(info.st_size) if stat.S_ISREG(info.st_mode) else 0)


def result_of(error: OSError) -> IoResult:
    """Result of an item whose I/O raised ``error``."""
    return SHORT if isinstance(error, ShortFileError) else failure(error)


def gone(error: OSError) -> bool:
    """Whether the file is not there (any more)."""
    return error.errno in _GONE


def _blocks(info: os.stat_result) -> int:
    return info.st_blocks * 512
