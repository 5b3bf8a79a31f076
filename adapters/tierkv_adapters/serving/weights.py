"""Digests of model weights, from the files that a serving engine reads.

A serving engine names a model by a path or by an id on a hub, and neither changes when the
weights do. So the files are read, once: digests of files are kept in the user's cache directory
under path, device, inode, size and times of change, and of several ranks that start together one
reads while the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from tierkv.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["cache_root", "file_digest", "files_digest", "weight_files", "weights_digest"]

_CHUNK = 8 << 20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth", "*.npz")


def cache_root() -> Path:
    """Directory for digests: in ``$TIERKV_CACHE_DIR``, else in the XDG cache directory."""
    if given := os.environ.get("TIERKV_CACHE_DIR"):
        return Path(given) / "weights"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tierkv" / "weights"


def weights_digest(model: str | os.PathLike[str], *, code: bool = False) -> str:
    """Digest of the weights at a path.

    Args:
        model: Directory of a model, or one file of weights.
        code: Whether Python files beside the weights are run, and so count, too.

    Raises:
        AttachError: if there are no weights, or a file cannot be read.
    """
    path = Path(model)
    return files_digest(path, weight_files(path, code=code))


def weight_files(path: Path, *, code: bool = False) -> list[Path]:
    """The files whose content decides about the weights, sorted by name.

    Files of all formats count: which of them an engine takes depends on its settings.

    Raises:
        AttachError: if there are none.
    """
    if path.is_file():
        return [path]
    found = [file for kind in _WEIGHTS for file in (*path.glob(kind), *path.glob(f"*/{kind}"))]
    if found:
        extra = path.rglob("*.py") if code else ()
        return sorted({*found, *extra})
    raise AttachError(
        f"there are no weights in {str(path)!r} ({', '.join(_WEIGHTS)}), so KV of another model "
        "could not be told from this one's; name the revision of the weights by hand (setting "
        "'weights', e.g. \"my-model@2026-01-31\")"
    )


def files_digest(base: Path, files: Sequence[Path]) -> str:
    """Digest over the names (relative to ``base``) and contents of files, in hexadecimal.

    Raises:
        AttachError: if a file cannot be read.
    """
    total = hashlib.sha256()
    for file in files:
        name = file.relative_to(base).as_posix() if file != base else ""
        line = f"{name}\0{file_digest(file)}".encode("utf-8", "surrogateescape")
        total.update(len(line).to_bytes(8, "little") + line)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """Digest of one file (xxh3, 128 bits), read at most once while it stays unchanged.

    Raises:
        AttachError: if it cannot be read.
    """
    try:
        path = path.resolve(strict=True)
        stamp = _stamp(path)
        entry = _entry(stamp)
        if known := _known(entry, stamp):
            return known
        with _alone(entry):
            known = _known(entry, stamp)
            digest = known or _read(path)
            if known is None and _stamp(path) == stamp:  # else it changed while it was read
                _remember(entry, stamp, digest)
        return digest
    except OSError as error:
        raise AttachError(
            f"cannot read {str(path)!r} to tell its weights from others: {error}"
        ) from error


def _stamp(path: Path) -> list[str | int]:
    # the time of the inode's change cannot be set back by whoever writes other bytes
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return [str(path), found.st_dev, found.st_ino, found.st_size, *times]


def _read(path: Path) -> str:
    state = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(view[:count])
    return state.hexdigest()


def _entry(stamp: list[str | int]) -> Path | None:
    name = hashlib.sha256(json.dumps(stamp[:3]).encode("utf-8", "surrogateescape")).hexdigest()
    root = cache_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # no home, or it cannot be written: every start reads the weights
        return None
    return root / f"{name[:32]}.json"


def _known(entry: Path | None, stamp: list[str | int]) -> str | None:
    if entry is None:
        return None
    try:
        kept = json.loads(entry.read_text())
        digest = kept["digest"] if kept["stamp"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) and len(digest) == 32 else None


def _remember(entry: Path | None, stamp: list[str | int], digest: str) -> None:
    if entry is None:
        return
    with contextlib.suppress(OSError):  # a full or read-only cache costs time, nothing else
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"stamp": stamp, "digest": digest}, file)
            os.replace(name, entry)
        except OSError:
            os.unlink(name)
            raise


@contextlib.contextmanager
def _alone(entry: Path | None) -> Iterator[None]:
    """Let one process read a file while others that want its digest wait."""
    if entry is None:
        yield
        return
    try:
        handle = os.open(entry.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each reads for itself
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
