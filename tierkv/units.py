"""Sizes and durations as people write them: ``"8GiB"``, ``"6h"``."""

from __future__ import annotations

import re
import sys
from typing import Final

from tierkv.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes", "parse_duration"]

_BYTES: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS: Final = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: int | str, *, of: str = "") -> int:
    """Read a size: an int of bytes, or a number with a unit; ``GB`` and ``GiB`` differ.

    Text without a unit is a whole number of bytes (environment variables hold only text). ``of``
    is what messages say first: whose size it is.

    >>> parse_bytes("1.5GiB"), parse_bytes("2GB"), parse_bytes(4096), parse_bytes("4096")
    (1610612736, 2000000000, 4096, 4096)

    Raises:
        ConfigError: if the size is negative or the unit unknown.
    """
    what = f"{of}: " if of else ""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{what}a size cannot be negative: {value}")
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match and not match[2] and match[1].isdigit():
        return int(match[1])
    if match is None or match[2].lower() not in _BYTES:
        raise ConfigError(
            f"{what}not a size: {value!r}; write bytes as an int, or e.g. '8GiB', '500MB'"
        )
    return round(float(match[1]) * _BYTES[match[2].lower()])


def parse_duration(value: float | str, *, of: str = "") -> float:
    """Read a duration in seconds: a number of seconds, or a number with a unit.

    ``of`` is what messages say first: whose duration it is.

    >>> parse_duration("150ms"), parse_duration("6h"), parse_duration(2), parse_duration("2")
    (0.15, 21600.0, 2.0, 2.0)

    Raises:
        ConfigError: if the duration is negative, not finite, or the unit unknown.
    """
    what = f"{of}: " if of else ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= sys.float_info.max:
            raise ConfigError(f"{what}a duration must be finite and not negative")
        return float(value)
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _SECONDS:
        raise ConfigError(
            f"{what}not a duration: {value!r}; write seconds, or e.g. '150ms', '6h', '2d'"
        )
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_bytes(nbytes: int) -> str:
    """Write a size for people, in binary units.

    >>> format_bytes(1610612736)
    '1.5 GiB'
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
