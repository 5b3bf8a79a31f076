"""Gathering on a device: copies out of the caller's device memory, and frames that stay there.

Copies are submitted from any thread, at once for a whole batch and device; the loop waits for the
event behind them. Where the tier itself is that device's memory, nothing crosses to the host but
the checksums, which the device computes, and the header pages, which go the other way.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import Move
from tierkv.decisions.types import SkipReason
from tierkv.device import fold_digests, is_over
from tierkv.errors import BackendError, ClosedError
from tierkv.frame import encode_header
from tierkv.mover.steps import never
from tierkv.mover.submitted import outlast
from tierkv.mover.writing import Writing
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tierkv.abc import Buffer, Device, DeviceBuffer, Event, ResidentBackend, StoredPart
    from tierkv.frame import Header
    from tierkv.mover.core import Core
    from tierkv.mover.holding import Reserved

__all__ = [
    "Gather",
    "ResidentWriting",
    "arrived",
    "settled",
    "submit",
    "submit_last",
    "submit_sums",
]


class Gather(NamedTuple):
    """Copies under way on one device.

    Attributes:
        device: The device.
        event: Behind the last of them.
        works: What they fill.
        error: Why they could not be submitted, or not all of them.
    """

    device: Device
    event: Event
    works: Sequence[Writing]
    error: Exception | None = None


def submit(works: Sequence[Writing], gathers: list[Gather], layer: int | None = None) -> None:
    """Submit the copies that fill these frames: one batch of copies a device. From any thread.

    Args:
        works: Those without a device are left alone.
        gathers: Gets what was submitted: also if the caller is cancelled over it.
        layer: Model layer to copy; None copies all and begins what comes behind the copies.

    Raises:
        LayoutError: if a view does not fit; nothing was submitted then.
    """
    import torch

    with torch.inference_mode():
        batches = [
            (device, mine, [move for work in mine for move in work.moves(layer)])
            for device, mine in _by_device(works)
        ]
        for batch in batches:
            _submit(*batch, gathers, begin=layer is None)


def submit_sums(work: Writing, gathers: list[Gather]) -> None:
    """Submit what comes behind the copies, if they were submitted layer by layer."""
    if work.device is not None:
        _submit(work.device, [work], [], gathers, begin=True)


def submit_last(works: Sequence[Writing], gathers: list[Gather]) -> None:
    """Submit what has to be copied once the frames are built. From any thread."""
    import torch

    with torch.inference_mode():
        batches = [
            (device, mine, [move for work in mine for move in work.last_moves()])
            for device, mine in _by_device(works)
        ]
        for batch in batches:
            if batch[2]:
                _submit(*batch, gathers, begin=False)


def _by_device(works: Sequence[Writing]) -> list[tuple[Device, list[Writing]]]:
    found: dict[int, tuple[Device, list[Writing]]] = {}
    for work in works:
        device = work.device
        if device is not None:
            found.setdefault(id(device), (device, []))[1].append(work)
    return list(found.values())


def _submit(
    device: Device,
    works: list[Writing],
    moves: list[Move],
    gathers: list[Gather],
    *,
    begin: bool,
) -> None:
    stores, error = device.stores, None
    try:
        for ready in {id(w.plan.ready): w.plan.ready for w in works}.values():
            if ready is not None:
                stores.wait(ready)
        if moves:
            device.copy(moves, stores)
        for work in works if begin else ():
            work.submitted(device)
    except Exception as problem:  # noqa: BLE001 - a device that fails is a store less, no more
        error = problem
    event = stores.record()  # some copies may run even if not all could be submitted
    for work in works:
        work.protect(event)
    gathers.append(Gather(device, event, works, error))


async def arrived(core: Core, gathers: Sequence[Gather]) -> None:
    """Wait for the copies; what a device failed to copy is skipped.

    Cancellation: ends the wait, not the copies; see :func:`settled`.
    """
    for device, event, works, error in gathers:
        failure = error
        try:
            if not event.query():
                await device.wait(event)
        except Exception as problem:  # noqa: BLE001 - see `_submit`
            failure = problem
        if failure is not None:
            for work in works:
                core.faults.raised(work.level.name, "gather", failure)
                work.refuse(SkipReason.FAILED)


async def settled(core: Core, gathers: Sequence[Gather]) -> None:
    """Wait until no copy touches anything any more, come what may.

    A device that failed touches nothing: what became of its copies, :func:`arrived` tells.

    Cancellation: re-raised once they are done.
    """
    cancelled: asyncio.CancelledError | None = None
    for gather in gathers:
        if is_over(gather.event):
            continue
        try:
            with suppress(BackendError, ClosedError):
                await outlast(core, [(gather.device, gather.event)])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class ResidentWriting(Writing):
    """Frames built in the memory of the device that the view is in, too.

    Only for the raw chain. The device copies and sums the sections; the host builds the headers
    from the sums, and the device gets them last.
    """

    def __init__(self, reserved: Reserved, tier: ResidentBackend) -> None:
        super().__init__(reserved)
        self._tier = tier
        self._buffers: dict[int, DeviceBuffer] = {}
        self._pages: dict[int, Buffer] = {}
        self._headers: dict[int, Header] = {}
        self._sums: torch.Tensor | None = None
        self._last: Event | None = None

    @property
    def device(self) -> Device:
        """The device of the tier and of the view."""
        return self._tier.device

    def to_stage(self) -> list[tuple[int, int]]:
        """The header of each part."""
        return [(i, self.pipeline.spans(self.label(i))[0][0]) for i in self.open]

    def take(self, index: int, buffer: Buffer) -> None:
        """Memory for a header."""
        self._pages[index] = buffer

    def allocate(self) -> None:
        """Get device memory; what does not fit is skipped, tail first."""
        for index in self.open:
            if index in self._buffers:
                continue
            buffer = self.roomy(self._tier.allocate, self._sizes[index])
            if buffer is None:
                self.give_up_from(index, SkipReason.FULL)
                break
            self._buffers[index] = buffer

    def moves(self, layer: int | None = None) -> list[Move]:
        """From the view into the frames; paddings become zero: nothing of the last owner stays."""
        import torch

        found: list[Move] = []
        for index in self.open:
            out, new, label = self._buffers[index].tensor, self._batch[index], self.label(index)
            found += self.pipeline.moves(label, self.plan.view, new.start, out, layer)
            for _, low, high in self.pipeline.spans(label, layer):
                if low < high:
                    found.append(Move(out[low:high], torch.zeros(high - low, dtype=torch.uint8)))
        return found

    def submitted(self, device: Device) -> None:
        """Have the sections summed."""
        sections = [
            self._buffers[index].tensor[low:high]
            for index in self.open
            for low, _, high in self.pipeline.spans(self.label(index))
        ]
        self._sums = device.folds(sections, device.stores)

    def protect(self, event: Event) -> None:
        """Memory given back is reused only behind this event."""
        self._last = event

    def fill(self, stopped: Callable[[], bool] = never) -> None:
        """Build the headers, all of them: it takes no time."""
        del stopped
        if self._sums is None:
            return  # nothing is open
        digests = iter(fold_digests(self._sums))
        for index in self.open:
            label = self.label(index)
            spans = self.pipeline.spans(label)
            header = self.pipeline.header(label, [next(digests) for _ in spans], folded=True)
            encode_header(header, self._pages[index].memory)
            self._headers[index] = header
            self.sealed(index, header.frame_bytes, lossless=True)

    def last_moves(self) -> list[Move]:
        """The headers."""
        found = []
        for index in self.open:
            memory = self._pages[index].memory
            page = over(memory, "uint8", (len(memory),))
            found.append(Move(self._buffers[index].tensor[: len(memory)], page))
        return found

    def place(self, index: int, stored: StoredPart) -> SkipReason | None:
        """Publish the frame where it is."""
        buffer, header = self._buffers[index], self._headers[index]
        if self.in_use(index) or not self._tier.adopt(stored, header, buffer):
            return SkipReason.IN_FLIGHT
        del self._buffers[index]
        self.drop(index)
        return None

    def drop(self, index: int) -> None:
        """Give the memory of a part back."""
        buffer, page = self._buffers.pop(index, None), self._pages.pop(index, None)
        if buffer is not None:
            buffer.release(after=self._last)
        if page is not None:
            page.release()
