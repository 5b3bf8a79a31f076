"""Frames on their way to become smaller: verified, encoded anew, and verified again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.errors import CodecError
from tierkv.fitting import check_identity, check_layout
from tierkv.frame import decode_header
from tierkv.pipeline import verify
from tierkv.sections import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer
    from tierkv.decisions.coding_rules import Recode
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.core import Core

__all__ = ["Shrinking", "encode", "fill"]


@dataclass(slots=True, eq=False)
class Shrinking:
    """One copy on its way to become smaller.

    Attributes:
        recode: Which, and for which chain.
        lease: Ours on it.
        where: Its frame, in host memory.
        space: Its space; None if nobody has opened a session in it.
        length: Bytes to read of it, if it is in a device's memory.
        out: Staging memory for what it becomes.
        room: Memory of its tier for that.
        header: Of what it became, if it was encoded.
        refused: Sections whose values the codec refused.
        damaged: Whether it was found to be.
    """

    recode: Recode
    lease: int
    where: Buffer | None = None
    space: Space | None = None
    length: int = 0
    out: Buffer | None = None
    room: Buffer | None = None
    header: Header | None = None
    refused: int = 0
    damaged: bool = False

    @property
    def small(self) -> memoryview:
        """The encoded frame."""
        assert self.out is not None
        assert self.header is not None
        return self.out.memory[: self.header.frame_bytes]


def encode(core: Core, frames: Sequence[Shrinking]) -> None:
    """Verify each frame, encode it, verify what came of it. In a thread."""
    for frame in frames:
        assert frame.where is not None
        assert frame.out is not None
        assert frame.space is not None
        recode, space = frame.recode, frame.space
        try:
            header = decode_header(frame.where.memory)
            check_identity(
                header,
                part=recode.part,
                generation=recode.generation,
                space=space.fingerprint,
                root=header.root,
            )
            check_layout(header, space)
            verify(header, frame.where.memory)
            pipeline = core.pipeline_of(space, recode.chain)
            memory, out = frame.where.memory, frame.out.memory
            done = pipeline.transcode(header, memory, out, coarser=True)
            fresh = decode_header(frame.out.memory[: done.nbytes])
            verify(fresh, frame.out.memory[: done.nbytes])
        except CodecError:
            frame.damaged = True
        else:
            frame.header, frame.refused = fresh, done.fallbacks


def fill(frames: Sequence[Shrinking]) -> None:
    """Copy the encoded frames into the memory that they have in their tier."""
    for frame in frames:
        assert frame.room is not None
        copy_bytes(frame.room.memory, frame.small)
