"""One section on its way into a frame: packed, squeezed, or as it is, whichever is shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.chains import RAW, chain_name
from tierkv.errors import CodecError
from tierkv.pipeline.planning import Stored
from tierkv.sections import (
    DECODED,
    GATHERED,
    PACKED,
    bits_over,
    copy_bytes,
    decode_section,
    gather,
    scratch,
)
from tierkv.views import over

if TYPE_CHECKING:
    from tierkv.frame import Section
    from tierkv.pipeline.planning import Step
    from tierkv.sections import Pieces

__all__ = ["squeeze", "store_coarser", "store_section"]


def store_coarser(
    step: Step, section: Section, data: memoryview, room: memoryview
) -> Stored | None:
    """Put a section that lost something already through this chain; None: not shorter."""
    if step.packed_bytes is None:
        return None
    whole = decode_section(section, data, scratch.take(DECODED, step.raw_bytes))
    try:
        pieces: Pieces = [(0, over(whole, step.dtype, step.shape))]
        stored = _pack(step, step.packed_bytes, pieces, room)
    except CodecError:
        return None
    return stored if stored is not None and stored.nbytes < len(data) else None


def store_section(step: Step, pieces: Pieces, room: memoryview) -> Stored:
    """Encode one section into ``room``, which is as long as its tensor."""
    refused = False
    if step.packed_bytes is not None:
        try:
            stored = _pack(step, step.packed_bytes, pieces, room)
        except CodecError:
            stored, refused = None, True
        if stored is not None and stored.nbytes < step.raw_bytes:
            return stored
    if step.chain.squeezer is not None:
        memory = scratch.take(GATHERED, step.raw_bytes)
        gather(pieces, bits_over(memory, step.dtype, step.shape))
        stored = squeeze(step, "", memory, room, True)
        if stored is not None:
            return stored._replace(refused=refused)
    gather(pieces, bits_over(room, step.dtype, step.shape))
    return Stored(RAW, step.raw_bytes, True, refused)


def _pack(step: Step, size: int, pieces: Pieces, room: memoryview) -> Stored | None:
    whole = pieces[0][1]
    if len(pieces) > 1 or whole.device.type != "cpu":
        memory = scratch.take(GATHERED, step.raw_bytes)
        gather(pieces, bits_over(memory, step.dtype, step.shape))
        whole = over(memory, step.dtype, step.shape)
    if step.chain.squeezer is None:
        step.chain.pack(whole, step.tensor, room[:size])
        return Stored(step.chain.packing, size, step.chain.lossless)
    packed = scratch.take(PACKED, size)
    step.chain.pack(whole, step.tensor, packed)
    return squeeze(step, step.chain.packing, packed, room, step.chain.lossless)


def squeeze(
    step: Step, packing: str, data: memoryview, room: memoryview, lossless: bool
) -> Stored | None:
    """Put packed bytes into ``room``, compressed where that makes them shorter.

    None if they fit neither way.
    """
    squeezer = step.chain.squeezer
    limit = min(len(data), len(room)) - 1
    if squeezer is not None and limit > 0:
        nbytes = squeezer.encode(data, room[:limit])
        if nbytes is not None:
            return Stored(chain_name(packing, squeezer), nbytes, lossless)
    if len(data) > len(room):
        return None
    copy_bytes(room[: len(data)], data)
    return Stored(chain_name(packing, None), len(data), lossless)
