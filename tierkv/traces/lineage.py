"""Which requests belong to one conversation, where a trace does not say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Lineage"]


class Lineage:
    """Gives a request the session of the deepest block that it shares with an earlier one.

    The first block does not count: it holds what many conversations begin with. A conversation
    that branches keeps one name. Memory grows with the blocks of the trace.
    """

    def __init__(self) -> None:
        self._session_of: dict[int, int] = {}
        self._sessions = 0

    def session(self, keys: Sequence[int]) -> str:
        """Name of the session of the next request, by its blocks."""
        known = self._session_of
        number = -1
        for depth in range(len(keys) - 1, 0, -1):
            number = known.get(keys[depth], -1)
            if number >= 0:
                break
        if number < 0:
            number = self._sessions
            self._sessions += 1
        for key in keys[1:]:
            known[key] = number
        return str(number)
