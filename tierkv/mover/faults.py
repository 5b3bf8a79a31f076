"""Failing tiers in the process's log: loud enough to be seen, rare enough to be read."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from tierkv.abc import IoStatus
from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import IoResult

__all__ = ["FaultLog", "passes"]

_log = logging.getLogger("tierkv.mover")
_EVERY_S = 60.0
_PASSING = frozenset(
    {
        errno.EACCES,
        errno.EAGAIN,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EPERM,
        errno.ETIMEDOUT,
    }
)


def passes(error: BaseException | None, *, shared: bool) -> bool:
    """Whether a failed read tells of this process or moment, and nothing of what was to be read.

    Then the copy stays: on a ``shared`` medium others read it well, and would miss it. EIO is what
    such a mount says whose server does not answer; a disk of our own means a bad sector by it.
    """
    if isinstance(error, BackendError):
        return error.retryable
    if not isinstance(error, OSError):
        return False
    return error.errno in _PASSING or (shared and error.errno == errno.EIO)


class FaultLog:
    """Warns of each kind of failure of each tier, once a minute at most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[tuple[str, str, str], float] = {}
        self._unsaid: dict[tuple[str, str, str], int] = {}

    def results(self, tier: str, operation: str, results: Sequence[IoResult]) -> None:
        """Tell of the items of a batch that failed."""
        bad: dict[str, list[IoResult]] = {}
        for result in results:
            # a write is refused with MISSING where a newer frame is there already: no fault
            harmless = operation == "write" and result.status is IoStatus.MISSING
            if result.status is not IoStatus.OK and not harmless:
                bad.setdefault(_kind(result.status.value, result.error), []).append(result)
        for kind, failed in bad.items():
            self._tell(tier, operation, kind, failed[0].error, len(failed))

    def raised(self, tier: str, operation: str, error: BaseException) -> None:
        """Tell of a call that failed as a whole."""
        self._tell(tier, operation, _kind("error", error), error, 1)

    def _tell(
        self, tier: str, operation: str, kind: str, error: BaseException | None, count: int
    ) -> None:
        key = (tier, operation, kind)
        now, last = self._clock(), self._said.get(key)
        if last is not None and now - last < _EVERY_S:
            self._unsaid[key] = self._unsaid.get(key, 0) + count
            return
        self._said[key] = now
        more = self._unsaid.pop(key, 0)
        _log.warning(
            "tier %s: %d %s(s) failed: %s%s",
            tier,
            count,
            operation,
            error if error is not None else kind,
            f" ({more} more since this was last said)" if more else "",
        )


def _kind(status: str, error: BaseException | None) -> str:
    if error is None:
        return status
    number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
    return f"{type(error).__name__} {number}" if number else type(error).__name__
