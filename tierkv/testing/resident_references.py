"""The shortest sound tier in device memory: it passes its suite, and mutants derive from it.

Its methods do what :mod:`tierkv.abc` says, nothing more.
"""
# ruff: noqa: D102

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tierkv.abc import (
    OK,
    BackendStats,
    IoResult,
    IoStatus,
    Move,
    Resident,
    ResidentBackend,
    StoredPart,
)
from tierkv.errors import IntegrityError
from tierkv.extents import Extent, PageRuns
from tierkv.frame import PAGE, Header, decode_header, page_round
from tierkv.registry import resolve
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tierkv.abc import Device, DeviceBuffer, Event, ReadRequest, Threads, WriteItem
    from tierkv.blocks import PartId

__all__ = ["Shelf", "ShelfBackend", "move"]


def move(device: Device, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy and wait for it."""
    device.copy([Move(target, source)], device.loads)
    device.loads.record().synchronize()


def _header_of(frame: memoryview) -> Header | None:
    try:
        return decode_header(frame)
    except IntegrityError:
        return None


class Shelf:
    """A buffer of a :class:`ShelfBackend`."""

    def __init__(self, owner: ShelfBackend, nbytes: int, extent: Extent) -> None:
        assert owner.memory is not None
        self.nbytes = nbytes
        self.owner = owner
        self.extent: Extent | None = extent
        self.memory = owner.memory[extent.start * PAGE : (extent.start + extent.pages) * PAGE]

    @property
    def tensor(self) -> torch.Tensor:
        return self.memory

    def release(self, after: Event | None = None) -> None:
        extent, self.extent = self.extent, None
        if extent is not None:
            self.owner.take_back(extent, [] if after is None else [after])


class _Lent(Shelf):
    def release(self, after: Event | None = None) -> None:
        """Nothing is given back: it was lent."""


class ShelfBackend(ResidentBackend):
    """Frames in one piece of a device's memory (here the CPU's)."""

    kind: ClassVar[str] = "shelf"

    def __init__(self, root: Path, capacity: int) -> None:
        self.name = "shelf"
        self.device = resolve("devices", "cpu")("cpu")
        self.limit = capacity
        self.memory: torch.Tensor | None = None
        self.runs = PageRuns()
        self.entries: dict[PartId, tuple[StoredPart, Header | None, Shelf]] = {}
        self.touches: dict[PartId, list[Event]] = {}
        self.waiting: list[tuple[Extent, list[Event]]] = []

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        return ()

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        return [self.read_one(*pair) for pair in zip(requests, into, strict=True)]

    def read_one(self, request: ReadRequest, target: memoryview) -> IoResult:
        entry = self.find(request.part, request.generation)
        if entry is None:
            return IoResult(IoStatus.MISSING)
        source = entry[2].memory[request.offset : request.offset + request.length]
        if len(source) != request.length:
            return IoResult(IoStatus.SHORT)
        move(self.device, over(target, "uint8", (len(target),)), source)
        return OK

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        return [self.write_one(item) for item in items]

    def write_one(self, item: WriteItem) -> IoResult:
        stored = item.stored
        buffer = self.allocate(stored.nbytes)
        if buffer is None:
            return IoResult(IoStatus.FULL)
        frame = item.buffer.memory[: stored.nbytes]
        move(self.device, buffer.tensor[: len(frame)], over(frame, "uint8", (len(frame),)))
        good = self.publish(stored, _header_of(frame), buffer)
        if not good:
            buffer.release()
        return OK if good else IoResult(IoStatus.MISSING)

    async def delete(self, parts: Sequence[tuple[PartId, int]]) -> None:
        for part, generation in parts:
            self.discard(part, generation)

    async def aclose(self) -> None:
        self.entries.clear()

    def charge(self, nbytes: int) -> int:
        return page_round(max(nbytes, 1))

    def stats(self) -> BackendStats:
        live = sum(self.charge(stored.nbytes) for stored, _, _ in self.entries.values())
        return BackendStats(len(self.entries), live, 0, self.limit, "shelf")

    def allocate(self, nbytes: int) -> Shelf | None:
        self.reap()
        if self.memory is None and self.limit >= PAGE:
            self.memory = self.device.allocate(self.limit)
            if self.memory is not None:
                self.runs.give(Extent(0, self.limit // PAGE))
        if self.memory is None or self.limit < len(self.memory):
            return None
        extent = self.runs.take(self.charge(nbytes) // PAGE)
        return None if extent is None else Shelf(self, nbytes, extent)

    def take_back(self, extent: Extent, events: list[Event]) -> None:
        self.waiting.append((extent, events))
        self.reap()

    def reap(self) -> None:
        for extent, events in self.waiting:
            if all(event.query() for event in events):
                self.runs.give(extent)
                if self.memory is not None:
                    stop = extent.start + extent.pages
                    self.device.freed(self.memory[extent.start * PAGE : stop * PAGE])
        self.waiting = [w for w in self.waiting if not all(event.query() for event in w[1])]

    def adopt(self, stored: StoredPart, header: Header, buffer: DeviceBuffer) -> bool:
        assert isinstance(buffer, Shelf)
        return self.publish(stored, header, buffer)

    def publish(self, stored: StoredPart, header: Header | None, buffer: Shelf) -> bool:
        old = self.entries.get(stored.part)
        if old is not None and old[0].generation > stored.generation:
            return False
        if old is not None:
            self.discard(stored.part, old[0].generation)
        self.entries[stored.part] = (stored, header, buffer)
        return True

    def find(self, part: PartId, generation: int) -> tuple[StoredPart, Header | None, Shelf] | None:
        entry = self.entries.get(part)
        return entry if entry is not None and entry[0].generation == generation else None

    def borrow(self, part: PartId, generation: int) -> Resident | None:
        entry = self.find(part, generation)
        if entry is None or entry[1] is None:
            return None
        shelf = entry[2]
        assert shelf.extent is not None
        return Resident(entry[1], _Lent(self, shelf.nbytes, shelf.extent))

    def touched(self, part: PartId, generation: int, event: Event) -> None:
        if self.find(part, generation) is not None:
            self.touches.setdefault(part, []).append(event)

    def discard(self, part: PartId, generation: int) -> None:
        entry = self.find(part, generation)
        if entry is not None:
            del self.entries[part]
            extent, entry[2].extent = entry[2].extent, None
            assert extent is not None
            self.take_back(extent, self.touches.pop(part, []))

    def shrink(self, capacity: int) -> int:
        self.limit = capacity
        self.reap()
        if self.memory is not None and self.runs.free * PAGE == len(self.memory):
            self.memory = None
            self.runs = PageRuns()
        return 0 if self.memory is None else len(self.memory)
