"""A tier in a device's memory, with faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.abc import ResidentBackend
from tierkv.testing.faulty import Faulty
from tierkv.testing.faulty_direct import spoil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import DeviceBuffer, Event, Resident, StoredPart, Threads
    from tierkv.blocks import PartId
    from tierkv.frame import Header
    from tierkv.testing.faults import Fault

__all__ = ["FaultyResident"]


class FaultyResident(Faulty, ResidentBackend):
    """A tier in a device's memory, with faults; see :func:`tierkv.testing.faults.inject`."""

    def __init__(self, inner: ResidentBackend, faults: Sequence[Fault]) -> None:
        super().__init__(inner, faults)
        self._resident = inner

    async def open(self, threads: Threads) -> Sequence[StoredPart]:
        """Open the wrapped backend; its device is this one's."""
        found = await super().open(threads)
        self.device = self._resident.device
        return found

    def allocate(self, nbytes: int) -> DeviceBuffer | None:
        """Memory, unless a ``write`` fault blocks it."""
        blocked = any(fault.blocks_memory for fault in self._at_once("write"))
        return None if blocked else self._resident.allocate(nbytes)

    def adopt(self, stored: StoredPart, header: Header, buffer: DeviceBuffer) -> bool:
        """Publish."""
        return self._resident.adopt(stored, header, buffer)

    def borrow(self, part: PartId, generation: int) -> Resident | None:
        """The frame in place, spoilt in place by ``read`` faults."""
        acting = self._at_once("read")
        if any(fault.blocks_memory for fault in acting):
            return None
        found = self._resident.borrow(part, generation)
        if found is not None and acting:
            spoil(self.device, found.buffer.tensor[: found.buffer.nbytes], acting)
        return found

    def touched(self, part: PartId, generation: int, event: Event) -> None:
        """Keep the memory until ``event``."""
        self._resident.touched(part, generation, event)

    def discard(self, part: PartId, generation: int) -> None:
        """Forget."""
        self._resident.discard(part, generation)

    def shrink(self, capacity: int) -> int:
        """As of the wrapped backend."""
        return self._resident.shrink(capacity)
