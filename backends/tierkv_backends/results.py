"""Results of single requests that all backends report alike."""

from __future__ import annotations

import errno
from typing import Final

from tierkv.abc import IoResult, IoStatus

__all__ = ["FULL", "MISSING", "NO_ROOM", "SHORT", "failure"]

MISSING: Final = IoResult(IoStatus.MISSING)
SHORT: Final = IoResult(IoStatus.SHORT)
FULL: Final = IoResult(IoStatus.FULL)
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers that mean FULL."""


def failure(error: OSError) -> IoResult:
    """Result of an item whose I/O raised ``error``."""
    return IoResult(IoStatus.FULL if error.errno in NO_ROOM else IoStatus.ERROR, error)
