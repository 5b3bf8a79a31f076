"""The metadata on disk: an append-only journal, cut short by checkpoints.

Files: ``journal-<n>`` (records in the order of their sequence numbers) and ``checkpoint`` (the
live put records at some moment, replaced atomically). Recovery takes, for each part, the record
with the highest sequence number in any of the files, so that it does not matter between which two
steps of a checkpoint the process died. A journal file is preallocated in steps: appending changes
neither its size nor its blocks.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Final

from tierkv_backends.nvme import records
from tierkv_backends.nvme.transfer import list_at, open_at, write_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv.blocks import PartId

__all__ = ["CHECKPOINT", "JOURNAL", "Journal"]

CHECKPOINT: Final = "checkpoint"
JOURNAL: Final = re.compile(r"journal-(\d{12})")
_TEMPORARY: Final = CHECKPOINT + ".tmp"
_CHUNK: Final = 1 << 20


class Journal:
    """Journal and checkpoint of one root. The caller serialises all calls but ``publish``.

    Args:
        root: Descriptor of the root directory.
        salt: Seed of the checksums.
        step: Bytes by which a journal file grows.
    """

    def __init__(self, root: int, salt: int, step: int) -> None:
        self._root = root
        self._salt = salt
        self._step = step
        self._fd = -1
        self._number = 0
        self._end = 0
        self._size = 0
        self._sequence = 0
        self._new_name = False
        self.damaged = 0

    @property
    def used(self) -> int:
        """Bytes of records in the current journal file."""
        return self._end

    @property
    def size(self) -> int:
        """Length of the current journal file."""
        return self._size

    @property
    def number(self) -> int:
        """Number of the current journal file."""
        return self._number

    def next_sequence(self) -> int:
        """Number for the next record; greater than all before, across restarts."""
        self._sequence += 1
        return self._sequence

    def load(self) -> dict[PartId, bytes]:
        """Read checkpoint and journals; return the live put records and open for appending.

        Damaged records are skipped and counted in ``damaged``.

        Raises:
            OSError: if the files cannot be read.
        """
        with contextlib.suppress(FileNotFoundError):  # of a process that died while writing it
            os.unlink(_TEMPORARY, dir_fd=self._root)
        names = sorted(name for name in list_at(self._root) if JOURNAL.fullmatch(name))
        latest: dict[PartId, bytes] = {}
        end = 0
        for name in (CHECKPOINT, *names):
            found, end, damaged = records.scan(self._contents(name), self._salt)
            self.damaged += damaged
            for record in found:
                part = records.part_of(record)
                known = latest.get(part)
                if known is None or records.sequence_of(known) < records.sequence_of(record):
                    latest[part] = record
        if latest:
            self._sequence = max(map(records.sequence_of, latest.values()))
        if names:
            self._number = int(names[-1].split("-")[1])
            self._attach(open_at(self._root, names[-1], os.O_RDWR), end)
            self._new_name = True  # by a process that may have died before it was synced
        else:
            self._start(1)
        return {part: record for part, record in latest.items() if records.is_put(record)}

    def append(self, batch: Sequence[bytes]) -> None:
        """Append records; all of them count, or an error is raised and none of them does.

        Raises:
            OSError: if the file cannot grow or be written.
        """
        data = b"".join(batch)
        need = self._end + len(data)
        if need > self._size:
            size = -(-need // self._step) * self._step
            os.posix_fallocate(self._fd, self._size, size - self._size)
            self._size = size
        try:
            write_all(self._fd, data, self._end)
        except OSError:
            with contextlib.suppress(
                OSError
            ):  # a restart must not find the records that got through
                os.ftruncate(self._fd, self._end)
                self._size = self._end
            raise
        self._end = need

    def sync(self) -> None:
        """Make the records so far survive a crash of the machine."""
        os.fdatasync(self._fd)
        if self._new_name:
            os.fsync(self._root)
            self._new_name = False

    def rotate(self) -> None:
        """Go on in a new file; the old ones are removed by the next :meth:`publish`.

        Raises:
            OSError: if the new file cannot be made; the old one then stays in use.
        """
        os.fdatasync(self._fd)  # a later sync looks at the new file only
        old = self._fd
        self._start(self._number + 1)
        os.close(old)

    def publish(self, live: Iterable[bytes], before: int) -> None:
        """Replace the checkpoint by ``live``, then remove the journals numbered below ``before``.

        Raises:
            OSError: if it cannot be written; the old checkpoint and the journals then stay.
        """
        fd = open_at(self._root, _TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            _write_joined(fd, live)
            os.fsync(fd)
            os.rename(_TEMPORARY, CHECKPOINT, src_dir_fd=self._root, dst_dir_fd=self._root)
        except BaseException:
            os.unlink(_TEMPORARY, dir_fd=self._root)
            raise
        finally:
            os.close(fd)
        os.fsync(self._root)
        for name in sorted(list_at(self._root)):  # oldest first: a delete outlives its put
            match = JOURNAL.fullmatch(name)
            if match is not None and int(match[1]) < before:
                with contextlib.suppress(FileNotFoundError):  # somebody tidied up
                    os.unlink(name, dir_fd=self._root)

    def close(self) -> None:
        """Close the current file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _start(self, number: int) -> None:
        fd = open_at(self._root, _name(number), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(fd, 0, self._step)
        except OSError:
            os.close(fd)
            os.unlink(_name(number), dir_fd=self._root)
            raise
        self._number = number
        self._new_name = True
        self._attach(fd, 0)

    def _attach(self, fd: int, end: int) -> None:
        self._fd = fd
        self._end = end
        self._size = os.fstat(fd).st_size

    def _contents(self, name: str) -> bytes:
        try:
            fd = open_at(self._root, name, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with open(fd, "rb", buffering=0) as file:
            return file.read()


def _name(number: int) -> str:
    return f"journal-{number:012d}"


def _write_joined(fd: int, pieces: Iterable[bytes]) -> None:
    offset = 0
    pending: list[bytes] = []
    size = 0
    for piece in pieces:
        pending.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            write_all(fd, b"".join(pending), offset)
            offset += size
            pending, size = [], 0
    write_all(fd, b"".join(pending), offset)
