"""The decision log of a running engine, on disk."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from io import FileIO

__all__ = ["LogFile"]

_log = logging.getLogger("tierkv")
_LIMIT = 64 * 1024 * 1024
_CHUNK = 64 * 1024


class LogFile:
    """Takes lines on the loop and appends them to a file in a worker thread.

    A log with a gap cannot be replayed: when the disk refuses or does not keep up, recording ends
    there, with an error in the process's log. Each run of an engine appends a log of its own,
    beginning with a header (see :func:`tierkv.decisions.log.runs`); a line that a crash cut off
    is taken away first.
    """

    def __init__(self, path: str) -> None:
        """Open the file for appending; blocks, so use a worker thread.

        Raises:
            ConfigError: if it cannot be opened, or another engine writes to it.
        """
        self._path = path
        self._lines: list[bytes] = []
        self._size = 0
        self._broken = False
        self._writing = self._given_up = False
        try:
            self._file = Path(path).open("ab+", buffering=0)  # noqa: SIM115 - open as long as the engine
        except OSError as error:
            raise ConfigError(
                f"decision_log: cannot write {path!r}: {error.strerror}", setting="decision_log"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _cut_torn_line(self._file)
        except OSError as error:
            self._file.close()
            why = "another engine writes to it; give each its own file"
            if not isinstance(error, BlockingIOError):
                why = error.strerror or str(error)
            raise ConfigError(
                f"decision_log: cannot write {path!r}: {why}", setting="decision_log"
            ) from error

    def __repr__(self) -> str:
        state = "broken off" if self._broken else f"{self._size} bytes to write"
        return f"<LogFile {self._path!r}: {state}>"

    def write(self, line: bytes) -> None:
        """Take one line, newline included; does no I/O."""
        if not self._broken:
            self._lines.append(line)
            self._size += len(line)
            if self._size > _LIMIT:
                self._break(f"{self._size} bytes wait to be written")

    def flush(self) -> None:
        """Append what was taken; blocks, so use a worker thread. One call at a time."""
        lines, self._lines, self._size = self._lines, [], 0
        data = memoryview(b"".join(lines))
        self._writing = True
        try:
            while data and not self._broken:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._break(str(error))
        finally:
            self._writing = False
            if self._given_up:
                self._file.close()

    def close(self) -> None:
        """Flush and close; blocks. Idempotent."""
        if self._writing:  # in a thread that was given up
            self._given_up = True  # who is at it closes the file
            self._break("its disk does not answer")
        elif not self._file.closed:
            self.flush()
            self._file.close()

    def _break(self, why: str) -> None:
        self._broken = True
        self._lines.clear()
        _log.error("decision log %r breaks off here: %s", self._path, why)


def _cut_torn_line(file: FileIO) -> None:
    """Take away what follows the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _CHUNK)
        at = os.pread(file.fileno(), end - start, start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    file.truncate(end)
