"""Root directories of tiers on disk: whose a directory is, and what it says about itself.

Shared by all tiers that keep files: each adds what is its own (a lock, or many owners at once).
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tierkv.errors import BackendError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Collection, Mapping

__all__ = ["SUPERBLOCK", "make_private", "open_directory", "read_superblock", "refuse_others"]

_T = TypeVar("_T")
SUPERBLOCK: Final = "tierkv.json"
_MOST: Final = 4096
# a named pipe in place of a file must not hold anybody up
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_directory(tier: str, path: str) -> int:
    """Open a directory, made with mode 0700 if it is not there. Blocks.

    Raises:
        BackendError: if it can be neither made nor opened.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BackendError(tier, f"cannot make or open the directory {path!r}: {error}") from error


def refuse_others(tier: str, path: str, fd: int, names: Collection[str]) -> None:
    """Refuse a directory that is not a tier's own, or into which others could have put things.

    A frame's checksums tell damage from data, not a friend's data from a foe's: what is in a
    directory that others can write is not to be trusted. Changes nothing.

    Args:
        tier: Name of the tier, for errors.
        path: The directory.
        fd: Its descriptor.
        names: What is in it, apart from what a process that died while making it may leave.

    Raises:
        BackendError: if it holds files but no root, or belongs to another user, or is used and
            writable by others.
    """
    info, own = os.fstat(fd), os.geteuid()
    if own and info.st_uid != own:
        raise BackendError(
            tier, f"{path!r} belongs to user {info.st_uid}; give it a directory of your own"
        )
    if names and SUPERBLOCK not in names:
        raise BackendError(
            tier,
            f"{path!r} holds files that are not tierkv's ({sorted(names)[0]!r}, ...); give it a "
            "directory of its own",
        )
    if names and info.st_mode & 0o022:
        raise BackendError(
            tier,
            f"other users can write into {path!r}, so its files cannot be trusted; use another "
            "directory, or make it private (chmod 700) if you trust what is in it",
        )


def make_private(tier: str, path: str, fd: int, log: logging.Logger) -> None:
    """Take everybody else's rights to a directory; say so if it is another user's at all.

    Raises:
        OSError: if that is not allowed.
    """
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        log.warning("tier %r: %r belongs to user %d", tier, path, info.st_uid)
    if info.st_mode & 0o077:
        os.fchmod(fd, 0o700)


def read_superblock(
    tier: str,
    path: str,
    fd: int,
    make: Callable[..., _T],
    known: Mapping[str, Any],
    ranges: Mapping[str, range],
) -> _T | None:
    """What a root says about itself; None if it is not made yet.

    Args:
        tier: Name of the tier, for errors.
        path: The directory.
        fd: Its descriptor.
        make: Makes the result of the fields by name; raises TypeError for others.
        known: ``format`` and ``version`` that this program reads.
        ranges: What the other fields, all numbers, may be.

    Raises:
        BackendError: if it is damaged, of another version, or another user's than the directory.
        OSError: if it cannot be opened, as a symbolic link cannot.
    """
    try:
        file = os.open(SUPERBLOCK, _FLAGS, dir_fd=fd)
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        owner = os.fstat(file).st_uid
        text = opened.read(_MOST)
    if owner != os.fstat(fd).st_uid:
        raise BackendError(
            tier,
            f"{path}/{SUPERBLOCK} belongs to another user ({owner}) than its directory; use "
            "another directory",
        )
    try:
        values = json.loads(text)
        if values.get("format") != known["format"]:
            raise ValueError(f"format is {values.get('format')!r}, not {known['format']!r}")
        if values.get("version") != known["version"]:
            raise BackendError(
                tier,
                f"{path!r} has format version {values.get('version')!r}, this program reads "
                f"{known['version']}; use another directory, or remove this one yourself",
            )
        block = make(**values)
        for name, allowed in ranges.items():
            if type(values[name]) is not int or values[name] not in allowed:
                raise ValueError(f"{name} is {values[name]!r}")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise BackendError(
            tier,
            f"{path}/{SUPERBLOCK} cannot be read ({error}); the directory is left as it is: use "
            "another one, or remove it yourself",
        ) from error
    return block
