"""Direct ways between files and device memory, with faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.abc import IoResult, IoStatus, Move
from tierkv.abc.direct import DirectIo
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import torch

    from tierkv.abc import Device, ReadRequest, StoredPart
    from tierkv.testing.faults import Fault

    Enter = Callable[[str, int], Awaitable[tuple[list[Fault], IoResult | None]]]

__all__ = ["FaultyDirect", "spoil"]


def spoil(device: Device, memory: torch.Tensor, faults: Sequence[Fault]) -> IoStatus:
    """Let faults damage device memory, by way of host memory; the status that they report.

    Waits for the device in this thread, as only a test may.
    """
    seen = memoryview(bytearray(memory.numel()))
    host = over(seen, "uint8", (memory.numel(),))
    _copy(device, host, memory)
    status = IoStatus.OK
    for fault in faults:
        reported = fault.spoil(seen)
        status = reported if status is IoStatus.OK else status
    _copy(device, memory, host)
    return status


def _copy(device: Device, target: torch.Tensor, source: torch.Tensor) -> None:
    if source.device.type == "cpu" and target.device.type == "cpu":
        target.copy_(source)  # also where a simulated device would need the loop to go on
        return
    device.copy([Move(target, source)], device.stores)
    device.stores.record().synchronize()


class FaultyDirect(DirectIo):
    """A direct way whose ``read_device`` and ``write_device`` fail as ``read`` and ``write`` do.

    Args:
        inner: The sound way.
        device: Whose memory it reaches.
        enter: Meets the faults of a call: those that act on it, and their refusal.
    """

    def __init__(self, inner: DirectIo, device: Device, enter: Enter) -> None:
        self.inner = inner
        self.mode = inner.mode
        self._device = device
        self._enter = enter

    async def read_device(
        self, requests: Sequence[ReadRequest], into: Sequence[torch.Tensor]
    ) -> list[IoResult]:
        """Read, and spoil what was read."""
        acting, refused = await self._enter("read", len(requests))
        if refused is not None:
            return [refused] * len(requests)
        results = await self.inner.read_device(requests, into)
        for item, result in enumerate(results):
            if acting and result.status is IoStatus.OK:
                read = into[item][: requests[item].length]
                status = spoil(self._device, read, acting)
                results[item] = result if status is IoStatus.OK else IoResult(status)
        return results

    async def write_device(
        self, items: Sequence[tuple[StoredPart, torch.Tensor]]
    ) -> list[IoResult]:
        """Write."""
        _, refused = await self._enter("write", len(items))
        if refused is not None:
            return [refused] * len(items)
        return await self.inner.write_device(items)
