"""Bit rot in whatever a connector stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["flip_bits", "truncate"]

_EVERY: Final = 16 << 10
_SHARE: Final = 4


def flip_bits(folder: Path) -> int:
    """Flip one bit every 16 KiB in each file that holds KV.

    The bit is a high one of a float's exponent, where floats lie aligned.

    Args:
        folder: What was stored.

    Returns:
        Bits flipped, those in bytes that were zero left out: nothing may ever be stored there.
    """
    flipped = 0
    for path in _files(folder):
        with path.open("r+b") as file:
            for place in range(_EVERY // 2 + 3, path.stat().st_size, _EVERY):
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 0x20]))
                flipped += byte != 0
    return flipped


def truncate(folder: Path) -> int:
    """Cut each such file to half: reads of it fail.

    Args:
        folder: What was stored.

    Returns:
        Files that were cut.
    """
    files = _files(folder)
    for path in files:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
    return len(files)


def _files(folder: Path) -> list[Path]:
    """Files that hold KV: those much smaller than the largest are indexes and settings."""
    sizes = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    return [path for path, size in sizes.items() if size * _SHARE >= max(sizes.values())]
