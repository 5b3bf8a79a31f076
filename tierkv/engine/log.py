"""The decision log of a running engine, on disk."""

from __future__ import annotations

import logging
from pathlib import Path

from tierkv.errors import ConfigError

__all__ = ["LogFile"]

_log = logging.getLogger("tierkv")
_LIMIT = 64 * 1024 * 1024


class LogFile:
    """Takes lines on the loop and appends them to a file in a worker thread.

    A log with a gap cannot be replayed: when the disk refuses or does not keep up, recording ends
    there, with an error in the process's log.
    """

    def __init__(self, path: str) -> None:
        """Open the file for appending; blocks, so use a worker thread.

        Raises:
            ConfigError: if it cannot be opened.
        """
        self._path = path
        self._lines: list[bytes] = []
        self._size = 0
        self._broken = False
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - open as long as the engine
        except OSError as error:
            raise ConfigError(
                f"decision_log: cannot write {path!r}: {error.strerror}", setting="decision_log"
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
        try:
            while data and not self._broken:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._break(str(error))

    def close(self) -> None:
        """Flush and close; blocks. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _break(self, why: str) -> None:
        self._broken = True
        self._lines.clear()
        _log.error("decision log %r breaks off here: %s", self._path, why)
