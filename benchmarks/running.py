"""A loop of its own for a benchmark, kept between its rounds."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType
    from typing import Self

__all__ = ["OnLoop"]


class OnLoop:
    """Opened with ``with``: :meth:`_open` runs first, and :attr:`stack` is closed at the end.

    Attributes:
        stack: What is open; its contexts belong to the loop.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.stack = AsyncExitStack()

    def __enter__(self) -> Self:
        self.run(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self.stack.aclose())
        self._runner.close()

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end."""
        return self._runner.run(what)

    async def _open(self) -> None:
        """Open engines and sessions on the loop."""
