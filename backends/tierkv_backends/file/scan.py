"""What a directory holds when it is opened: publications, damage, and what dead writers left."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv_backends.file.catalog import Entry
from tierkv_backends.file.files import real_bytes
from tierkv_backends.file.records import MAX_RECORD, MIN_RECORD, Naming, decode, record_bytes
from tierkv_backends.file.root import DAMAGED

if TYPE_CHECKING:
    from tierkv.abc import StoredPart
    from tierkv_backends.file.root import Root

__all__ = ["Found", "Scan", "clean", "keep_damaged", "scan"]

_TAIL: Final = 512
_KEEP_DAMAGED: Final = 16
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Found(NamedTuple):
    """A publication that is whole."""

    stored: StoredPart
    entry: Entry
    path: str
    modified: float


@dataclass(slots=True)
class Scan:
    """What one branch of the tree holds.

    Attributes:
        found: Whole publications.
        damaged: Paths and real bytes of files that only look like one.
        sizes: Real bytes of directories, and of files that nobody will delete, by path.
        leftovers: Unfinished files of dead writers, removed.
        foreign: Files that are none of ours, or cannot be read; left alone.
    """

    found: list[Found] = field(default_factory=list)
    damaged: list[tuple[str, int]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    leftovers: int = 0
    foreign: int = 0


def scan(root: Root, naming: Naming, upper: str) -> Scan:
    """Look through one directory of the upper level. Blocks.

    Raises:
        OSError: if a directory cannot be read.
    """
    result = Scan()
    for lower in sorted(_list(root.fd, upper, result)):
        directory = f"{upper}/{lower}"
        try:
            names = _list(root.fd, directory, result)
        except NotADirectoryError:
            result.foreign += 1
            continue
        for name in names:
            # somebody else deletes or finishes files meanwhile
            with contextlib.suppress(FileNotFoundError):
                _look(root, naming, f"{directory}/{name}", result)
    return result


def clean(root: Root) -> Scan:
    """Remove what dead writers left in the root itself, and measure its own files. Blocks.

    Raises:
        OSError: if the directory cannot be read.
    """
    result = Scan()
    for name in _list(root.fd, ".", result):
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=root.fd, follow_symlinks=False)
            if root.unfinished.abandoned(name, root.now - info.st_mtime):
                os.unlink(name, dir_fd=root.fd)
                result.leftovers += 1
            elif stat.S_ISREG(info.st_mode) and not root.unfinished.matches(name):
                result.sizes[name] = real_bytes(info)
    return result


def keep_damaged(
    root: Root, damaged: list[tuple[str, int]], budget: int
) -> tuple[dict[str, int], int]:
    """Move damaged files aside, for people to look at; beyond a bound they are removed. Blocks.

    Args:
        root: The root.
        damaged: Paths and real bytes.
        budget: Real bytes that the quarantine may take.

    Returns:
        Real bytes of what is in quarantine now, by path, and how many files were removed.

    Raises:
        OSError: if the medium refuses.
    """
    with contextlib.suppress(FileExistsError):
        if damaged:
            os.mkdir(DAMAGED, 0o700, dir_fd=root.fd)
    kept = Scan()
    names = _list(root.fd, DAMAGED, kept)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            path = f"{DAMAGED}/{name}"
            info = os.stat(path, dir_fd=root.fd, follow_symlinks=False)
            kept.sizes[path] = real_bytes(info)
    used, count, removed = sum(kept.sizes.values()), len(names), 0
    for path, nbytes in damaged:
        with contextlib.suppress(FileNotFoundError):
            if count >= _KEEP_DAMAGED or used + nbytes > budget:
                os.unlink(path, dir_fd=root.fd)
                removed += 1
                continue
            aside = f"{DAMAGED}/{os.path.basename(path)}"
            os.replace(path, aside, src_dir_fd=root.fd, dst_dir_fd=root.fd)
            kept.sizes[aside] = nbytes
            used, count = used + nbytes, count + 1
    return kept.sizes, removed


def _look(root: Root, naming: Naming, path: str, result: Scan) -> None:
    name = os.path.basename(path)
    parsed = naming.parse(name)
    info = os.stat(path, dir_fd=root.fd, follow_symlinks=False)
    if root.unfinished.abandoned(name, root.now - info.st_mtime):
        os.unlink(path, dir_fd=root.fd)
        result.leftovers += 1
        return
    if parsed is None or not stat.S_ISREG(info.st_mode):
        if not root.unfinished.matches(name):  # a live writer's is none of our business
            result.foreign += 1
            result.sizes[path] = real_bytes(info)
        return
    try:
        stored, size = _read_record(root, path)
    except FileNotFoundError:
        raise
    except OSError:  # not ours to read, or the medium fails: it may be whole for somebody else
        result.foreign += 1
        result.sizes[path] = real_bytes(info)
        return
    disk = real_bytes(info)
    if (
        stored is None
        or parsed.generation != stored.generation
        or path != naming.path(stored.part, stored.generation, parsed.nonce)
    ):
        result.damaged.append((path, disk))
        return
    entry = Entry(stored.generation, stored.nbytes, size, disk, parsed.nonce)
    result.found.append(Found(stored, entry, path, info.st_mtime))


def _read_record(root: Root, path: str) -> tuple[StoredPart | None, int]:
    """The part that a file says it holds, or None, and the file's length."""
    fd = os.open(path, _FILE, dir_fd=root.fd)
    try:
        size = os.fstat(fd).st_size
        tail = os.pread(fd, _TAIL, max(0, size - _TAIL))
        length = record_bytes(tail)
        if not MIN_RECORD <= length <= min(size, MAX_RECORD):
            return None, size
        if length > len(tail):
            tail = os.pread(fd, length, size - length)
        stored = decode(tail[-length:], root.superblock.salt)
        whole = stored is not None and stored.nbytes + length == size
        return (stored if whole else None), size
    finally:
        os.close(fd)


def _list(root: int, directory: str, result: Scan) -> list[str]:
    """Names in a directory, which is measured; none if it is not there. Never follows a link."""
    try:
        fd = os.open(directory, _DIRECTORY, dir_fd=root)
    except FileNotFoundError:
        return []
    try:
        result.sizes[directory] = os.fstat(fd).st_blocks * 512
        return os.listdir(fd)
    finally:
        os.close(fd)
