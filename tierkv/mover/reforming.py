"""What a frame becomes on its way from one tier to another: other codecs, other checksums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierkv.blocks import split_part
from tierkv.fitting import check_identity, check_layout
from tierkv.frame import decode_header
from tierkv.mover.core import stored_part
from tierkv.mover.sealing import reseal
from tierkv.pipeline import verify

if TYPE_CHECKING:
    from tierkv.abc import Buffer, StoredPart
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.copies import Copy
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level

__all__ = [
    "Frame",
    "check_frame",
    "most_bytes",
    "most_room",
    "rechained",
    "recodes",
    "reform",
]


@dataclass(slots=True, eq=False)
class Frame:
    """One frame that is copied.

    Attributes:
        number: Its number in the batch.
        copy: What is copied where.
        where: The memory that it is in, or is read into.
        out: Memory of its own for what it becomes; None if it stays as it is.
        landed: Whether ``where`` is memory of the target tier.
        checked: Whether a device has verified its sections where it was.
        stored: What the target should remember of it, once it has its final form.
    """

    number: int
    copy: Copy
    where: Buffer | None = None
    out: Buffer | None = None
    landed: bool = False
    checked: bool = False
    stored: StoredPart = field(init=False)


def recodes(core: Core, copy: Copy) -> bool:
    """Whether a frame may have to be encoded anew on its way.

    Frames in a device tier have that tier's own chain, so that the device can read them itself; in
    any other tier a frame may keep the chain that it came with, unless a rule of compression wants
    another one.
    """
    return rechained(core, copy) or core.levels[copy.target].resident is not None


def rechained(core: Core, copy: Copy) -> bool:
    """Whether a frame gets another codec chain on its way, as far as is known beforehand."""
    return copy.chain is not None or (
        core.levels[copy.source].chain != core.levels[copy.target].chain
    )


def most_bytes(core: Core, copy: Copy, target: Level) -> int:
    """Most bytes that the copy may take in the target."""
    return _longest(core, copy, target) if recodes(core, copy) else copy.nbytes


def most_room(core: Core, copy: Copy) -> int:
    """Most memory that a copy may need on its way, as far as is known while it waits.

    Where the target has rules of compression, they choose its chain only when its turn has come.
    """
    target = core.levels[copy.target]
    if recodes(core, copy) or core.decisions.compresses(target.index):
        return _longest(core, copy, target)
    return copy.nbytes


def _longest(core: Core, copy: Copy, target: Level) -> int:
    """Longest frame of this part in any chain: one of raw sections."""
    group = split_part(copy.part)[1]
    spaces = core.spaces.values() if copy.space is None else (copy.space,)
    bounds = [
        core.pipeline(space, target).max_bytes(group)
        for space in spaces
        if group < len(space.layout.groups)
    ]
    return max([copy.nbytes, *bounds])


def reform(core: Core, frame: Frame, target: Level) -> tuple[Header, Buffer]:
    """Verify a frame and give it the codecs and checksums that the target wants. In a thread.

    What goes into a device tier keeps the checksums of host memory: the device makes its own.

    Returns:
        The header of the result, and the buffer that it begins.

    Raises:
        CodecError: if the frame is damaged, or is not what it should be.
    """
    buffer = frame.where
    assert buffer is not None
    header, space = _open(core, frame.copy, buffer.memory)
    if not frame.checked:
        verify(header, buffer.memory)
    chains = {section.chain for section in header.sections}
    chain = frame.copy.chain or target.chain
    if frame.out is not None and space is not None and chains != {chain}:
        pipeline, coarser = core.pipeline_of(space, chain), frame.copy.chain is not None
        done = pipeline.transcode(header, buffer.memory, frame.out.memory, coarser=coarser)
        buffer = frame.out
        header = decode_header(buffer.memory[: done.nbytes])
    # a frame in the memory of its own tier is shared: it keeps the checksums that it has
    shared = core.levels[frame.copy.source].memory is not None and buffer is frame.where
    if not shared and target.resident is None:
        header = reseal(header, buffer.memory[: header.frame_bytes], folded=False)
    frame.stored = stored_part(header)
    return header, buffer


def _open(core: Core, copy: Copy, memory: memoryview) -> tuple[Header, Space | None]:
    """Read a frame's header and check that it is the part that is meant."""
    header = decode_header(memory)
    space = copy.space or core.spaces.get(header.space)
    check_frame(copy, header, space)
    return header, space


def check_frame(copy: Copy, header: Header, space: Space | None) -> None:
    """Check that a header belongs to the part that is copied.

    The space of a part that a tier kept over a restart may be unknown as yet.

    Raises:
        IntegrityError: if it does not.
    """
    check_identity(
        header,
        part=copy.part,
        generation=copy.generation,
        space=header.space if space is None else space.fingerprint,
        root=header.root if copy.root is None else copy.root,
    )
    if space is not None:
        check_layout(header, space)
