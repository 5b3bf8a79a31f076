"""Work submitted to a device, and its end, which nobody who owns the memory may miss."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from tierkv.errors import BackendError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import Device, Event

__all__ = ["Sent", "outlast", "submitting"]

_log = logging.getLogger("tierkv.mover")

Sent = tuple["Device", "Event"]
"""Work submitted to a device: done with the event."""


@contextmanager
def submitting(device: Device, sent: list[Sent]) -> Iterator[None]:
    """Work for the stream for loads; ``sent`` gets it even if only half of it went off."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        _log.exception("device %s refused a load's work", device.name)
        raise BackendError(device.name, f"cannot take work: {error!r}") from error
    finally:
        sent.append((device, device.loads.record()))


async def outlast(sent: Sequence[Sent]) -> None:
    """Wait until submitted work is done, come what may: until then the memory is not ours.

    Raises:
        BackendError: if a device fails meanwhile.

    Cancellation: re-raised once everything is done.
    """
    cancelled: asyncio.CancelledError | None = None
    failed: BackendError | None = None
    for device, event in _pending(sent):
        try:
            try:
                await device.wait(event)
            except asyncio.CancelledError as error:
                cancelled = error
                # a cancelled scope cancels at every turn of the loop unless a shield stops it
                with anyio.CancelScope(shield=True):
                    while not event.query():
                        try:
                            await device.wait(event)
                        except asyncio.CancelledError as again:
                            cancelled = again  # a native one: no scope may swallow it
        except Exception as error:  # noqa: BLE001 - a third-party device may raise anything
            _log.exception("device %s failed during a load", device.name)
            failed = BackendError(device.name, f"failed during a load: {error!r}")
            failed.__cause__ = error
    if cancelled is not None:
        raise cancelled
    if failed is not None:
        raise failed


def _pending(sent: Sequence[Sent]) -> Iterator[Sent]:
    for device, event in sent:
        try:
            done = event.query()
        except Exception:  # noqa: BLE001 - the wait tells it
            done = False
        if not done:
            yield device, event
