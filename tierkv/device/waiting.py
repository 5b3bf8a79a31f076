"""Waiting for a device's work, come what may: until its end the memory that it touches is its own.

A cancelled caller must not free or write memory that submitted copies still use, and nothing takes
a submitted copy back. So whoever owns memory waits to the end, and lets the cancellation on its way
afterwards.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import anyio

from tierkv.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import Device, Event

__all__ = ["is_over", "outlast"]

_LOOK_S: Final = 0.25  # how soon a wait without end notices that it was given up


def is_over(event: Event) -> bool:
    """Whether the work before an event touches nothing any more: it is done, or its device failed.

    Whether it was *done* is for :meth:`tierkv.abc.Event.query`. Never raises.
    """
    try:
        return event.query()
    except Exception:  # noqa: BLE001 - a broken device may raise anything
        return True


async def outlast(device: Device, event: Event, given_up: Callable[[], bool] | None = None) -> bool:
    """Wait for an event, come what may.

    Args:
        device: Whose event.
        event: What to wait for.
        given_up: Asked four times a second: whether to believe no more that it will ever be done.
            What the work touches must then be kept for as long as the process lives.

    Returns:
        Whether the work is done; False if it was given up.

    Raises:
        BackendError: if the device failed: it touches nothing any more, and nobody knows what it
            did.

    Cancellation: re-raised once the work is over or given up, also if the device fails meanwhile.
    """
    try:
        return await _wait(device, event, given_up)
    except asyncio.CancelledError as error:
        cancelled = error
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(device.name, f"the device failed: {error!r}") from error
    # a cancelled scope cancels again at every turn of the loop unless a shield stops it
    with anyio.CancelScope(shield=True):
        while not is_over(event) and not (given_up is not None and given_up()):
            try:
                await _wait(device, event, given_up)
            except asyncio.CancelledError as error:
                cancelled = error  # a native one: no scope may swallow it
            except Exception:  # noqa: BLE001 - failed: there is nothing to wait for
                break
    raise cancelled


async def _wait(device: Device, event: Event, given_up: Callable[[], bool] | None) -> bool:
    if given_up is None:
        await device.wait(event)
        return True
    while not given_up():
        with anyio.move_on_after(_LOOK_S):
            await device.wait(event)
            return True
    return event.query()
