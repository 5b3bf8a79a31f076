"""Long walks on the loop, cut into slices so that nobody else waits for their end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

__all__ = ["SLICE", "sliced"]

_T = TypeVar("_T")

SLICE = 256
"""Parts (or blocks) handled between two checkpoints."""


async def sliced(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield each item; after every :data:`SLICE` of them, let the loop run.

    Give it a snapshot, or what does not change meanwhile.
    """
    for number, item in enumerate(items, start=1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)
