"""The workload trace of a running engine, on disk."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zstandard

from tierkv.errors import ConfigError
from tierkv.traces.native import MARK, is_compressed
from tierkv.traces.recording import Recorder

if TYPE_CHECKING:
    from io import FileIO

__all__ = ["TraceFile"]

_log = logging.getLogger("tierkv")
_CHUNK: Final = 1 << 20
_ENOUGH: Final = 256  # requests that are worth a frame
_HEAD: Final = 1 << 18  # more than one block of zstd
_BEGIN: Final = b'{"%s"' % MARK.encode()
_PAUSE_S: Final = 5.0  # ... or fewer after so long


class TraceFile:
    """Appends what a :class:`~tierkv.traces.recording.Recorder` heard, in a worker thread.

    Each flush is a compressed frame of its own, so that a crash costs the last few seconds. Each
    run of an engine appends a header of its own; what a crash cut off is taken away first. When
    the disk refuses, recording ends there, with an error in the process's log.

    Attributes:
        recorder: What sessions talk to.
    """

    def __init__(self, path: str, now: float, epoch: float) -> None:
        """Open the file for appending; blocks, so use a worker thread.

        Args:
            path: The file; compressed if its name ends in ``.zst``.
            now: Time on the clock of the engine.
            epoch: The same moment on the wall clock.

        Raises:
            ConfigError: if it cannot be opened, is something else than a trace, or another engine
                writes to it.
        """
        self.recorder = Recorder(secrets.token_bytes(32), now, epoch)
        self._path = path
        self._packed = is_compressed(path)
        self._broken = self._writing = False
        self._flushed = now
        try:
            self._file = Path(path).open("ab+", buffering=0)  # noqa: SIM115 - open as long as the engine
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_ours(self._file, packed=self._packed)
            self._file.truncate(_whole(self._file, packed=self._packed))
        except OSError as error:
            self._file.close()
            why = "another engine writes to it; give each its own file"
            if not isinstance(error, BlockingIOError):
                why = error.strerror or str(error)
            raise self._refused(why) from error

    def __repr__(self) -> str:
        return f"<TraceFile {self._path!r}: {'broken off' if self._broken else self.recorder!r}>"

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"trace: cannot write {self._path!r}: {why}", setting="trace")

    def due(self, now: float) -> bool:
        """Let time pass; whether :meth:`flush` must be called now. On the loop."""
        self.recorder.tick(now)
        if self._broken:
            self.recorder.discard()
        waiting = self.recorder.waiting
        soon = waiting < _ENOUGH and now - self._flushed < _PAUSE_S
        if not waiting or soon or self._writing or self._broken:
            return False
        self._flushed, self._writing = now, True
        return True

    def flush(self) -> None:
        """Append what was heard; blocks, so use a worker thread. One call at a time."""
        try:
            data = self.recorder.lines()
            packed = zstandard.ZstdCompressor().compress(data) if self._packed and data else data
            left = memoryview(packed)
            while left and not self._broken:
                left = left[self._file.write(left) :]
        except (OSError, ValueError) as error:  # a value error: closed meanwhile
            self._broken = True
            _log.error("workload trace %r breaks off here: %s", self._path, error)
        finally:
            self._writing = False

    def close(self) -> None:
        """Flush and close; blocks. Idempotent."""
        if not self._file.closed:
            self.recorder.finish()
            self.flush()
            self._file.close()


def _check_ours(file: FileIO, *, packed: bool) -> None:
    """Refuse to append to, or to cut, what no recorder wrote.

    Raises:
        OSError: if it is no file, or begins as no trace of such a name does.
    """
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    file.seek(0)
    data = file.read(_HEAD)
    try:
        head = zstandard.ZstdDecompressor().decompressobj().decompress(data) if packed else data
    except zstandard.ZstdError:
        head = b"no frame"
    head = head[: len(_BEGIN)]
    if head != _BEGIN[: len(head)]:
        raise OSError(errno.EINVAL, "it holds something else; name another file")


def _whole(file: FileIO, *, packed: bool) -> int:
    """Bytes up to the end of the last whole frame, or line."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    good = position = 0
    frame = zstandard.ZstdDecompressor().decompressobj()
    while data := file.read(_CHUNK):
        if not packed:
            newline = data.rfind(b"\n")
            good = position + newline + 1 if newline >= 0 else good
            position += len(data)
            continue
        position += len(data)
        while data:
            try:
                frame.decompress(data)
            except zstandard.ZstdError:
                return good
            data = b""
            if frame.eof:
                data = frame.unused_data
                good = position - len(data)
                frame = zstandard.ZstdDecompressor().decompressobj()
    return min(good, end)
