"""The smallest right user of a device: what an engine does with streams, events and staging.

A model's tensors are kept as frames in device memory, frames go to the host through few staging
slots, and come back. Each rule that can be broken is a method of its own, for the mutants of
:mod:`tierkv.testing.device_mutants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.abc import Move

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import Device, Event, Stream

__all__ = ["Shuttle"]


class Shuttle:
    """Moves frames of one size between a model, device memory and the host.

    Args:
        device: The device.
        nbytes: Bytes of a frame.
        frames: How many frames fit into device memory.
        slots: How many staging slots there are; each holds one frame.
    """

    def __init__(self, device: Device, nbytes: int, frames: int = 8, slots: int = 2) -> None:
        import torch

        pool = device.allocate(nbytes * frames)
        assert pool is not None, "the check wants more memory than the device has"
        self.device = device
        self.free = list(pool.view(frames, nbytes).unbind())
        self.staging = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(slots)]
        self.busy: list[Event | None] = [None] * slots

    # the rules

    def order(self, stream: Stream) -> None:
        """What is submitted from now on waits for the model's work up to now."""
        stream.wait(self.device.current().record())

    async def before_reuse(self, slot: int) -> None:
        """A staging slot is used again only when the copy that reads it is done."""
        event, self.busy[slot] = self.busy[slot], None
        if event is not None:
            await self.device.wait(event)

    async def before_free(self, event: Event) -> None:
        """Device memory is given back only when the copy that reads it is done."""
        await self.device.wait(event)

    async def before_return(self, event: Event) -> None:
        """A load has ended when its last copy has."""
        await self.device.wait(event)

    # the work

    def keep(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather the model's tensors (uint8, of one frame each) into frames, on the device."""
        self.order(self.device.stores)
        frames = [self.free.pop() for _ in sources]
        moves = [Move(frame, source) for frame, source in zip(frames, sources, strict=True)]
        self.device.copy(moves, self.device.stores)
        return frames

    async def evict(self, frames: Sequence[torch.Tensor]) -> list[bytes]:
        """Copy frames to the host and give their memory back; frame by frame, in order."""
        out = []
        for frame in frames:
            self.device.copy([Move(self.staging[0], frame)], self.device.stores)
            event = self.device.stores.record()
            await self.before_free(event)
            self.give(frame)
            await self.device.wait(event)
            out.append(self.staging[0].numpy().tobytes())
        return out

    def give(self, frame: torch.Tensor) -> None:
        """Give a frame's memory back."""
        self.device.freed(frame)
        self.free.append(frame)

    async def load(self, data: Sequence[bytes], targets: Sequence[torch.Tensor]) -> None:
        """Copy frames from the host into the model's tensors."""
        import torch

        self.order(self.device.loads)
        for number, (frame, target) in enumerate(zip(data, targets, strict=True)):
            slot = number % len(self.staging)
            await self.before_reuse(slot)
            staged = self.staging[slot]
            staged.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
            self.device.copy([Move(target, staged)], self.device.loads)
            self.busy[slot] = self.device.loads.record()
        await self.before_return(self.device.loads.record())
