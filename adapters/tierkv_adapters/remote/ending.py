"""Waiting for whichever end comes first: the engine's, or one's own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.workers import Signal

__all__ = ["first_of"]


async def first_of(*signals: Signal) -> None:
    """Wait until one of these is set. Cancellation: at its await, with nothing left behind."""
    waiter = asyncio.get_running_loop().create_future()
    for signal in signals:
        signal.attach(waiter)
    try:
        await waiter
    finally:
        for signal in signals:
            signal.detach(waiter)
