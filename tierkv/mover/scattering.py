"""Scattering: from frames in reach, in host or device memory, into a view.

Every block is verified as a whole before a byte of it is written. A view in plain host memory is
written at once, section by section. Into a device's memory everything of one window goes as one
batch of copies on the device's stream for loads, behind the caller's own work; whoever submitted
it waits for its event (:mod:`tierkv.mover.submitted`) before the frames' memory is given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import Move
from tierkv.chains import RAW
from tierkv.device import fold_digests
from tierkv.errors import CodecError, IntegrityError
from tierkv.fitting import check_identity, check_layout
from tierkv.frame import padded_bytes
from tierkv.mover.rawcopies import copy_pairs, raw_pairs
from tierkv.mover.submitted import submitting
from tierkv.pipeline import deliver, open_frame, verify
from tierkv.sections import bits_over, decode_section, find_pieces, stored_bytes

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import torch

    from tierkv.abc import Device, Event, Resident, View
    from tierkv.blocks import BlockKey
    from tierkv.decisions.types import FoundPart
    from tierkv.frame import Header, Section
    from tierkv.layout import Space
    from tierkv.mover.blockcopies import Blocks
    from tierkv.mover.levels import Level
    from tierkv.mover.rawcopies import Pair
    from tierkv.mover.submitted import Sent

__all__ = [
    "Arrived",
    "Order",
    "Target",
    "arrived_on",
    "coded_bytes",
    "examine",
    "open_part",
    "send",
    "submit_folds",
    "target_of",
    "write",
    "wrong_folds",
]

_EMPTY = memoryview(b"")


class Target(NamedTuple):
    """Where a load goes.

    Attributes:
        view: The caller's memory.
        device: The device it is in; None: plain host memory.
        after: The caller's own work on it, which comes first; None without a device.
    """

    view: View
    device: Device | None = None
    after: Event | None = None


def target_of(view: View, device: Device | None) -> Target:
    """Describe the view; call it on the caller's thread: its stream's work so far comes first."""
    return Target(view, device, None if device is None else device.current().record())


@dataclass(slots=True, eq=False)
class Arrived:
    """One part whose bytes are in reach.

    Attributes:
        found: Which part, and where it was found.
        memory: Its frame from offset ``base`` on, in host memory.
        base: See ``memory``.
        header: Its header, once it was opened.
        resident: Its frame in the memory of the view's own device, instead of ``memory``.
        checked: Whether the bytes need no checksum any more.
        placed: Whether the medium itself put the bytes into the view.
        written: Whether they were written into the view together with their verification.
        copies: The copies to make, once they are known; see :mod:`tierkv.mover.rawparts`.
        blocks: Or this part among others like it, once that is known.
        number: Its number among those.
    """

    found: FoundPart
    memory: memoryview = _EMPTY
    base: int = 0
    header: Header | None = None
    resident: Resident | None = None
    checked: bool = False
    placed: bool = False
    written: bool = False
    copies: list[list[Pair]] | None = None
    blocks: Blocks | None = None
    number: int = 0

    @property
    def raw(self) -> bool:
        """Whether all that remains is to copy bytes."""
        return self.blocks is not None or self.copies is not None


class Order(NamedTuple):
    """Parts to write into a view from token ``start`` on."""

    parts: Sequence[Arrived]
    start: int


def arrived_on(
    device: Device | None, level: Level, found: FoundPart, space: Space, root: BlockKey
) -> Arrived | None:
    """The part, if its frame can be verified and copied where it is: in the device's own memory.

    None where that is another device's memory, or the frame is of another kind (its checksums are
    not those of a device, or a codec was used): it is then read like one of any other tier.
    """
    resident = level.resident
    if resident is None or device is None or resident.device is not device:
        return None
    held = resident.borrow(found.part, found.generation)
    if held is None or not held.header.folded:
        return None
    header = held.header
    if any(s.chain != RAW for s in header.sections):
        return None
    try:
        check_identity(
            header,
            part=found.part,
            generation=found.generation,
            space=space.fingerprint,
            root=root,
        )
        check_layout(header, space)
    except IntegrityError:
        return None  # the read of the whole frame finds out what is wrong with it
    return Arrived(found, header=header, resident=held)


# --------------------------------------------------------------------------- verifying


def examine(
    part: Arrived, space: Space, root: BlockKey, layers: Container[int] | None = None
) -> Header:
    """Open and verify a frame in host memory, as far as that was not done. For a worker.

    Raises:
        CodecError: if it is damaged, or not the part that was asked for.
    """
    header = part.header or open_part(part, space, root)
    if not part.checked and part.resident is None:
        if layers is None and part.blocks is not None and not header.folded:
            if not part.blocks.right(part.number, header.digests):
                raise IntegrityError("a section is damaged; treat the part as missing")
        else:
            verify(header, part.memory, layers, part.base)
        if layers is None:
            part.checked = True
    return header


def open_part(part: Arrived, space: Space, root: BlockKey) -> Header:
    """Open the header of a frame, unless that was done.

    Raises:
        CodecError: if it is damaged, or not of the part that was asked for.
    """
    header = part.header
    if header is None:
        found = part.found
        header = open_frame(part.memory, space, found.part, found.generation, root)
        part.header = header
    return header


def _sections(header: Header, layers: Container[int] | None) -> Sequence[Section]:
    return header.sections if layers is None else [s for s in header.sections if s.layer in layers]


def submit_folds(
    device: Device, parts: Sequence[Arrived], layers: Container[int] | None, sent: list[Sent]
) -> torch.Tensor:
    """Submit the checksums of frames in device memory; for :func:`wrong_folds` once it is done.

    ``sent`` gets the work, also if the device fails.

    Raises:
        BackendError: if the device refuses.
    """
    pieces = []
    for part in parts:
        assert part.resident is not None
        tensor = part.resident.buffer.tensor
        header = part.resident.header
        pieces += [tensor[s.offset : s.end] for s in _sections(header, layers)]
    with submitting(device, sent):
        return device.folds(pieces, device.loads)


def wrong_folds(
    parts: Sequence[Arrived], layers: Container[int] | None, numbers: torch.Tensor
) -> list[Arrived]:
    """Parts of which a section does not have the checksum that its header says."""
    digests = iter(fold_digests(numbers))
    wrong = []
    for part in parts:
        assert part.resident is not None
        header = part.resident.header
        due = [
            digest
            for section, digest in zip(header.sections, header.digests, strict=True)
            if layers is None or section.layer in layers
        ]
        if list(islice(digests, len(due))) != due:
            wrong.append(part)
    return wrong


# --------------------------------------------------------------------------- writing


def write(order: Order, view: View, layers: Container[int] | None = None) -> None:
    """Write verified parts into a view in host memory. For a worker.

    Raises:
        CodecError: if a section cannot be decoded; its part is then not written.
        LayoutError: if the view does not fit.
    """
    for part in order.parts:
        header = part.header
        assert header is not None
        if part.placed or part.written:
            continue
        copies, sections = part.copies, _sections(header, layers)
        if copies is None and any(section.chain != RAW for section in sections):
            deliver(header, part.memory, view, order.start, layers, part.base)
            continue
        with view.writing():
            if copies is None:
                start = order.start
                copies = raw_pairs(header, sections, part.memory, part.base, view, start)
            for pairs in copies:
                copy_pairs(pairs)


def coded_bytes(parts: Sequence[Arrived], layers: Container[int] | None = None) -> int:
    """Host memory that :func:`send` needs to decode what was not stored raw."""
    return sum(
        padded_bytes(section.raw_bytes)
        for part in parts
        if part.header is not None and part.resident is None
        for section in _sections(part.header, layers)
        if section.chain != RAW
    )


def send(
    target: Target,
    orders: Sequence[Order],
    layers: Container[int] | None,
    room: memoryview | None,
    sent: list[Sent],
) -> dict[int, Arrived]:
    """Submit verified parts to a view in device memory, as one batch. For a worker.

    Args:
        target: Where to.
        orders: What goes where; those that cannot be decoded are left out.
        layers: Model layers to write; None writes all.
        room: :func:`coded_bytes` of memory, which outlives the work.
        sent: Gets the work, also if the device fails.

    Returns:
        By number of the order: the part that could not be decoded.

    Raises:
        BackendError: if the device refuses.
        LayoutError: if the view does not fit; nothing is submitted then.
    """
    view, device, after = target
    assert device is not None
    assert after is not None
    moves: list[Move] = []
    bad: dict[int, Arrived] = {}
    with view.writing():
        at = 0
        for number, order in enumerate(orders):
            mine: list[Move] = []
            for part in order.parts:
                try:
                    at = _moves(part, view, order.start, layers, room, at, mine)
                except CodecError:
                    bad[number] = part
                    break
            else:
                moves += mine
        if moves:
            with submitting(device, sent):
                device.loads.wait(after)
                device.copy(moves, device.loads)
    return bad


def _moves(
    part: Arrived,
    view: View,
    start: int,
    layers: Container[int] | None,
    room: memoryview | None,
    at: int,
    moves: list[Move],
) -> int:
    """Append the copies of one part; where in ``room`` the next one may decode to."""
    header = part.header
    assert header is not None
    for section in _sections(header, layers):
        if not section.raw_bytes:
            continue
        whole, at = _source(part, section, room, at)
        for first, piece in find_pieces(view, section[:4], start, header.tokens, header.per_token):
            some = whole if piece.shape == whole.shape else whole.narrow(1, first, piece.shape[1])
            moves.append(Move(piece, some))
    return at


def _source(
    part: Arrived, section: Section, room: memoryview | None, at: int
) -> tuple[torch.Tensor, int]:
    """A section's decoded bits, in whichever memory they are."""
    if part.resident is not None:
        import torch

        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        size = kind[section.raw_bytes // _count(section.shape)]
        flat = part.resident.buffer.tensor[section.offset : section.offset + section.nbytes]
        return flat.view(size).view(section.shape), at
    data = stored_bytes(section, part.memory, part.base)
    if section.chain != RAW:
        assert room is not None
        data = decode_section(section, data, room[at : at + section.raw_bytes])
        at += padded_bytes(section.raw_bytes)
    return bits_over(data, section.dtype, section.shape), at


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
