"""Reads straight into a view that the engine owns: one byte copied per byte, none by the CPU.

A section goes from its tier into the view where the medium's alignment allows it: stored raw, at
whole pages of the frame, in whole pages of contiguous host memory. Headers and all other sections
of the same frames come along in the same backend call, through staging memory. Everything is
verified where it lies before anybody is told of it; until then, and after a read that failed, the
view holds whatever the medium gave.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import anyio

from tierkv.abc import IoStatus, ReadRequest
from tierkv.blocks import split_part
from tierkv.buffers import Arena
from tierkv.chains import RAW
from tierkv.decisions.types import EvictReason
from tierkv.errors import CodecError, IntegrityError
from tierkv.fitting import section_table
from tierkv.frame import PAGE, header_bytes, padded_bytes, page_round
from tierkv.layout import DTYPE_BYTES
from tierkv.mover.core import INLINE_BYTES
from tierkv.pipeline import open_frame
from tierkv.sections import bits_over, digests, find_pieces, scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkv.abc import Buffer, IoResult, View
    from tierkv.blocks import BlockKey
    from tierkv.buffers import Staging
    from tierkv.decisions.types import FoundPart
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.sections import Pieces

__all__ = ["InPlace", "Place", "fits"]

_INLINE_SECTIONS = 128


class _Spot(NamedTuple):
    """One section: where it is in the frame, and where in the view."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    pieces: Pieces
    direct: memoryview | None  # its memory in the view, if the medium can write there


@dataclass(slots=True, eq=False)
class Place:
    """One part that is read in place.

    Attributes:
        found: Which part.
        nbytes: Most bytes that its frame can have.
        space: Its space.
        root: Root of its key chain.
        view: Where it goes.
        start: Token of the view at which its block starts.
        tokens: Tokens of its block.
        header: Its header, once everything is in place and verified.
        failure: Why it is not in place.
        misfit: Whether the frame is not stored raw after all: it has to be read as a whole.
    """

    found: FoundPart
    nbytes: int
    space: Space
    root: BlockKey
    view: View
    start: int
    tokens: int
    header: Header | None = None
    failure: EvictReason | None = None
    misfit: bool = False
    spots: list[_Spot] = field(default_factory=list)
    lines: list[tuple[int, memoryview]] = field(default_factory=list)


def fits(place: Place) -> bool:
    """Whether a section of the part can be read in place at all."""
    return any(spot.direct is not None for spot in _spots(place))


def _spots(place: Place) -> list[_Spot]:
    """The sections of a raw frame, as its length says that it is one; else none."""
    number = split_part(place.found.part)[1]
    group = place.space.layout.groups[number]
    at, out = header_bytes(group), []
    for row in section_table(place.space, number, place.tokens):
        _, _, dtype, shape = row
        nbytes = DTYPE_BYTES[dtype]
        for size in shape:
            nbytes *= size
        pieces = find_pieces(place.view, row, place.start, place.tokens, group.per_token)
        out.append(_Spot(at, nbytes, dtype, shape, pieces, _direct(at, nbytes, pieces)))
        at += padded_bytes(nbytes)
    # what a tier is charged for a frame are whole pages
    return out if page_round(at) == page_round(place.nbytes) else []


def _direct(offset: int, nbytes: int, pieces: Pieces) -> memoryview | None:
    if len(pieces) != 1 or not nbytes or offset % PAGE or nbytes % PAGE:
        return None
    piece = pieces[0][1]
    if piece.device.type != "cpu" or not piece.is_contiguous() or piece.data_ptr() % PAGE:
        return None
    return _memory(piece)


def _memory(piece: torch.Tensor) -> memoryview:
    import torch

    return piece.detach().view(-1).view(torch.uint8).numpy().data


class InPlace:
    """Parts of one tier on their way into their views: one backend call. Engine-owned."""

    def __init__(self, core: Core, level: Level, places: Sequence[Place]) -> None:
        self._core = core
        self._level = level
        self._requests: list[ReadRequest] = []
        self._into: list[memoryview] = []
        self._owners: list[Place] = []
        self.places = places
        self.job = core.workers.spawn(self._run, name="fetch-in-place")

    @property
    def tier(self) -> str:
        """Name of the tier."""
        return self._level.name

    async def over(self) -> bool:
        """Wait for the end of the read; False if the tier hangs.

        Cancellation: re-raised at the end of the read: until then the view may be written.
        """
        core = self._core
        try:
            return await core.landed(self._level, self.job.ended)
        except asyncio.CancelledError as error:
            cancelled = error
            with anyio.CancelScope(shield=True):
                while True:
                    try:
                        await core.landed(self._level, self.job.ended)
                    except asyncio.CancelledError as again:
                        cancelled = again
                    else:
                        break
            raise cancelled from None

    async def _run(self) -> None:
        core = self._core
        buffer: Buffer | None = None
        try:
            if sum(_rows(p) for p in self.places) <= _INLINE_SECTIONS:
                room = self._find()
            else:
                room = await core.workers.run(self._find)
            buffer = _memory_for(core.staging, room)
            self._lay_out(buffer.memory)
            results = await core.read(self._level, self._requests, self._into)
            self._sort(results)
            left = [p for p in self.places if p.failure is None and not p.misfit]
            if sum(p.found.nbytes for p in left) < INLINE_BYTES:
                bad = _finish(left)
            else:
                bad = await core.workers.run(_finish, left)
            for place in bad:
                found = place.found
                place.failure = EvictReason.DAMAGED
                core.damaged(found.part, found.tier, found.generation, "checksum")
        finally:
            for place in self.places:
                place.spots, place.lines = [], []
                if place.header is None and not place.misfit and place.failure is None:
                    place.failure = EvictReason.FAILED
            self._requests, self._into, self._owners = [], [], []
            if buffer is not None:
                buffer.release()

    def _find(self) -> int:
        """Look up the views' memory; bytes that must go through staging memory."""
        room = 0
        for place in self.places:
            place.spots = _spots(place)
            if not place.spots:
                place.misfit = True
                continue
            room += sum(high - low for low, high in _staged(place))
        return room

    def _lay_out(self, memory: memoryview) -> None:
        """One request per run of neighbouring bytes that goes to one piece of memory."""
        at = 0
        for place in self.places:
            if place.misfit:
                continue
            runs: list[tuple[int, memoryview]] = []
            for low, high in _staged(place):
                runs.append((low, memory[at : at + high - low]))
                at += high - low
            place.lines = list(runs)
            runs += [(s.offset, s.direct) for s in place.spots if s.direct is not None]
            runs.sort(key=lambda run: run[0])
            found = place.found
            for low, into in runs:
                request = ReadRequest(found.part, found.generation, low, len(into))
                self._requests.append(request)
                self._into.append(into)
                self._owners.append(place)

    def _sort(self, results: Sequence[IoResult]) -> None:
        """Note what could not be read, and count what was."""
        for place, result in zip(self._owners, results, strict=True):
            if result.status is not IoStatus.OK and place.failure is None:
                place.failure = self._core.unreadable(place.found, result)
        for place in self.places:
            if place.failure is None and not place.misfit:
                self._core.bytes_copied += place.found.nbytes
                self._core.bytes_copied += sum(s.nbytes for s in place.spots if s.direct is None)


def _memory_for(staging: Staging, nbytes: int) -> Buffer:
    """Staging memory or, where there is none right now, memory of its own.

    Mostly pages of headers. A load waits for one thing at a time: flights get memory in the order
    in which they were started, and a wait of this kind beside theirs could close a circle.
    """
    size = max(nbytes, 1)
    buffer = staging.acquire_nowait(size) if size <= staging.limit else None
    buffer = buffer or Arena(page_round(size)).allocate(size)
    assert buffer is not None
    return buffer


def _rows(place: Place) -> int:
    return len(section_table(place.space, split_part(place.found.part)[1], place.tokens))


def _staged(place: Place) -> list[tuple[int, int]]:
    """Byte ranges of the frame, in whole pages, that do not go into the view directly."""
    out: list[tuple[int, int]] = []
    first = place.spots[0].offset
    whole = page_round(place.nbytes)
    for low, high in [
        (0, first),
        *((s.offset, s.offset + padded_bytes(s.nbytes)) for s in place.spots if s.direct is None),
    ]:
        low, high = low // PAGE * PAGE, min(page_round(high), whole)
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        elif high > low:
            out.append((low, high))
    return out


def _finish(places: Sequence[Place]) -> list[Place]:
    """Verify what was read and copy what was staged; the damaged ones. Runs in a thread."""
    bad = []
    for place in places:
        found = place.found
        try:
            header = open_frame(
                place.lines[0][1], place.space, found.part, found.generation, place.root
            )
            if any(s.chain != RAW for s in header.sections):
                place.misfit = True
                continue
            _verify(place, header)
        except CodecError:
            bad.append(place)
        else:
            place.header = header
    return bad


def _verify(place: Place, header: Header) -> None:
    data = [spot.direct if spot.direct is not None else _line(place, spot) for spot in place.spots]
    found = digests(data, header.folded)
    for section, digest, due in zip(header.sections, found, header.digests, strict=True):
        if digest != due:
            raise IntegrityError(f"layer {section.layer}, {section.tensor!r} is damaged")
    with place.view.writing():
        for spot, memory in zip(place.spots, data, strict=True):
            if spot.direct is None:
                scatter(bits_over(memory, spot.dtype, spot.shape), spot.pieces)


def _line(place: Place, spot: _Spot) -> memoryview:
    """A section's bytes and their padding in staging memory."""
    size = padded_bytes(spot.nbytes)
    for low, memory in place.lines:
        if low <= spot.offset and spot.offset + size <= low + len(memory):
            return memory[spot.offset - low : spot.offset - low + size]
    raise IntegrityError("a section is outside what was read")
