"""Host memory of the engine, registered with its accelerators so that copies run at full speed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tierkv.errors import ClosedError
from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import Device
    from tierkv.mover.core import Core

__all__ = ["Pinning"]

_log = logging.getLogger("tierkv")
_CHUNK = 64 << 20  # registering takes about 50 ms a GiB and holds up other calls of the driver
_HOST = "cpu"


class Pinning:
    """Pins the memory of staging and of the host tiers for every device, chunk by chunk.

    Runs in the background, one job a device, the moment the device is known: copies work before,
    too, only slower. A device that refuses is told once and left alone.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pinned: dict[int, tuple[Device, memoryview]] = {}
        self._number = 0
        self._begun: set[str] = set()

    def __repr__(self) -> str:
        return f"<Pinning: {len(self._pinned)} chunks>"

    @property
    def nbytes(self) -> int:
        """Bytes pinned so far."""
        return sum(len(chunk) for _, chunk in self._pinned.values())

    def begin(self) -> None:
        """Start a job for every device that has none yet. Cheap; called at every tick."""
        for device in self._core.devices:
            if device.name in self._begun or device.kind == _HOST:
                continue
            self._begun.add(device.name)
            try:
                self._core.workers.spawn(self._pin, device, name="pin", lane=Lane.PREFETCH)
            except ClosedError:
                return

    async def _pin(self, device: Device) -> None:
        for chunk in self._chunks():
            # noted before it is done: whoever closes meanwhile undoes it, which is idempotent
            self._number += 1
            number = self._number  # several devices are at it at once
            self._pinned[number] = device, chunk
            if not await self._core.workers.run(device.pin, chunk):
                self._pinned.pop(number, None)
                _log.warning(
                    "%s: host memory cannot be pinned for it (see `ulimit -l`); copies are slower",
                    device.name,
                )
                return

    def _chunks(self) -> Iterator[memoryview]:
        for memory in self._memories():
            for start in range(0, len(memory), _CHUNK):
                yield memory[start : start + _CHUNK]

    def _memories(self) -> Sequence[memoryview]:
        core = self._core
        tiers = [level.memory.whole for level in core.levels if level.memory is not None]
        return [core.staging.whole, *(memory for memory in tiers if memory is not None)]

    def undo(self) -> None:
        """Unpin everything; blocks, so use a worker thread. After the last copy. Idempotent."""
        while self._pinned:
            device, chunk = self._pinned.popitem()[1]
            device.unpin(chunk)
