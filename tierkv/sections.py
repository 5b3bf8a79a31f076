"""Sections: between the bytes of a frame and the memory of a view.

What both directions share (finding and checking a view's memory, copying bit for bit, scratch
memory of a thread), and the whole way back: open a frame, verify it, decode it, deliver it.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

import xxhash

from tierkv.chains import RAW, Chain, stored_chain
from tierkv.device import fold_digests, fold_tensors
from tierkv.errors import CodecError, IntegrityError, LayoutError
from tierkv.fitting import check_identity, check_layout, plainly_fits
from tierkv.frame import Header, Section, checksum, decode_header, padded_bytes
from tierkv.layout import DTYPE_BYTES
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import torch

    from tierkv.abc import View
    from tierkv.blocks import BlockKey, PartId
    from tierkv.layout import Space

__all__ = [
    "DECODED",
    "GATHERED",
    "INTEGERS",
    "PACKED",
    "Pieces",
    "bits_over",
    "copy_bytes",
    "decode_section",
    "deliver",
    "digests",
    "find_pieces",
    "gather",
    "layer_range",
    "open_frame",
    "scatter",
    "scratch",
    "stored_bytes",
    "unsqueeze",
    "verify",
]

_KEEP_SCRATCH = 32 << 20  # a thread keeps buffers up to this size: fresh memory is 6-10x slower
_KEEP_CUTS = 64
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""The integer of each size: copying integers keeps every bit."""

Pieces = list[tuple[int, "torch.Tensor"]]
"""Pairs (first token inside the block, tensor ``[heads, tokens, dim]``)."""


class _Scratch(threading.local):
    """Memory of one thread for the steps of one section; see the slot names below."""

    def __init__(self) -> None:
        self.slots = [memoryview(bytearray()) for _ in range(3)]

    def take(self, slot: int, nbytes: int) -> memoryview:
        """``nbytes`` of this thread's memory; the next take of the slot reuses it."""
        if nbytes > _KEEP_SCRATCH:
            return memoryview(bytearray(nbytes))
        if nbytes > len(self.slots[slot]):
            self.slots[slot] = memoryview(bytearray(nbytes))
        return self.slots[slot][:nbytes]


scratch = _Scratch()
"""This thread's buffers; a slot holds one thing at a time."""
GATHERED, PACKED, DECODED = range(3)


def copy_bytes(out: memoryview, data: memoryview) -> None:
    """Copy equally long buffers without the GIL (slice assignment would hold it)."""
    size = (len(data),)
    over(out, "uint8", size).copy_(over(data, "uint8", size))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies then keep every bit (NaN payloads, odd booleans)."""
    import torch

    kind: torch.dtype = getattr(torch, INTEGERS[tensor.dtype.itemsize])
    return tensor.view(kind)


def bits_over(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """As :func:`tierkv.views.over`, but as integers of the same size."""
    return over(memory, INTEGERS[DTYPE_BYTES[dtype]], shape)


@cache
def _kind(dtype: str) -> torch.dtype | None:
    import torch

    kind: torch.dtype | None = getattr(torch, dtype, None)
    return kind


def find_pieces(
    view: View,
    section: tuple[int, str, str, tuple[int, ...]],
    start: int,
    tokens: int,
    per_token: bool,
) -> Pieces:
    """Find the view's memory of one section and check its dtype and shape.

    A wrong head count would broadcast and a wrong dtype would be reinterpreted, both silently.

    Raises:
        LayoutError: if the view does not fit.
    """
    layer, tensor, dtype, shape = section
    if not per_token:
        found = [(0, view.state(layer, tensor))]
        wanted = [(0, shape)]
    else:
        pieces = view.pieces(layer, tensor, start, start + tokens)
        if len(pieces) == 1:  # nearly always, and this is most of what small blocks cost
            at, whole = pieces[0]
            if at == start and whole.shape == shape and whole.dtype == _kind(dtype):
                return [(0, whole)]
        found = [(at - start, t) for at, t in pieces]
        wanted, at = [], 0
        for _, piece in found:
            size = piece.shape[1] if piece.dim() == 3 else 0
            wanted.append((at, (shape[0], size, shape[2])))
            at += size
        if at != tokens:
            raise LayoutError(f"layer {layer}, {tensor!r}: the view gave {at} of {tokens} tokens")
    for (at, piece), (wanted_at, wanted_shape) in zip(found, wanted, strict=True):
        name = str(piece.dtype).removeprefix("torch.")
        if name != dtype or tuple(piece.shape) != wanted_shape or at != wanted_at:
            raise LayoutError(
                f"layer {layer}, {tensor!r}: the space stores {dtype} {wanted_shape}, the view "
                f"has {name} {tuple(piece.shape)} (token {at} of the block)"
            )
    return found


def _check_writable(section: Section, pieces: Pieces) -> None:
    for _, piece in pieces:
        if any(
            step == 0 and size > 1 for step, size in zip(piece.stride(), piece.shape, strict=True)
        ):
            raise LayoutError(
                f"layer {section.layer}, {section.tensor!r}: several elements of the view share "
                "memory (an expanded tensor); it can be stored, not loaded into"
            )


def gather(pieces: Pieces, out: torch.Tensor) -> None:
    """Copy a view's pieces into one tensor of :func:`bits_over`, bit for bit."""
    if len(pieces) == 1:
        out.copy_(_bits(pieces[0][1]))
        return
    for at, piece in pieces:
        out.narrow(1, at, piece.shape[1]).copy_(_bits(piece))


def scatter(data: torch.Tensor, pieces: Pieces) -> None:
    """Undo :func:`gather`."""
    if len(pieces) == 1:
        _bits(pieces[0][1]).copy_(data)
        return
    for at, piece in pieces:
        _bits(piece).copy_(data.narrow(1, at, piece.shape[1]))


# --------------------------------------------------------------------------- decoding


def open_frame(
    frame: memoryview, space: Space, part: PartId, generation: int | None, root: BlockKey
) -> Header:
    """Read the header and check that it is this part of this space (``generation`` None: any).

    Raises:
        IntegrityError: if it is damaged, or belongs to something else.
    """
    header = decode_header(frame)
    if not plainly_fits(header, space, part, generation, root):
        check_identity(header, part=part, generation=generation, space=space.fingerprint, root=root)
        check_layout(header, space)
    return header


def layer_range(header: Header, layer: int) -> tuple[int, int]:
    """Byte range ``[low, high)`` of one layer's sections in the frame.

    Raises:
        LayoutError: if the frame has no such layer.
    """
    ends = [(s.offset, s.end) for s in header.sections if s.layer == layer]
    if not ends:
        raise LayoutError(f"the frame has no layer {layer}")
    return ends[0][0], ends[-1][1]


def _chosen(header: Header, layers: Container[int] | None) -> list[Section]:
    return [s for s in header.sections if layers is None or s.layer in layers]


def stored_bytes(section: Section, frame: memoryview, base: int) -> memoryview:
    """Return a section's stored bytes out of a frame that is given from offset ``base`` on.

    Raises:
        IntegrityError: if they are not inside.
    """
    low = section.offset - base
    if low < 0 or low + section.nbytes > len(frame):
        raise IntegrityError(
            f"layer {section.layer}, {section.tensor!r} is not inside the {len(frame)} bytes given"
        )
    return frame[low : low + section.nbytes]


def unsqueeze(
    chain: Chain, section: Section, data: memoryview, out: memoryview | None = None
) -> memoryview:
    """Undo the bytes codec, into ``out`` or scratch; without one, return ``data`` itself.

    Raises:
        CodecError: if ``data`` is not one encoding of the due length.
    """
    size = section.raw_bytes
    if chain.packing:
        size = chain.packed_bytes(section.shape, section.dtype, section.tensor)
    if chain.squeezer is None:
        if len(data) != size:
            raise CodecError(f"{chain.name}: {len(data)} bytes stored where {size} are due")
        return data
    packed = scratch.take(PACKED, size) if out is None else out
    chain.squeezer.decode(data, packed)
    return packed


def digests(pieces: Sequence[memoryview], folded: bool) -> list[bytes]:
    """Section checksums of the kind that ``folded`` tells, one for each piece."""
    if not folded:
        return [checksum(piece) for piece in pieces]
    return fold_digests(fold_tensors([over(p, "uint8", (len(p),)) for p in pieces]))


def verify(
    header: Header, frame: memoryview, layers: Container[int] | None = None, base: int = 0
) -> None:
    """Check the checksums of the sections (of ``layers``), of whichever kind the frame has.

    Args:
        header: Of this frame.
        frame: Bytes of the frame from offset ``base`` on, padding of sections included.
        layers: Model layers to check; None checks all.
        base: Offset in the frame of the first byte given.

    Raises:
        IntegrityError: if a section is damaged or not inside ``frame``.
    """
    folded = header.folded
    if layers is None and base == 0 and not folded and header.frame_bytes <= len(frame):
        found = list(map(xxhash.xxh3_128_digest, map(frame.__getitem__, _cuts(header.sections))))
        wrong = (
            s for s, a, b in zip(header.sections, found, header.digests, strict=True) if a != b
        )
        for section in wrong if tuple(found) != header.digests else ():
            raise _damaged(section)
        return
    pieces, chosen = [], []
    for section, due in zip(header.sections, header.digests, strict=True):
        if layers is not None and section.layer not in layers:
            continue
        low, high = section.offset - base, section.end - base
        if low < 0 or high > len(frame):
            raise _damaged(section)
        if not folded:
            if checksum(frame[low:high]) != due:
                raise _damaged(section)
            continue
        pieces.append(frame[low:high])
        chosen.append((section, due))
    for (section, due), digest in zip(chosen, digests(pieces, folded), strict=True):
        if digest != due:
            raise _damaged(section)


# Raw frames of one group share one tuple of sections: by its identity, a hash would read it all.
_known_cuts: dict[int, tuple[tuple[Section, ...], list[slice]]] = {}


def _cuts(sections: tuple[Section, ...]) -> list[slice]:
    """Where each section is in the frame, padding included."""
    known = _known_cuts.get(id(sections))
    if known is None or known[0] is not sections:
        if len(_known_cuts) >= _KEEP_CUTS:
            _known_cuts.clear()
        known = sections, [slice(s.offset, s.end) for s in sections]
        _known_cuts[id(sections)] = known
    return known[1]


def _damaged(section: Section) -> IntegrityError:
    return IntegrityError(
        f"layer {section.layer}, {section.tensor!r}: the checksum of {section.nbytes} stored bytes "
        "does not match; treat the part as missing"
    )


def deliver(
    header: Header,
    frame: memoryview,
    view: View,
    start: int,
    layers: Container[int] | None = None,
    base: int = 0,
) -> None:
    """Decode verified sections and write them into the view's tokens from ``start`` on.

    Raw sections are copied once, from ``frame`` into the view. All others of the call are decoded
    first, so that one that cannot be decoded leaves the view untouched.

    Args:
        header: Checked by :func:`open_frame`; its sections by :func:`verify`.
        frame: Bytes of the frame from offset ``base`` on.
        view: Where the KV goes.
        start: Token of the view at which the block starts.
        layers: Model layers to write; None writes all.
        base: Offset in the frame of the first byte given.

    Raises:
        CodecError: if a section cannot be decoded.
        LayoutError: if the view does not fit; it is then untouched.
    """
    sections = _chosen(header, layers)
    coded = sum(padded_bytes(s.raw_bytes) for s in sections if s.chain != RAW)
    decoded, at = scratch.take(DECODED, coded), 0
    with view.writing():
        moves: list[tuple[torch.Tensor, Pieces]] = []
        for section in sections:
            pieces = find_pieces(view, section[:4], start, header.tokens, header.per_token)
            _check_writable(section, pieces)
            data = stored_bytes(section, frame, base)
            if section.chain != RAW:
                data = decode_section(section, data, decoded[at : at + section.raw_bytes])
                at += padded_bytes(section.raw_bytes)
            moves.append((bits_over(data, section.dtype, section.shape), pieces))
        for whole, pieces in moves:
            scatter(whole, pieces)


def decode_section(section: Section, data: memoryview, out: memoryview) -> memoryview:
    """Decode one section that is not raw into ``out``, as long as its tensor; returns ``out``.

    Raises:
        CodecError: if it cannot be decoded.
    """
    chain = stored_chain(section.chain)
    if not chain.packing:
        unsqueeze(chain, section, data, out)
    else:
        packed = unsqueeze(chain, section, data)
        chain.unpack(packed, section.tensor, over(out, section.dtype, section.shape))
    return out
