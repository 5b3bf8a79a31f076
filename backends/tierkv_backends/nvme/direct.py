"""Frames between segment files and the memory of a device, through kvikio.

The same catalog and journal as for host memory; only the bytes take another way. Submitting happens
in a worker thread (kvikio moves small pieces at once, in the thread that asks), the end is seen by
a :class:`~tierkv_backends.nvme.reaper.Reaper`. Transfers are cut into pieces of one task each:
of a transfer of several tasks, one that fails says nothing about when the others end.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from tierkv.abc import OK, DirectIo, IoResult, IoStatus, Move
from tierkv.device import outlast
from tierkv.errors import ClosedError
from tierkv_backends.device.pool import keep_for_ever
from tierkv_backends.nvme.gds import DeviceArray
from tierkv_backends.nvme.reaper import Flight, Reaper, Ticket
from tierkv_backends.nvme.transfer import PAGE
from tierkv_backends.nvme.writing import WriteJob, page_bytes
from tierkv_backends.results import NO_ROOM, SHORT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Device, ReadRequest, StoredPart
    from tierkv.extents import Extent
    from tierkv_backends.nvme.gds import Kvikio
    from tierkv_backends.nvme.segments import Place
    from tierkv_backends.nvme.shards import Hops
    from tierkv_backends.nvme.store import Store

__all__ = ["DeviceFiles", "DeviceIo"]

_TASK: Final = 4 << 20
_QUICK_ITEMS: Final = 64
_NO_ROOM: Final = tuple(os.strerror(code) for code in NO_ROOM)


class _Part(NamedTuple):
    """Bytes of one item, adjacent in one file: as few as one task moves."""

    item: int
    place: Place
    memory: torch.Tensor
    wanted: int


class DeviceFiles:
    """kvikio's side of an open root: its files, its reaper, and the devices it reaches.

    Args:
        store: The root.
        kvikio: The library.
        name: Of the tier, for the reaper's thread.

    Raises:
        Unavailable: if kvikio does not work in that directory.
    """

    def __init__(self, store: Store, kvikio: Kvikio, name: str) -> None:
        kvikio.probe(store.directory)
        self.kvikio = kvikio
        self.reaper = Reaper(f"tierkv-{name}-reaper")
        self._files: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._ways: dict[str, DeviceIo | None] = {}
        store.segments.removed = self._forget

    @property
    def active(self) -> bool:
        """Whether any device was found to be within reach."""
        return any(self._ways.values())

    def way(self, device: Device, check: Callable[[], tuple[Store, Hops]]) -> DeviceIo | None:
        """The direct way to a device, or None if the driver does not know its memory."""
        if device.name not in self._ways:
            page = device.allocate(PAGE)
            if page is None:
                return None  # asked again when there is memory
            reached = self.kvikio.reaches(page)
            device.freed(page)
            self._ways[device.name] = DeviceIo(self, device, check) if reached else None
        return self._ways[device.name]

    def file(self, place: Place) -> Any:
        """Kvikio's handle of a segment file that cannot go away meanwhile. Blocks.

        Raises:
            RuntimeError: if kvikio cannot open it.
        """
        with self._lock:
            file = self._files.get(place.segment)
            if file is None:
                file = self._files[place.segment] = self.kvikio.open(place.fd)
            return file

    def close(self) -> None:
        """Close the files and end the reaper. Nothing is in flight any more. Idempotent."""
        self.reaper.close()
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _forget(self, segment: int) -> None:
        with self._lock:
            file = self._files.pop(segment, None)
        if file is not None:
            file.close()


class DeviceIo(DirectIo):
    """See :class:`tierkv.abc.DirectIo`; one per root and device.

    A batch takes two worker hops at most: one to submit, and one to publish what was written.
    """

    def __init__(
        self, files: DeviceFiles, device: Device, check: Callable[[], tuple[Store, Hops]]
    ) -> None:
        self.mode = files.kvikio.mode
        self._files = files
        self._device = device
        self._check = check
        self._zeros = torch.zeros(PAGE, dtype=torch.uint8)

    def __repr__(self) -> str:
        return f"<DeviceIo {self._device.name}: {self.mode}>"

    async def read_device(
        self, requests: Sequence[ReadRequest], into: Sequence[torch.Tensor]
    ) -> list[IoResult]:
        """See :meth:`tierkv.abc.DirectIo.read_device`."""
        _refuse_others(into)
        store, hops = self._check()
        held = store.hold(requests, [tensor.numel() for tensor in into])
        ticket = Ticket(_judge_read)
        try:
            parts = [
                part
                for item, request, extents in held.found
                for part in self._cut(
                    store, item, extents, request.offset, request.length, into[item]
                )
            ]
            with hops.busy():
                if parts:
                    await self._fly(hops, ticket, parts, writing=False)
        finally:
            store.let_go(held)
        for item, result in ticket.failed.items():
            held.results[item] = result
        good = [item for item, result in enumerate(held.results) if result is OK]
        nbytes = sum(requests[item].length for item in good)
        store.add(batches=1, reads=len(good), direct_reads=len(good), direct_bytes=nbytes)
        return held.results

    async def write_device(
        self, items: Sequence[tuple[StoredPart, torch.Tensor]]
    ) -> list[IoResult]:
        """See :meth:`tierkv.abc.DirectIo.write_device`."""
        _refuse_others([tensor for _, tensor in items])
        store, hops = self._check()
        job = WriteJob(len(items))
        try:
            with hops.busy():
                await self._clear_padding(items, hops)
                await self._begin(store, hops, items, job)
                if job.drafts:
                    await self._write(store, hops, items, job)
        finally:
            store.writer.abandon(job)
        good = store.writer.good(job)
        store.add(direct_writes=len(good), direct_bytes=sum(good))
        return job.outcome()

    async def _begin(
        self,
        store: Store,
        hops: Hops,
        items: Sequence[tuple[StoredPart, torch.Tensor]],
        job: WriteJob,
    ) -> None:
        sizes = [
            (stored, tensor.numel() if tensor.numel() >= page_bytes(stored.nbytes) else -1)
            for stored, tensor in items
        ]
        if len(items) > _QUICK_ITEMS or not store.writer.begin(job, sizes, grow=False):
            await hops.run(_grow, store, job, sizes)

    async def _write(
        self,
        store: Store,
        hops: Hops,
        items: Sequence[tuple[StoredPart, torch.Tensor]],
        job: WriteJob,
    ) -> None:
        ticket = Ticket(_judge_write)
        parts = [
            part
            for draft in job.drafts
            for part in self._cut(
                store,
                draft.item,
                draft.extents,
                0,
                page_bytes(draft.stored.nbytes),
                items[draft.item][1],
            )
        ]
        await self._fly(hops, ticket, parts, writing=True)
        await hops.run(_publish, store, job, ticket)

    async def _fly(
        self, hops: Hops, ticket: Ticket, parts: Sequence[_Part], *, writing: bool
    ) -> None:
        try:
            await hops.run(self._submit, ticket, parts, writing)
        finally:
            await ticket.outlast()

    def _submit(self, ticket: Ticket, parts: Sequence[_Part], writing: bool) -> None:
        """Start the transfers and hand them to the reaper, whatever happens. Blocks."""
        try:
            for part in parts:
                if part.item not in ticket.failed:
                    self._start(ticket, part, writing)
        finally:
            self._files.reaper.take(ticket)

    def _start(self, ticket: Ticket, part: _Part, writing: bool) -> None:
        item, place, memory, wanted = part
        size = memory.numel()
        try:
            file = self._files.file(place)
            if not writing:
                end = os.fstat(place.fd).st_size  # kvikio takes a read past it for a failure
                size = min(size, max(0, end - place.offset))
            array = DeviceArray(memory)
            call = file.pwrite if writing else file.pread
            future = call(array, size, place.offset, task_size=max(size, PAGE))
        except (OSError, RuntimeError) as error:
            ticket.failed[item] = _failure(error)
            return
        ticket.flights.append(Flight(item, future, wanted, array, file, place.offset))

    def _cut(
        self,
        store: Store,
        item: int,
        extents: Sequence[Extent],
        offset: int,
        wanted: int,
        memory: torch.Tensor,
    ) -> list[_Part]:
        """Cut an item into tasks; whole pages where tensor and frame have them."""
        room = sum(extent.pages for extent in extents) * PAGE - offset
        length = min(-(-wanted // PAGE) * PAGE, memory.numel(), room)
        parts: list[_Part] = []
        done = 0
        for place in store.segments.places(extents, offset, length):
            for at in range(0, place.length, _TASK):
                size = min(_TASK, place.length - at)
                parts.append(
                    _Part(
                        item,
                        place._replace(offset=place.offset + at, length=size),
                        memory[done : done + size],
                        max(0, min(size, wanted - done)),
                    )
                )
                done += size
        return parts

    async def _clear_padding(
        self, items: Sequence[tuple[StoredPart, torch.Tensor]], hops: Hops
    ) -> None:
        moves = []
        for stored, tensor in items:
            padding = tensor[stored.nbytes : page_bytes(stored.nbytes)]
            if padding.numel():
                moves.append(Move(padding, self._zeros[: padding.numel()]))
        if not moves:
            return
        stream = self._device.stores
        self._device.copy(moves, stream)
        if not await outlast(self._device, stream.record(), lambda: hops.given_up):
            keep_for_ever(moves)
            raise ClosedError("the tier was closed over a copy that hangs on the device")


def _refuse_others(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"direct I/O takes contiguous uint8 tensors of one dimension, not {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )


def _grow(store: Store, job: WriteJob, sizes: Sequence[tuple[StoredPart, int]]) -> None:
    store.writer.begin(job, sizes, grow=True)


def _publish(store: Store, job: WriteJob, ticket: Ticket) -> None:
    if store.writer.moving(job) and store.writer.moved(job, ticket.failed):
        store.show(job)


def _judge_read(flight: Flight, error: BaseException | None) -> IoResult:
    if error is None:
        return SHORT
    # only the words tell; a file cut short meanwhile ends like one that was short before
    return SHORT if "EOF" in str(error) else _failure(error)


def _judge_write(flight: Flight, error: BaseException | None) -> IoResult:
    return _failure(error or OSError(errno.EIO, "the file accepts no more bytes"))


def _failure(error: BaseException) -> IoResult:
    full = any(text in str(error) for text in _NO_ROOM)
    return IoResult(IoStatus.FULL if full else IoStatus.ERROR, error)
