"""Lines of a trace file, plain or compressed, each with its number; damage is told, not skipped."""

from __future__ import annotations

import csv
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zstandard

from tierkv.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["first_line", "read_json", "read_lines", "wrong_as"]

_CHUNK: Final = 1 << 20
_BITE: Final = 1 << 10  # compressed bytes undone at once: they make 32 MiB at the very most
_LONGEST: Final = 1 << 28  # a line beyond this is no line of a trace
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_GZIP: Final = b"\x1f\x8b"


def read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Numbers (from 1) and contents of the lines that are not blank, without the line's end.

    Raises:
        TraceError: if the file cannot be read, or its compressed form is damaged or cut off; what
            came before is handed out first.
    """
    number, begun, length = 0, [b""], 0
    for chunk in _chunks(path):
        first, *lines = chunk.split(b"\n")
        begun.append(first)
        length += len(first)
        if length > _LONGEST:
            raise TraceError(path, number + 1, f"a line of more than {_LONGEST} bytes")
        if not lines:
            continue
        last = lines.pop()
        for line in (b"".join(begun), *lines):
            number += 1
            if line.strip():
                yield number, line.removesuffix(b"\r")
        begun, length = [last], len(last)
    rest = b"".join(begun)
    if rest.strip():
        yield number + 1, rest


def first_line(path: str) -> bytes:
    """The first line that is not blank.

    Raises:
        TraceError: if there is none, or the file cannot be read.
    """
    for _, line in read_lines(path):
        return line
    raise TraceError(path, 0, "the file is empty")


def read_json(path: str, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers and contents of the lines of a JSONL file whose lines are objects.

    Args:
        path: The file.
        what: What a line should be, for messages.

    Raises:
        TraceError: if a line is not a JSON object; see also :func:`read_lines`.
    """
    for number, line in read_lines(path):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(path, number, f"not JSON: {error}") from None
        if not isinstance(found, dict):
            raise TraceError(path, number, f"not {what}: {line[:60]!r}")
        yield number, found


class wrong_as:
    """Turns what goes wrong about the fields of a line into an error that names the line.

    ``with wrong_as(path, number, "a Mooncake request"): ...``
    """

    def __init__(self, path: str, number: int, what: str) -> None:
        self._where = (path, number, what)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        path, number, what = self._where
        if isinstance(error, KeyError):
            raise TraceError(path, number, f"not {what}: {error} is missing") from None
        kinds = TypeError | ValueError | AttributeError | OverflowError | RecursionError | csv.Error
        if isinstance(error, kinds) and not isinstance(error, TraceError):
            raise TraceError(path, number, f"not {what}: {error}") from None


def _chunks(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            chunks = iter(lambda: file.read(_CHUNK), b"")
            if magic == _ZSTD:
                yield from _unpack(path, chunks, zstandard.ZstdDecompressor().decompressobj)
            elif magic.startswith(_GZIP):
                yield from _unpack(path, chunks, lambda: zlib.decompressobj(wbits=31))
            else:
                yield from chunks
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror or error}") from error


def _unpack(path: str, chunks: Iterator[bytes], decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Undo compression, frame by frame.

    Stream readers of both libraries would not do: one takes a file that is cut off for one that
    has ended, the other keeps back what came before the damage.
    """
    frame, begun = decoder(), False
    try:
        for bite in _bites(chunks):
            data = bite
            while data:
                begun = True
                out = frame.decompress(data)
                for start in range(0, len(out), _CHUNK):
                    yield out[start : start + _CHUNK]
                data = b""
                if frame.eof:
                    data, frame, begun = frame.unused_data, decoder(), False
    except (zstandard.ZstdError, zlib.error) as error:
        raise TraceError(path, 0, f"the compressed data is damaged: {error}") from error
    if begun:
        raise TraceError(path, 0, "the compressed data is cut off: the end is missing")


def _bites(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Small pieces, so that data made to swell is undone a little at a time."""
    for chunk in chunks:
        for start in range(0, len(chunk), _BITE):
            yield chunk[start : start + _BITE]
