"""Layer-wise loads: a layer is yielded as soon as it is verified and in place.

One backend call per layer and tier (a layer larger than the staging window, or of more than
:data:`BATCH_PARTS` parts, takes several). The next layers are on their way while the caller
computes with the one it was given: :data:`LAYERS_AHEAD` of them, as far as staging memory that
nobody else waits for allows. The view itself is written only while the caller waits for a layer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from tierkv.abc import IoStatus
from tierkv.decisions.types import EvictReason
from tierkv.errors import BackendError, CapacityError, ClosedError, CodecError, LoadIncomplete
from tierkv.mover.core import INLINE_BYTES, derivation
from tierkv.mover.find import tokens_by_tier
from tierkv.mover.ranges import BATCH_PARTS, LAYERS_AHEAD, Reader, Source
from tierkv.mover.scattering import (
    Arrived,
    Order,
    arrived_on,
    coded_bytes,
    examine,
    send,
    submit_folds,
    write,
    wrong_folds,
)
from tierkv.mover.slices import sliced
from tierkv.mover.staged import decoding_room
from tierkv.mover.submitted import outlast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.decisions.types import FoundPart
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.load import LoadPlan
    from tierkv.mover.ranges import Ranges
    from tierkv.mover.submitted import Sent

__all__ = ["BATCH_PARTS", "LAYERS_AHEAD", "LayerLoad"]

_INLINE_PARTS = 64


class LayerLoad:
    """Async iterator over model layer numbers, in order; owned by its match.

    Not atomic: when a layer cannot be loaded it raises
    :class:`~tierkv.errors.LoadIncomplete` and the caller drops the view.
    """

    def __init__(self, core: Core, plan: LoadPlan) -> None:
        plan.aim(core)
        self._core = core
        self._plan = plan
        self._order = sorted(
            (layer.index, number)
            for number, group in enumerate(plan.space.layout.groups)
            for layer in group.layers
        )
        self._next = 0
        self._landing: list[Ranges] = []
        self._closed = self._begun = False
        self._sources: dict[int, list[Source]] = {}
        self._reader = Reader(core, plan, self._order, self._sources)

    async def _begin(self) -> None:
        """Note where each part is."""
        plan = self._plan
        async for found in sliced(plan.found.parts):
            level = self._core.levels[found.tier]
            held = arrived_on(plan.target.device, level, found, plan.space, plan.root)
            header = held.header if held is not None else None
            self._sources.setdefault(found.group, []).append(Source(found, header, held=held))
        self._begun = True

    def __aiter__(self) -> LayerLoad:
        return self

    async def __anext__(self) -> int:
        self._check_open()
        if self._next == len(self._order) or self._plan.found.blocks == 0:
            self.close()
            raise StopAsyncIteration
        layer, group = self._order[self._next]
        try:
            with self._plan.lease:
                if not self._begun:
                    await self._begin()
                await self._reader.depart(self._next)
                await self._load(layer, group)
            self._check_open()
            self._reader.opened(group)
            self._next += 1
            if self._next < len(self._order):
                await self._reader.depart(self._next, asked=False)
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
        self._reader.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the match of this layer-wise load was left")

    # ------------------------------------------------------------------ one layer

    async def _load(self, layer: int, group: int) -> None:
        batches = self._landing = self._reader.take()
        try:
            await self._in_memory(layer, self._sources.get(group, []))
            for ranges in batches:
                await self._arrive(layer, ranges)
                again = ranges.missed(layer)
                if again:  # behind the others, which have what they need already
                    gone = {id(source) for source, _, _ in again}
                    self._reader.drop()
                    batches += await self._reader.start(layer, again) or ()
                    await self._land(layer, ranges, gone)
                else:
                    await self._land(layer, ranges, set())
                ranges.leave()  # now, not at the end: the next ones may wait for this memory
        finally:
            self._landing = []
            for ranges in batches:
                ranges.leave()

    async def _arrive(self, layer: int, ranges: Ranges) -> None:
        if not await self._core.landed(ranges.level, ranges.job.ended):
            raise LoadIncomplete(layer, f"tier {ranges.level.name!r} does not answer")
        try:
            await ranges.job.wait()
        except CapacityError as error:
            raise LoadIncomplete(layer, str(error)) from error
        self._check_open()

    async def _in_memory(self, layer: int, sources: Sequence[Source]) -> None:
        core = self._core
        ready: list[tuple[Source, Arrived]] = []
        for source in sources:
            if len(ready) == BATCH_PARTS:
                await self._deliver(layer, ready)
                ready = []
                await asyncio.sleep(0)
            found = source.found
            level = core.levels[found.tier]
            if source.held is not None:
                ready.append((source, source.held))
            elif level.memory is not None:
                if source.frame is None:
                    source.frame = self._borrow(layer, level, found)
                checked = not core.verify_host
                part = Arrived(found, source.frame, header=source.header, checked=checked)
                ready.append((source, part))
        await self._deliver(layer, ready)

    def _borrow(self, layer: int, level: Level, found: FoundPart) -> memoryview:
        assert level.memory is not None
        buffer = level.memory.borrow(found.part, found.generation)
        if buffer is None:
            self._core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
            raise LoadIncomplete(layer, "a block vanished from memory")
        return buffer.memory

    async def _land(self, layer: int, ranges: Ranges, without: set[int]) -> None:
        ready = []
        for (source, low, _), memory, result in zip(
            ranges.spans, ranges.memory, ranges.results, strict=True
        ):
            if result.status is not IoStatus.OK:
                self._core.unreadable(source.found, result)
                raise LoadIncomplete(layer, f"tier read: {result.status.value}")
            if id(source) not in without:
                ready.append((source, Arrived(source.found, memory, low, header=source.header)))
        await self._deliver(layer, ready)

    # ------------------------------------------------------------------ into the view

    async def _deliver(self, layer: int, ready: Sequence[tuple[Source, Arrived]]) -> None:
        """Verify and write one layer of several parts; nothing is on its way afterwards."""
        if not ready:
            return
        core = self._core
        group = self._plan.space.layout.groups[ready[0][0].found.group]
        nbytes = sum(s.found.nbytes for s, _ in ready) // len(group.layers)
        small = nbytes < INLINE_BYTES and len(ready) <= _INLINE_PARTS
        parts = [part for _, part in ready]
        sent: list[Sent] = []
        room = buffer = None
        try:
            bad = await self._fold(layer, parts, small, sent)
            if bad is None:
                call = (layer, ready, sent)
                bad = self._work(*call) if small else await core.workers.run(self._work, *call)
            coded = 0 if bad is not None or not self._away else coded_bytes(parts, (layer,))
            if coded:
                room, buffer = decoding_room(core.staging, coded)
                bad = await core.workers.run(self._send, layer, parts, room, sent)
            self._touch(parts, sent)
            await outlast(self._core, sent)
        except BackendError as error:
            raise LoadIncomplete(layer, str(error)) from error
        finally:
            try:
                with suppress(
                    BackendError, ClosedError
                ):  # the first failure is told, and it is logged
                    await outlast(self._core, sent)
            finally:
                if buffer is not None:
                    buffer.release()
        core.bytes_copied += nbytes
        if bad is not None:
            core.damaged(bad.part, bad.tier, bad.generation, "checksum")
            raise LoadIncomplete(layer, "a block is damaged")

    @property
    def _away(self) -> bool:
        return self._plan.target.device is not None

    async def _fold(
        self, layer: int, parts: Sequence[Arrived], small: bool, sent: list[Sent]
    ) -> FoundPart | None:
        """Let the device verify what is in its own memory; the first damaged part."""
        held = [part for part in parts if part.resident is not None]
        device = self._plan.target.device
        if not held or device is None or not self._core.verify_host:
            return None
        call = (device, held, (layer,), sent)
        if small:
            numbers = submit_folds(*call)
        else:
            numbers = await self._core.workers.run(submit_folds, *call)
        await outlast(self._core, sent)
        sent.clear()
        wrong = wrong_folds(held, (layer,), numbers)
        return wrong[0].found if wrong else None

    def _work(
        self, layer: int, ready: Sequence[tuple[Source, Arrived]], sent: list[Sent]
    ) -> FoundPart | None:
        """Verify one layer of several parts, then write it; the first damaged one. In a thread."""
        plan = self._plan
        only = (layer,)
        found = None
        try:
            for source, part in ready:
                found = part.found
                source.header = examine(part, plan.space, plan.root, only)
                plan.progress.derived = plan.progress.derived or derivation(source.header)
                if plan.exact and plan.progress.derived:
                    return found  # not what it was looked up as
            parts = [part for _, part in ready]
            if self._away:
                return None if coded_bytes(parts, only) else self._send(layer, parts, None, sent)
            for part in parts:
                found = part.found
                write(self._order_of(part), plan.view, only)
        except CodecError:
            return found
        return None

    def _order_of(self, part: Arrived) -> Order:
        return Order([part], part.found.block * self._plan.space.block_tokens)

    def _send(
        self, layer: int, parts: Sequence[Arrived], room: memoryview | None, sent: list[Sent]
    ) -> FoundPart | None:
        orders = [self._order_of(part) for part in parts]
        bad = send(self._plan.target, orders, (layer,), room, sent)
        return next(iter(bad.values())).found if bad else None

    def _touch(self, parts: Sequence[Arrived], sent: Sequence[Sent]) -> None:
        """Tell device tiers how long their frames are read."""
        for part in parts:
            resident = self._core.levels[part.found.tier].resident
            if part.resident is not None and resident is not None and sent:
                resident.touched(part.found.part, part.found.generation, sent[-1][1])

    def _finish(self) -> None:
        plan, progress = self._plan, self._plan.progress
        progress.blocks = plan.found.blocks
        progress.by_tier = tokens_by_tier(self._core, plan.found, plan.space.block_tokens)
