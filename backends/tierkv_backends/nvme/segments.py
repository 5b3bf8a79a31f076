"""Segment files: one flat address space of 4 KiB pages, made real and given back piece by piece.

Page ``n`` lies in file ``segment-<n // segment_pages>``. A page is *backed* once blocks were
allocated for it: it can no longer run into "no space left". The first write into fresh blocks
costs more than a rewrite (measured here: 0.75 of its speed; zeros and then a rewrite: 0.5), so that
pages are recycled and zeros are written ahead only where a large piece is cut up later. Pages are
given back by punching holes, files that hold no page any more are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.buffers import Arena
from tierkv.extents import Extent
from tierkv_backends.nvme.transfer import PAGE, Piece, list_at, move, open_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Place", "Segments", "number_of"]

_NAME: Final = re.compile(r"segment-(\d{5,})")
_ZEROS: Final = 1 << 20
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


class Place(NamedTuple):
    """Adjacent bytes of one segment file.

    Attributes:
        segment: Number of the segment.
        fd: Its descriptor.
        offset: First byte in the file.
        length: Bytes.
    """

    segment: int
    fd: int
    offset: int
    length: int


class Segments:
    """The segment files of one root. The caller serialises :meth:`back` and :meth:`punch`.

    Args:
        root: Descriptor of the root directory.
        segment_pages: Pages of a file.
        direct: Whether to open the files with O_DIRECT.

    Attributes:
        segment_pages: Pages of a file.
        removed: Called with the number of a segment whose file was removed.

    Raises:
        OSError: if an existing file cannot be opened.
    """

    def __init__(self, root: int, segment_pages: int, *, direct: bool) -> None:
        self._root = root
        self.segment_pages = segment_pages
        self._flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._fds: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._files_lock = threading.Lock()  # a file is not closed while somebody looks at it
        self._sync_lock = threading.Lock()
        self._new_names = False
        self.removed: Callable[[int], None] | None = None
        zeros = Arena(_ZEROS).allocate(_ZEROS)
        assert zeros is not None
        self._zeros = zeros.memory
        try:
            for name in list_at(root):
                index = number_of(name)
                if index is not None:
                    self._fds[index] = open_at(root, name, self._flags)
        except BaseException:
            self.close()
            raise
        # what a process wrote that died since may be in the page cache only: the next sync counts
        self._dirty.update(self._fds)
        self._new_names = bool(self._fds)

    def __len__(self) -> int:
        return len(self._fds)

    def indices(self) -> list[int]:
        """Numbers of the segment files that are there."""
        return sorted(self._fds)

    @property
    def end(self) -> int:
        """First page behind the last segment file."""
        return (max(self._fds) + 1) * self.segment_pages if self._fds else 0

    def disk_bytes(self) -> int:
        """Real bytes of all segment files."""
        with self._files_lock:
            return sum(os.fstat(fd).st_blocks for fd in self._fds.values()) * 512

    def present(self) -> list[Extent]:
        """Pages inside the files, whether backed or holes, by address."""
        found = []
        for index in sorted(self._fds):
            pages = min(os.fstat(self._fds[index]).st_size // PAGE, self.segment_pages)
            if pages:
                found.append(Extent(index * self.segment_pages, pages))
        return found

    def backed(self) -> list[Extent]:
        """Pages that hold data as far as the file system tells, by address."""
        found = []
        for extent in self.present():
            fd = self._fds[extent.start // self.segment_pages]
            at, end = 0, extent.pages * PAGE
            while at < end:
                try:
                    low = os.lseek(fd, at, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # only a hole is left
                        break
                    raise
                high = min(os.lseek(fd, low, os.SEEK_HOLE), end)
                first, last = low // PAGE, -(-high // PAGE)
                if last > first:
                    found.append(Extent(extent.start + first, last - first))
                at = max(high, low + 1)
        return found

    def places(self, extents: Sequence[Extent], offset: int, length: int) -> list[Place]:
        """Where ``length`` bytes lie that start ``offset`` bytes into a frame, in order.

        Raises:
            KeyError: if a segment file is gone.
        """
        made: list[Place] = []
        for extent in extents:
            for part in self.split(extent):
                size = part.pages * PAGE
                if offset >= size:
                    offset -= size
                    continue
                take = min(size - offset, length)
                if take <= 0:
                    return made
                index, page = divmod(part.start, self.segment_pages)
                made.append(Place(index, self._fds[index], page * PAGE + offset, take))
                length -= take
                offset = 0
        return made

    def pieces(
        self, item: int, extents: Sequence[Extent], offset: int, memory: memoryview
    ) -> list[Piece]:
        """Map ``memory``, which starts ``offset`` bytes into a frame, onto files.

        Raises:
            KeyError: if a segment file is gone.
        """
        made: list[Piece] = []
        done = 0
        for place in self.places(extents, offset, len(memory)):
            target = memory[done : done + place.length]
            made.append(Piece(item, place.fd, place.offset, target))
            done += place.length
        return made

    def written(self, extents: Iterable[Extent]) -> None:
        """Note that these pages changed, for :meth:`sync`."""
        changed = {part.start // self.segment_pages for e in extents for part in self.split(e)}
        with self._files_lock:
            self._dirty |= changed

    def sync(self) -> None:
        """Make everything written so far survive a crash of the machine.

        Raises:
            OSError: if the medium refuses; what reached it is then unknown.
        """
        with self._sync_lock:  # who comes second must not return before the first is done
            with self._files_lock:
                dirty, self._dirty = self._dirty, set()
                new_names, self._new_names = self._new_names, False
            try:
                for index in sorted(dirty):
                    self._sync_one(index)
                if new_names:
                    os.fsync(self._root)
            except BaseException:
                with self._files_lock:
                    self._dirty |= dirty
                    self._new_names |= new_names
                raise

    def _sync_one(self, index: int) -> None:
        with self._files_lock:
            fd = self._fds.get(index)
            if fd is None:
                return
            fd = os.dup(fd)  # writers go on, and may even remove the file, while the disk works
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def back(self, extent: Extent, *, zero: bool = True) -> None:
        """Allocate blocks for pages of one segment and, if ``zero``, write them once.

        Raises:
            OSError: if there is no room; nothing is left allocated then.
        """
        index, page = divmod(extent.start, self.segment_pages)
        fd = self._fds.get(index)
        if fd is None:
            name = _name(index)
            fd = open_at(self._root, name, self._flags | os.O_CREAT)
            with self._files_lock:
                self._fds[index] = fd
                self._new_names = True
        offset, length = page * PAGE, extent.pages * PAGE
        try:
            os.posix_fallocate(fd, offset, length)
            while zero and length:
                window = self._zeros[: min(length, _ZEROS)]
                move(fd, [window], offset, writing=True, align=PAGE)
                offset += len(window)
                length -= len(window)
        except OSError:
            with contextlib.suppress(OSError):
                _punch(fd, page * PAGE, extent.pages * PAGE)
            raise
        with self._files_lock:
            self._dirty.add(index)

    def punch(self, extent: Extent) -> None:
        """Give the blocks of pages of one segment back to the file system.

        Raises:
            OSError: if the file system cannot; the pages are as before then.
        """
        index, page = divmod(extent.start, self.segment_pages)
        fd = self._fds[index]
        try:
            _punch(fd, page * PAGE, extent.pages * PAGE)
        except OSError as error:
            at_end = (page + extent.pages) * PAGE >= os.fstat(fd).st_size
            if error.errno != errno.EOPNOTSUPP or not at_end:
                raise
            os.ftruncate(fd, page * PAGE)

    def remove(self, index: int) -> None:
        """Remove a segment file that holds no page any more; one that is not there is fine."""
        with self._files_lock:
            fd = self._fds.pop(index, None)
            if fd is None:
                return
            self._dirty.discard(index)
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_name(index), dir_fd=self._root)
        if self.removed is not None:
            self.removed(index)

    def split(self, extent: Extent) -> Iterator[Extent]:
        """Cut an extent at the borders of segments."""
        start, pages = extent
        while pages:
            size = min(pages, self.segment_pages - start % self.segment_pages)
            yield Extent(start, size)
            start += size
            pages -= size

    def close(self) -> None:
        """Close all files. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def number_of(name: str) -> int | None:
    """Number of the segment whose file has this name; None if it is none of ours."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and name == _name(int(match[1])) else None


def _name(index: int) -> str:
    return f"segment-{index:05d}"


def _load_fallocate() -> ctypes._NamedFuncPointer:
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, "fallocate64", None) or libc.fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int
    return function


_fallocate = _load_fallocate()


def _punch(fd: int, offset: int, length: int) -> None:
    if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"punching a hole: {os.strerror(code)}")
