"""Byte ranges of layers: where they are in each frame, and their reads, ahead of who wants them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from tierkv.abc import ReadRequest
from tierkv.errors import ClosedError, LayoutError, LoadIncomplete
from tierkv.fitting import section_table
from tierkv.frame import ALIGN, PAGE, header_bytes, padded_bytes, page_round
from tierkv.layout import DTYPE_BYTES
from tierkv.mover.slices import sliced
from tierkv.pipeline import layer_range

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkv.abc import Buffer, IoResult
    from tierkv.decisions.types import FoundPart
    from tierkv.frame import Header
    from tierkv.layout import Space
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.load import LoadPlan
    from tierkv.mover.scattering import Arrived
    from tierkv.workers import Job

__all__ = ["BATCH_PARTS", "LAYERS_AHEAD", "Ranges", "Reader", "Source", "Span"]

BATCH_PARTS = 512
"""Most parts of one backend call or worker call: to set up more would hold up the loop."""
LAYERS_AHEAD = 3
"""Most layers that are read before the caller asks for them."""


@dataclass(slots=True, eq=False)
class Source:
    """One part of the prefix: in memory as a whole, or in a tier to read ranges from.

    Attributes:
        found: Which part, and where.
        header: Its header, once it was opened.
        frame: Its frame in a memory tier.
        held: Its frame in the memory of the view's own device.
        asked: Whether a read that brings its header along was started.
    """

    found: FoundPart
    header: Header | None = None
    frame: memoryview | None = None
    held: Arrived | None = None
    asked: bool = False


Span = tuple[Source, int, int]
"""A source and the byte range ``[low, high)`` of its frame."""


class _RawLayout:
    """Where the layers of a frame are if all of it was stored raw, known before it is opened."""

    def __init__(self, space: Space, group: int, tokens: int) -> None:
        at = header_bytes(space.layout.groups[group])
        self._ranges: dict[int, tuple[int, int]] = {}
        for layer, _, dtype, shape in section_table(space, group, tokens):
            end = at + padded_bytes(prod(shape) * DTYPE_BYTES[dtype])
            low, _ = self._ranges.get(layer, (at, end))
            self._ranges[layer] = low, end
            at = end
        self.frame_bytes = at

    def __getitem__(self, layer: int) -> tuple[int, int]:
        """Byte range ``[low, high)`` of a layer."""
        return self._ranges[layer]


def _first_range(space: Space, group: int, layer: int) -> int:
    """Bytes at the start of a frame that are sure to hold this layer, whatever its codecs.

    Layers stand in the order of the layout, which need not be that of their numbers; no section
    is longer than its raw bytes and its alignment.
    """
    entries = space.layout.groups[group]
    bound = header_bytes(entries)
    for entry in entries.layers:
        bound += sum(entries.section_bytes(t, space.block_tokens) + ALIGN for t in entry.tensors)
        if entry.index == layer:
            break
    return page_round(bound)


def _pages(low: int, high: int, frame_bytes: int) -> tuple[int, int]:
    """The whole pages of a frame that hold a byte range."""
    return low // PAGE * PAGE, min(page_round(high), page_round(frame_bytes))


class Ranges:
    """One layer's byte ranges of several parts of one tier, in staging memory. Engine-owned."""

    def __init__(self, core: Core, level: Level, spans: Sequence[Span]) -> None:
        self._core = core
        self._buffer: Buffer | None = None
        self._left = False
        self.level = level
        self.spans = spans
        self.nbytes = sum(high - low for _, low, high in spans)
        self.results: list[IoResult] = []
        self.memory: list[memoryview] = []
        self.job: Job[None] = core.workers.spawn(self._read, name="fetch-layer")

    async def _read(self) -> None:
        core = self._core
        try:
            self._buffer = await core.staging.acquire(self.nbytes)
            if self._left:
                return  # nobody wants it any more
            offset = 0
            requests = []
            for source, low, high in self.spans:
                found = source.found
                requests.append(ReadRequest(found.part, found.generation, low, high - low))
                self.memory.append(self._buffer.memory[offset : offset + high - low])
                offset += high - low
            self.results = await core.read(self.level, requests, self.memory)
            core.bytes_copied += self.nbytes
        finally:
            if self._left:
                self._release()

    def missed(self, layer: int) -> list[Span]:
        """What has to be read again, as frames turned out not to be raw: its right ranges.

        Damaged headers are left to whoever verifies.
        """
        again: list[Span] = []
        for source, low, high in self.spans:
            if source.header is None:
                continue
            try:
                first, last = layer_range(source.header, layer)
            except LayoutError:
                continue
            if first < low or last > high:
                nbytes = self.level.backend.longest(source.found.nbytes)
                again.append((source, *_pages(first, last, nbytes)))
        return again

    def abandon(self) -> None:
        """Say that nobody wants it any more; whoever waits for it still calls :meth:`leave`."""
        self._left = True

    def leave(self) -> None:
        """Give the memory back now, or as soon as the read is over. Idempotent."""
        self._left = True
        if self.job.done():
            self._release()

    def _release(self) -> None:
        self.memory = []
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


class _Ahead(NamedTuple):
    """A layer on its way: its number in the order, and its reads."""

    number: int
    batches: list[Ranges]

    @property
    def nbytes(self) -> int:
        return sum(ranges.nbytes for ranges in self.batches)


class Reader:
    """Reads layers in order from tiers that neither host nor device can address in place.

    Args:
        core: The engine's core.
        plan: What is loaded.
        order: Pairs (model layer, group) in the order in which they are wanted.
        sources: The parts, by group.
    """

    def __init__(
        self,
        core: Core,
        plan: LoadPlan,
        order: Sequence[tuple[int, int]],
        sources: dict[int, list[Source]],
    ) -> None:
        self._core = core
        self._plan = plan
        self._order = order
        self._ahead: deque[_Ahead] = deque()
        self._closed = False
        self._raw: dict[tuple[int, int], _RawLayout] = {}
        self._all = sources
        self._sources: dict[int, list[Source]] = {}
        self._tiers: set[int] = set()
        self._certain: set[int] = set()  # groups of which every layer's place is known

    async def _find(self, group: int) -> list[Source]:
        """Parts of a group that have to be read."""
        known = self._sources.get(group)
        if known is not None:
            return known
        away, raw = [], True
        layer = self._plan.space.layout.groups[group].layers[0].index
        async for source in sliced(self._all.get(group, ())):
            tier = source.found.tier
            if self._core.levels[tier].memory is None and source.held is None:
                away.append(source)
                self._tiers.add(tier)
                raw = raw and self._raw_range(source, layer) is not None
        if raw:
            self._certain.add(group)
        self._sources[group] = away
        return away

    def opened(self, group: int) -> None:
        """Say that a layer of this group came: all its headers are known now."""
        self._certain.add(group)

    def take(self) -> list[Ranges]:
        """The reads of the next layer; the caller leaves them."""
        return self._ahead.popleft().batches

    def close(self) -> None:
        """Give back what was read ahead, as it lands. Idempotent."""
        self._closed = True
        self.drop()

    async def depart(self, first: int, *, asked: bool = True) -> None:
        """Start reading layers from number ``first`` on, as many as may be on their way.

        Args:
            first: Number in the order; what is under way already is left alone.
            asked: Whether somebody waits for the first one.

        Raises:
            ClosedError: if the engine is closed, or this reader.
            LoadIncomplete: if the tier of the first one fails at present.
        """
        for number in range(first, min(first + 1 + LAYERS_AHEAD, len(self._order))):
            if self._ahead and self._ahead[-1].number >= number:
                continue
            wanted = asked and number == first
            layer, group = self._order[number]
            first_time = group not in self._sources
            sources = await self._find(group)
            room = None if wanted else self._room()
            if not wanted and not (first_time or group in self._certain):
                return
            bound = _first_range(self._plan.space, group, layer)
            spans = ((source, *self._range(source, layer, bound)) for source in sources)
            batches = await self.start(layer, spans, room)
            if batches is None:
                return
            for source in sources:
                source.asked = True
            self._ahead.append(_Ahead(number, batches))

    def _room(self) -> int:
        """Memory that a layer may take although nobody waits for it yet.

        A consumer may take its time with a layer: it must not starve other loads.
        """
        core, staging = self._core, self._core.staging
        mine = sum(ahead.nbytes for ahead in self._ahead)
        if mine and staging.waiting:
            return -1
        if not all(core.usable(core.levels[tier]) for tier in self._tiers):
            return -1
        return staging.limit // 2 - max(staging.used, mine)

    def drop(self) -> None:
        """Give back what was read ahead; it is read again when its time comes.

        For whoever has to wait for memory meanwhile: what it holds others may be waiting for.
        """
        for ahead in self._ahead:
            for ranges in ahead.batches:
                ranges.leave()
        self._ahead.clear()

    async def start(
        self, layer: int, spans: Iterable[Span], room: int | None = None
    ) -> list[Ranges] | None:
        """Start reading ranges of one layer, one batch per tier as far as they fit one.

        None if they take more than ``room``: nothing is read then.

        Raises:
            ClosedError: if the engine is closed, or this reader; nothing is then under way.
            LoadIncomplete: if a tier fails at present.
        """
        core = self._core
        full: list[tuple[int, list[Span]]] = []
        open_: dict[int, tuple[list[Span], int]] = {}  # by tier: the batch being filled, its bytes
        async for span in sliced(spans):
            source, low, high = span
            tier = source.found.tier
            batch, size = open_.get(tier, ([], 0))
            if batch and (size + high - low > core.window_bytes or len(batch) == BATCH_PARTS):
                full.append((tier, batch))
                batch, size = [], 0
            batch.append(span)
            open_[tier] = batch, size + high - low
        full += [(tier, batch) for tier, (batch, _) in open_.items()]
        if room is not None and room < sum(high - low for _, b in full for _, low, high in b):
            return None
        for tier in open_:
            if not core.usable(core.levels[tier]):
                raise LoadIncomplete(layer, f"tier {core.levels[tier].name!r} fails at present")
        if self._closed:
            raise ClosedError("the match of this layer-wise load was left")
        return [Ranges(core, core.levels[tier], batch) for tier, batch in full]

    def _range(self, source: Source, layer: int, bound: int) -> tuple[int, int]:
        """Page-aligned byte range to read; the first one of a part brings its header along."""
        nbytes = self._frame_bytes(source)
        if source.header is not None:
            return _pages(*layer_range(source.header, layer), nbytes)
        raw = self._raw_range(source, layer)
        if raw is None or not source.asked:
            return _pages(0, bound if raw is None else raw[1], nbytes)
        return _pages(*raw, nbytes)

    def _raw_range(self, source: Source, layer: int) -> tuple[int, int] | None:
        """Where the layer is, if the length of the frame says that it was stored raw."""
        found, plan = source.found, self._plan
        key = (found.group, plan.tokens_of(found.block))
        raw = self._raw.get(key)
        if raw is None:
            raw = self._raw[key] = _RawLayout(plan.space, *key)
        # what a tier is charged for a frame are whole pages
        same = page_round(raw.frame_bytes) == page_round(self._frame_bytes(source))
        return raw[layer] if same else None

    def _frame_bytes(self, source: Source) -> int:
        """The length of the frame, or a few bytes more."""
        return self._core.levels[source.found.tier].backend.longest(source.found.nbytes)
