"""Layer-wise loads: a layer is yielded as soon as it is verified and in place.

One backend call per layer and tier (a layer larger than the staging window, or of more than
:data:`BATCH_PARTS` parts, takes several). The next layer is on its way while the caller computes
with the one it was given.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.abc import IoStatus, ReadRequest
from tierkv.decisions.types import EvictReason
from tierkv.errors import CapacityError, ClosedError, CodecError, LoadIncomplete
from tierkv.frame import ALIGN, header_bytes, page_round
from tierkv.mover.core import INLINE_BYTES, derivation
from tierkv.mover.find import tokens_by_tier
from tierkv.mover.slices import sliced
from tierkv.pipeline import deliver, layer_range, open_frame, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer, IoResult
    from tierkv.decisions.types import FoundPart
    from tierkv.frame import Header
    from tierkv.mover.core import Core
    from tierkv.mover.load import LoadPlan
    from tierkv.workers import Job

__all__ = ["BATCH_PARTS", "LayerLoad"]

_ALIGN = 4096
_INLINE_PARTS = 64
BATCH_PARTS = 512
"""Most parts of one backend call or worker call: to set up more would hold up the loop."""


@dataclass(slots=True, eq=False)
class _Source:
    """One part of the prefix: its whole frame in memory, or a tier to read ranges from."""

    found: FoundPart
    frame: memoryview | None = None
    header: Header | None = None


_Span = tuple[_Source, int, int]


class _Ranges:
    """One layer's byte ranges of several parts of one tier, in staging memory."""

    def __init__(self, core: Core, tier: int, spans: Sequence[_Span]) -> None:
        self._core = core
        self._level = core.levels[tier]
        self._buffer: Buffer | None = None
        self._left = False
        self.spans = spans
        self.results: list[IoResult] = []
        self.memory: list[memoryview] = []
        self.job: Job[None] = core.workers.spawn(self._read, name="fetch-layer")

    async def _read(self) -> None:
        try:
            total = sum(high - low for _, low, high in self.spans)
            self._buffer = await self._core.staging.acquire(total)
            if self._left:
                return  # nobody wants it any more
            offset = 0
            requests = []
            for source, low, high in self.spans:
                found = source.found
                requests.append(ReadRequest(found.part, found.generation, low, high - low))
                self.memory.append(self._buffer.memory[offset : offset + high - low])
                offset += high - low
            self.results = await self._core.read(self._level, requests, self.memory)
        finally:
            if self._left:
                self._release()

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


class LayerLoad:
    """Async iterator over model layer numbers, in order; owned by its match.

    Not atomic: when a layer cannot be loaded it raises
    :class:`~tierkv.errors.LoadIncomplete` and the caller drops the view.
    """

    def __init__(self, core: Core, plan: LoadPlan) -> None:
        self._core = core
        self._plan = plan
        self._order = sorted(
            (layer.index, number)
            for number, group in enumerate(plan.space.layout.groups)
            for layer in group.layers
        )
        self._next = 0
        self._ahead: list[_Ranges] | None = None
        self._landing: list[_Ranges] = []
        self._closed = False
        self._sources: dict[int, list[_Source]] = {}
        for found in plan.found.parts:
            self._sources.setdefault(found.group, []).append(_Source(found))

    def __aiter__(self) -> LayerLoad:
        return self

    async def __anext__(self) -> int:
        if self._closed:
            raise ClosedError("the match of this layer-wise load was left")
        if self._next == len(self._order) or self._plan.found.blocks == 0:
            self.close()
            raise StopAsyncIteration
        layer, group = self._order[self._next]
        try:
            with self._plan.lease:
                await self._load(layer, group)
            if self._closed:
                raise ClosedError("the match of this layer-wise load was left")
            self._next += 1
            if self._next < len(self._order):
                staging = self._core.staging
                # a consumer may take its time with a layer: it must not starve other loads
                if 2 * staging.used <= staging.limit:
                    self._ahead = await self._depart(*self._order[self._next])
            else:
                self._finish()
        except BaseException:
            self.close()
            raise
        return layer

    @property
    def by_tier(self) -> dict[str, int]:
        """Tokens in place by tier (the slowest of a block's parts), once the last layer came."""
        return self._plan.progress.by_tier

    def close(self) -> None:
        """Stop; what is still travelling is given back when it lands. Idempotent."""
        self._closed = True
        for ranges in self._landing:
            ranges.abandon()
        if self._ahead is not None:
            for ranges in self._ahead:
                ranges.leave()
            self._ahead = None

    # ------------------------------------------------------------------ one layer

    async def _load(self, layer: int, group: int) -> None:
        sources = self._sources.get(group, [])
        batches, self._ahead = self._ahead, None
        if batches is None:
            batches = await self._depart(layer, group)
        self._landing = batches
        try:
            await self._in_memory(layer, sources)
            for ranges in batches:
                try:
                    await ranges.job.wait()
                except CapacityError as error:
                    raise LoadIncomplete(layer, str(error)) from error
                if self._closed:
                    raise ClosedError("the match of this layer-wise load was left")
                await self._land(layer, ranges)
                ranges.leave()  # now, not at the end: the next ones may wait for this memory
        finally:
            self._landing = []
            for ranges in batches:
                ranges.leave()

    async def _depart(self, layer: int, group: int) -> list[_Ranges]:
        """Start reading one layer from every tier that the engine cannot address."""
        core = self._core
        bound = self._bound(layer, group)
        full: list[tuple[int, list[_Span]]] = []
        open_: dict[int, tuple[list[_Span], int]] = {}  # by tier: the batch being filled, its bytes
        async for source in sliced(self._sources.get(group, ())):
            tier = source.found.tier
            if core.levels[tier].memory is not None:
                continue
            low, high = self._range(source, layer, bound)
            batch, size = open_.get(tier, ([], 0))
            if batch and (size + high - low > core.window_bytes or len(batch) == BATCH_PARTS):
                full.append((tier, batch))
                batch, size = [], 0
            batch.append((source, low, high))
            open_[tier] = batch, size + high - low
        if self._closed:
            raise ClosedError("the match of this layer-wise load was left")
        full += [(tier, batch) for tier, (batch, _) in open_.items()]
        return [_Ranges(core, tier, batch) for tier, batch in full]

    def _bound(self, layer: int, number: int) -> int:
        """Bytes at the start of a frame that are sure to hold this layer, whatever its codecs.

        Layers stand in the order of the layout, which need not be that of their numbers; no
        section is longer than its raw bytes and its alignment.
        """
        group, tokens = self._plan.space.layout.groups[number], self._plan.space.block_tokens
        bound = header_bytes(group)
        for entry in group.layers:
            bound += sum(group.section_bytes(t, tokens) + ALIGN for t in entry.tensors)
            if entry.index == layer:
                break
        return page_round(bound)

    @staticmethod
    def _range(source: _Source, layer: int, bound: int) -> tuple[int, int]:
        """Page-aligned byte range to read; the first one of a part brings its header along."""
        whole = page_round(source.found.nbytes)
        if source.header is None:
            return 0, min(bound, whole)
        low, high = layer_range(source.header, layer)
        return low // _ALIGN * _ALIGN, min(page_round(high), whole)

    async def _in_memory(self, layer: int, sources: Sequence[_Source]) -> None:
        core = self._core
        ready: list[tuple[_Source, memoryview, int]] = []
        for source in sources:
            if len(ready) == BATCH_PARTS:
                await self._deliver(layer, ready, verified=not core.verify_host)
                ready = []
                await asyncio.sleep(0)
            found = source.found
            memory = core.levels[found.tier].memory
            if memory is None:
                continue
            if source.frame is None:
                buffer = memory.borrow(found.part, found.generation)
                if buffer is None:
                    core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
                    raise LoadIncomplete(layer, "a block vanished from memory")
                source.frame = buffer.memory
            ready.append((source, source.frame, 0))
        await self._deliver(layer, ready, verified=not core.verify_host)

    async def _land(self, layer: int, ranges: _Ranges) -> None:
        ready = []
        for (source, low, _), memory, result in zip(
            ranges.spans, ranges.memory, ranges.results, strict=True
        ):
            found = source.found
            if result.status is not IoStatus.OK:
                self._core.unreadable(found, result)
                raise LoadIncomplete(layer, f"tier read: {result.status.value}")
            ready.append((source, memory, low))
        await self._deliver(layer, ready, verified=False)

    async def _deliver(
        self, layer: int, ready: Sequence[tuple[_Source, memoryview, int]], *, verified: bool
    ) -> None:
        if not ready:
            return
        group = self._plan.space.layout.groups[ready[0][0].found.group]
        nbytes = sum(s.found.nbytes for s, _, _ in ready) // len(group.layers)
        if nbytes < INLINE_BYTES and len(ready) <= _INLINE_PARTS:
            bad = self._copy(layer, ready, verified)
        else:
            bad = await self._core.workers.run(self._copy, layer, ready, verified)
        self._core.bytes_copied += nbytes
        if bad is not None:
            self._core.damaged(bad.part, bad.tier, bad.generation, "checksum")
            raise LoadIncomplete(layer, "a block is damaged")

    def _copy(
        self, layer: int, ready: Sequence[tuple[_Source, memoryview, int]], verified: bool
    ) -> FoundPart | None:
        """Verify and copy one layer of several parts; return the first damaged one."""
        plan = self._plan
        only = (layer,)
        found = None
        try:
            for source, memory, base in ready:
                found = source.found
                if source.header is None:
                    source.header = open_frame(
                        memory, plan.space, found.part, found.generation, plan.root
                    )
                if not verified:
                    verify(source.header, memory, only, base)
            for source, memory, base in ready:
                found = source.found
                assert source.header is not None
                start = found.block * plan.space.block_tokens
                deliver(source.header, memory, plan.view, start, only, base)
                plan.progress.derived = plan.progress.derived or derivation(source.header)
        except CodecError:
            return found
        return None

    def _finish(self) -> None:
        plan, progress = self._plan, self._plan.progress
        progress.blocks = plan.found.blocks
        progress.by_tier = tokens_by_tier(self._core, plan.found, plan.space.block_tokens)
