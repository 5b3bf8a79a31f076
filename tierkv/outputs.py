"""Files that commands write: looked at before the work that they are for, put in place whole."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_output", "put", "replacing"]

_MODE = 0o644


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before anything is computed for it.

    Args:
        option: How messages call it, e.g. ``"--csv"``.
        path: The file; None: there is none to check.

    Raises:
        ConfigError: if it has no directory, is one, or cannot be written.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise ConfigError(f"{option}: {str(path)!r} is a directory; name a file")
    place = Path(os.path.realpath(path))
    try:
        if _replaceable(place):  # by a new file, which its directory has to take
            with tempfile.TemporaryFile(dir=place.parent):
                pass
        elif not os.access(place, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        why = f"{str(path)!r} cannot be written: {error.strerror}; name another file"
        raise ConfigError(f"{option}: {why}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one when it is complete; until then that one stays.

    What is no file, such as a terminal or a pipe, is written to as it is; a link stays one.

    Raises:
        OSError: if it cannot be written.
    """
    place = Path(os.path.realpath(path))
    if not _replaceable(place):
        with place.open("wb") as out:
            yield out
        return
    mode = place.stat().st_mode & 0o777 if place.exists() else _MODE
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            os.fchmod(out.fileno(), mode)
        os.replace(name, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def put(path: Path, data: bytes) -> None:
    """Put a file in place as a whole, or leave what was there; see :func:`replacing`.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        with replacing(path) as out:
            out.write(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error


def _replaceable(place: Path) -> bool:
    return place.is_file() or not place.exists()
