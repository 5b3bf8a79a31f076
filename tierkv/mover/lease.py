"""Leases that several readers share: bytes in use stay where they are until the last is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from tierkv.mover.core import Core

__all__ = ["Lease"]


class Lease:
    """A lease on the parts of one lookup. Whoever reads under it does so in a ``with`` block.

    A match may be left while a worker thread still copies out of leased memory for it: the
    lease then ends with that copy, not with the match.
    """

    __slots__ = ("_core", "_handle", "_users")

    def __init__(self, core: Core, handle: int) -> None:
        self._core = core
        self._handle = handle
        self._users = 1

    def __enter__(self) -> Lease:
        self._users += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Stop using it; the owner calls this once, a reader's ``with`` block does it itself."""
        self._users -= 1
        if self._users == 0 and self._handle:
            core = self._core
            core.free(core.decisions.release(self._handle, core.clock()))
