"""Frames built in host memory, on their way into any tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tierkv.abc import WriteItem
from tierkv.decisions.types import SkipReason
from tierkv.mover.blockcopies import Blocks
from tierkv.mover.grids import grid_of, worthwhile
from tierkv.mover.steps import never
from tierkv.mover.writing import Writing
from tierkv.pipeline import Stamp
from tierkv.sections import digests
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Buffer, Device, Move, StoredPart
    from tierkv.mover.grids import Grid
    from tierkv.mover.holding import Reserved
    from tierkv.pipeline import Encoded

__all__ = ["HostWriting"]

_STEP_BYTES: Final = 1024 * 1024
"""Frames are filled about so many bytes at a time: what somebody who cancels waits for."""


class HostWriting(Writing):
    """Frames built in host memory: in a memory tier, or staged for any other tier.

    A frame of known size is built where it will stay; any other one in staging memory. Where
    copies bring the KV and the chain is not raw, the raw sections are staged as well.

    Args:
        reserved: Room for it.
        gathered: Whether copies bring the KV although it is in host memory, too.
    """

    def __init__(self, reserved: Reserved, *, gathered: bool = False) -> None:
        super().__init__(reserved)
        self._gathered = gathered or self.device is not None
        self._buffers: dict[int, Buffer] = {}
        self._raw: dict[int, Buffer] = {}
        self._folded = self.level.resident is not None
        fixed = [self._batch[i] for i in self._open]
        known = all(self.pipeline.fixed_bytes(p.group, p.tokens) is not None for p in fixed)
        self._in_place = self.level.memory is not None and known
        self._coded = self.pipeline.chain != "raw"

    @property
    def device(self) -> Device | None:
        """Whose copies fill the frames; what stands in for a device is host memory itself."""
        device = self.plan.device
        return None if device is None or device.kind == "cpu" else device

    def to_stage(self) -> list[tuple[int, int]]:
        """Each part once, or twice if its raw sections are staged on their own."""
        pieces = 2 if self._coded and self._gathered else 1
        return (
            []
            if self._in_place
            else [(i, self._sizes[i]) for i in self.open for _ in range(pieces)]
        )

    def take(self, index: int, buffer: Buffer) -> None:
        """The first piece of a part is for its frame."""
        (self._raw if index in self._buffers else self._buffers)[index] = buffer

    def allocate(self) -> None:
        """Allocate in the memory tier, if the frames are built there."""
        memory = self.level.memory
        if not self._in_place or memory is None:
            return
        for index in self.open:
            if index in self._buffers:
                continue
            buffer = self.roomy(memory.allocate, self._sizes[index])
            if buffer is None:
                self.give_up_from(index, SkipReason.FULL)
                break
            self._buffers[index] = buffer

    def moves(self, layer: int | None = None) -> list[Move]:
        """From the view into the raw sections of each frame."""
        found: list[Move] = []
        for index in self.open:
            memory = (self._raw if self._coded else self._buffers)[index].memory
            out = over(memory, "uint8", (len(memory),))
            view, start = self.plan.view, self._batch[index].start
            found += self.pipeline.moves(self.label(index), view, start, out, layer)
        return found

    def fill(self, stopped: Callable[[], bool] = never) -> None:
        """Gather and encode, or seal what a device gathered."""
        if not (self._gathered or self._coded):
            self._fill_together(stopped)
        for index in self.open:
            if stopped():
                return
            if index not in self._sealed:
                encoded = self._fill(index, self._buffers[index].memory)
                self.sealed(index, encoded.nbytes, lossless=encoded.lossless)

    def _fill_together(self, stopped: Callable[[], bool]) -> None:
        """Fill raw frames by address, where the view has a rule for where its blocks are."""
        import torch

        alike: dict[tuple[int, int], list[int]] = {}
        for index in self.open:
            new = self._batch[index]
            alike.setdefault((new.group, new.tokens), []).append(index)
        with torch.inference_mode():
            for (group, tokens), indices in alike.items():
                table, view = self.pipeline.table(group, tokens), self.plan.view
                per_token = self.pipeline.space.layout.groups[group].per_token
                if not per_token or not worthwhile(len(indices), table):
                    continue
                starts = [self._batch[index].start for index in indices]
                grid = grid_of(view, table, tokens, starts, writing=False)
                if grid is not None:
                    self._gather(grid, indices, starts, stopped)

    def _gather(
        self,
        grid: Grid,
        indices: Sequence[int],
        starts: Sequence[int],
        stopped: Callable[[], bool],
    ) -> None:
        pipeline, folded = self.pipeline, self._folded
        frames = [self._buffers[index].memory for index in indices]
        blocks = Blocks(grid, self.plan.view, starts, frames)
        step = -(-_STEP_BYTES // grid.nbytes)
        stamp: Stamp | None = None  # only the first header is made from scratch
        nbytes = 0
        for low in range(0, len(indices), step):
            if stopped():
                return
            high = min(low + step, len(indices))
            gathered = blocks.gather(low, high, not folded)
            for index, frame, sums in zip(
                indices[low:high], frames[low:high], gathered, strict=True
            ):
                found = digests([frame[c] for c in grid.cuts], folded=True) if folded else sums
                if stamp is None:
                    header = pipeline.header(self.label(index), found, folded=folded)
                    stamp, nbytes = Stamp(header), header.frame_bytes
                new, outcome = self._batch[index], self._reservation.outcomes[index]
                stamp.write(frame, new.part, new.parent_key, outcome.generation, found)
                self.sealed(index, nbytes, lossless=True)

    def _fill(self, index: int, out: memoryview) -> Encoded:
        label, new, folded = self.label(index), self._batch[index], self._folded
        if not self._gathered:
            return self.pipeline.encode(label, self.plan.view, new.start, out, folded=folded)
        if not self._coded:
            return self.pipeline.seal(label, out, folded=folded)
        raw = self._raw.pop(index)
        done = self.pipeline.encode_gathered(label, raw.memory, out, folded=folded)
        raw.release()
        return done

    def place(self, index: int, stored: StoredPart) -> SkipReason | None:
        """Publish the frame where it is, or in memory of its own length."""
        memory = self.level.memory
        assert memory is not None
        buffer = self._buffers[index]
        if not self._in_place:
            slot = self.roomy(memory.allocate, stored.nbytes)
            if slot is None:
                return SkipReason.FULL
            _copy_bytes(buffer.memory[: stored.nbytes], slot.memory)
            buffer.release()
            buffer = self._buffers[index] = slot
        if self.in_use(index) or not memory.adopt(stored, buffer):
            return SkipReason.IN_FLIGHT
        del self._buffers[index]
        return None

    def items(self) -> list[tuple[int, WriteItem]]:
        """What is to be written to a medium, with the numbers of the parts."""
        return [(i, WriteItem(self._sealed[i], self._buffers[i])) for i in self.open]

    def drop(self, index: int) -> None:
        """Give the memory of a part back."""
        for buffer in (self._buffers.pop(index, None), self._raw.pop(index, None)):
            if buffer is not None:
                buffer.release()


def _copy_bytes(source: memoryview, target: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
