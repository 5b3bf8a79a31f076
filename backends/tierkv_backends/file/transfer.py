"""What one call of a worker thread does: it reads or writes file after file until none is left.

A call costs the loop more than a small file costs the thread, so that the threads of a batch share
a list of jobs. Whoever is cancelled tells them to stop, and waits for the file in hand. Where other
calls wait for a thread, one that has worked for a while stands aside after the file in hand: a read
must not wait for the end of a batch of writes.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv_backends.file.files import StoppedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import StoredPart
    from tierkv.blocks import PartId
    from tierkv_backends.file.catalog import Entry
    from tierkv_backends.file.files import Files
    from tierkv_backends.file.records import Naming
    from tierkv_backends.file.strand import Pool

__all__ = ["Course", "ReadJob", "WriteJob", "read_files", "write_files"]

_WHILE_S: Final = 2e-3


class ReadJob(NamedTuple):
    """Bytes of one file to read.

    Attributes:
        item: Index of the request in its batch.
        part: Which part.
        entry: Its publication.
        offset: First byte.
        target: Memory; undefined unless all of it was read.
    """

    item: int
    part: PartId
    entry: Entry
    offset: int
    target: memoryview


class WriteJob(NamedTuple):
    """One file to write.

    Attributes:
        item: Index of the item in its batch.
        stored: The part.
        nonce: What makes its name its own.
        temporary: Name to write it under, relative to the root.
        path: Its place.
        views: Its bytes.
        size: How many these are.
        charged: Bytes of capacity set aside for it.
        disk: Real bytes set aside for it.
    """

    item: int
    stored: StoredPart
    nonce: bytes
    temporary: str
    path: str
    views: Sequence[memoryview]
    size: int
    charged: int
    disk: int


class Course:
    """What one thread has done of a batch, and whether it shall go on.

    Attributes:
        read: Jobs that ended, and why they failed.
        written: Jobs that ended: the real bytes of the file in its place, or why there is none.
        directories: Real bytes of the directories above the files.
    """

    def __init__(self, pool: Pool) -> None:
        self.read: list[tuple[ReadJob, OSError | None]] = []
        self.written: list[tuple[WriteJob, int | OSError]] = []
        self.directories: dict[str, int] = {}
        self._pool = pool
        self._stop = False
        self._until = 0.0

    def begin(self) -> None:
        """Begin a call of the thread."""
        self._until = time.monotonic() + _WHILE_S

    def stop(self) -> None:
        """Start no other file, and finish the one in hand only if it is in its place already."""
        self._stop = True

    def stopped(self) -> bool:
        """Whether nobody wants the rest: the caller was cancelled, or the tier given up."""
        return self._stop or self._pool.closed

    def stands_aside(self) -> bool:
        """Whether this call has lasted for a while, and others wait for a thread."""
        return self._pool.crowded and time.monotonic() > self._until


def read_files(files: Files, naming: Naming, jobs: Iterator[ReadJob], course: Course) -> bool:
    """Take job after job; several threads may share ``jobs``. Blocks.

    Returns:
        Whether to call again for more.
    """
    course.begin()
    for job in jobs:
        item = job.entry
        path = naming.path(job.part, item.generation, item.nonce)
        try:
            files.read(path, item.size, job.offset, job.target, course.stopped)
        except StoppedError:
            return False
        except OSError as error:
            course.read.append((job, error))
        else:
            course.read.append((job, None))
        if course.stands_aside():
            return True
    return False


def write_files(files: Files, jobs: Iterator[WriteJob], course: Course) -> bool:
    """As :func:`read_files`."""
    course.begin()
    for job in jobs:
        try:
            disk, directories = files.write(job.temporary, job.path, job.views, course.stopped)
        except (OSError, StoppedError) as error:
            with contextlib.suppress(OSError):  # its directories may be new
                course.directories.update(files.measure(job.temporary))
            if isinstance(error, StoppedError):
                return False
            course.written.append((job, error))
        else:
            course.directories.update(directories)
            course.written.append((job, disk))
        if course.stands_aside():
            return True
    return False
