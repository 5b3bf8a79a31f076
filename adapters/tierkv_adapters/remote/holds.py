"""Standing leases that other processes asked for, and whose connection each depends on."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from tierkv.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tierkv.blocking import CacheManager
    from tierkv.prefetch import Hold
    from tierkv_adapters.remote.operations import Fields, Operations

__all__ = ["Holds"]


class Holds:
    """Holds by line: a connection that a client keeps for as long as it wants its holds.

    A client that dies without a word releases nothing by itself; its line ends with it.
    """

    def __init__(self, manager: CacheManager, operations: Operations) -> None:
        self._manager = manager
        self._operations = operations
        self._lines: dict[str, dict[int, Hold]] = {}
        self._numbers = count(1)
        self.table: dict[str, Callable[[Fields], Awaitable[Any]]] = {
            "hold": self._hold,
            "release": self._release,
        }

    def came(self, line: str) -> None:
        """Note that a connection is there, to which holds may be tied."""
        self._lines[line] = {}

    def gone(self, line: str) -> None:
        """Release what is tied to a connection that ended. Idempotent."""
        for hold in self._lines.pop(line, {}).values():
            hold.release()

    def close(self) -> None:
        """Release everything."""
        for line in list(self._lines):
            self.gone(line)

    async def _hold(self, fields: Fields) -> dict[str, Any]:
        line = fields.get("line", str)
        if line not in self._lines:
            raise ClosedError("the connection that would keep this hold is gone")
        hold = await self._manager.engine.hold(
            self._operations.space(fields),
            fields.keys(),
            tenant=fields.get("tenant", str, ""),
            salt=fields.raw("salt") or b"",
            fidelity=fields.get("fidelity", str, "exact"),
            deadline=fields.either("deadline"),
        )
        if (tied := self._lines.get(line)) is None:
            hold.release()
            raise ClosedError("the connection that would keep this hold is gone")
        number = next(self._numbers)
        tied[number] = hold
        parts = [part.hex() for part in hold.parts]
        return {"number": number, "blocks": hold.blocks, "parts": parts}

    async def _release(self, fields: Fields) -> None:
        tied = self._lines.get(fields.get("line", str), {})
        hold = tied.pop(fields.get("number", int), None)
        if hold is not None:
            hold.release()
