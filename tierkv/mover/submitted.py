"""Work submitted to a device, and its end, which nobody who owns the memory may miss."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from tierkv.device import is_over
from tierkv.device import outlast as wait_out
from tierkv.errors import BackendError, ClosedError, LayoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tierkv.abc import Device, Event, Stream
    from tierkv.errors import TierKVError
    from tierkv.mover.core import Core

__all__ = ["Sent", "absorbed", "outlast", "submitting"]

_log = logging.getLogger("tierkv.mover")

_kept: list[object] = []  # what a device that hangs may touch at any time is never freed

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
        _log.warning("device %s refused a load's work: %r", device.name, error)
        if isinstance(error, BackendError):
            raise  # it says what and where already
        raise BackendError(device.name, f"cannot take work: {error!r}") from error
    finally:
        sent.append((device, device.loads.record()))


async def outlast(core: Core, sent: Sequence[Sent]) -> None:
    """Wait until submitted work is done, come what may: until then the memory is not ours.

    Raises:
        BackendError: if a device fails meanwhile.
        ClosedError: if the engine was closed and has waited long enough: the device hangs.

    Cancellation: re-raised once everything is done, or given up.
    """
    cancelled: asyncio.CancelledError | None = None
    failed: TierKVError | None = None
    for device, event in sent:
        try:
            if not _is_done(event) and not await wait_out(
                device, event, lambda: core.workers.gave_up
            ):
                failed = ClosedError(f"the engine was closed, and device {device.name!r} hangs")
        except asyncio.CancelledError as error:
            cancelled = error
        except BackendError as error:
            _log.warning("device %s failed: %s", device.name, error)
            failed = error
        if core.workers.gave_up and not is_over(event):
            _kept.append((core, device))
    if cancelled is not None:
        raise cancelled
    if failed is not None:
        raise failed


def _is_done(event: Event) -> bool:
    try:
        return event.query()
    except Exception:  # noqa: BLE001 - the wait tells it
        return False


@asynccontextmanager
async def absorbed(core: Core, device: Device, stream: Stream) -> AsyncIterator[None]:
    """Outlast whatever the body submits to a stream, also if the body fails or is cancelled.

    Raises:
        BackendError: if the device fails. What the body raised itself comes first.
        ClosedError: if the engine was closed, and the device hangs.
    """
    try:
        yield
    except BaseException:
        with suppress(BackendError, ClosedError):
            await outlast(core, [(device, stream.record())])
        raise
    await outlast(core, [(device, stream.record())])
