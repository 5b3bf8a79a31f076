"""Stores that follow the model: each layer is gathered as soon as it is computed.

Room is reserved, and memory taken, before the first layer comes, for as long a prefix of the new
parts as there is memory for: in the first tier itself where frames are built in place, else in
staging memory, of which such stores take a window's worth at most. Everything else is gathered at
the end, as in any store. Nothing is visible, and nobody waits for it, before the last layer came.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from tierkv.device import is_over
from tierkv.device.bits import copy_move
from tierkv.errors import CapacityError
from tierkv.mover.batching import Begun, staged_bytes
from tierkv.mover.core import INLINE_BYTES, SLICE_BYTES
from tierkv.mover.gathering import settled, submit, submit_sums
from tierkv.mover.holding import Reserved
from tierkv.mover.reserving import reserve_once, writing
from tierkv.mover.slices import SLICE, sliced
from tierkv.mover.staged import stage_nowait
from tierkv.mover.store import store

if TYPE_CHECKING:
    from tierkv.abc import Event
    from tierkv.mover.behind import WriteBehind
    from tierkv.mover.core import Core
    from tierkv.mover.gathering import Gather
    from tierkv.mover.plans import NewPart, StorePlan
    from tierkv.mover.writing import Writing

__all__ = ["Layering"]


class Layering:
    """One store, layer by layer. Belongs to one task.

    Args:
        core: What movements need.
        behind: Takes the copies onwards.
        plan: What to store.
    """

    def __init__(self, core: Core, behind: WriteBehind, plan: StorePlan) -> None:
        self.plan = plan
        self._core = core
        self._behind = behind
        self._begun: list[Begun] = []
        self._flying: list[tuple[Gather, int]] = []
        self._staged = 0
        self._reserved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the frames that are filled layer by layer."""
        return sum(begun.work.nbytes for begun in self._begun)

    # ------------------------------------------------------------------ room

    async def begin(self) -> None:
        """Reserve room for as many parts, from the first, as there is memory for.

        Cancellation: call :meth:`abandon` afterwards.
        """
        plan = self.plan
        batch: list[NewPart] = []
        size, most = 0, min(SLICE_BYTES, self._core.window_bytes)
        parts = plan.parts = iter(plan.parts)
        async for new in sliced(parts):
            nbytes = staged_bytes(self._core, plan, new)
            if batch and (size + nbytes > most or len(batch) == SLICE):
                left = self._reserve(batch)
                if left:
                    plan.parts = chain(left, (new,), parts)
                    return
                batch, size = [], 0
            batch.append(new)
            size += nbytes
        plan.parts = self._reserve(batch) if batch else ()

    def _reserve(self, batch: list[NewPart]) -> list[NewPart]:
        """Take room for a batch, as far as there is; return the rest. Atomic."""
        core, level = self._core, self._core.levels[0]
        in_place = level.memory is not None or level.resident is not None
        if core.hangs(level) or (not in_place and self._staged >= core.window_bytes):
            return batch
        reservation, pipeline = reserve_once(core, self.plan, level, batch, self._reserved)
        room = Reserved(core, self.plan, level, batch, reservation, pipeline, announced=False)
        work = writing(room, gathered=True)
        self._begun.append(Begun(batch, work, []))
        work.allocate()
        skipped = (i for i, outcome in enumerate(work.outcomes) if outcome.skip is not None)
        good = min(self._stage(work), next(skipped, len(batch)))
        work.keep_first(good)
        self._begun.pop()
        if good:
            self._begun.append(Begun(batch[:good], work, []))
        self._reserved += work.nbytes
        return batch[good:]

    def _stage(self, work: Writing) -> int:
        """Take staging memory for a batch; number of the first part that gets none."""
        core = self._core
        wanted = work.to_stage()
        size, good = 0, []
        for index, nbytes in wanted:
            size += nbytes
            if self._staged + size > core.window_bytes:
                break
            good.append((index, nbytes))
        short = {index for index, _ in wanted[len(good) :]}  # perhaps the second piece of a part
        first = min(short, default=len(work.outcomes))
        good = [(index, nbytes) for index, nbytes in good if index < first]
        sizes = [nbytes for _, nbytes in good]
        try:
            slices = stage_nowait(core.staging, sizes, background=False)
            # whoever waits for memory while the model computes has to find a whole window of it
            probe = core.staging.acquire_nowait(core.window_bytes) if slices else None
        except CapacityError:
            slices, probe = None, None
        if probe is not None:
            probe.release()
        if slices is None or (slices and probe is None):
            for piece in slices or ():
                piece.release()
            return wanted[0][0]
        for (index, nbytes), piece in zip(good, slices, strict=True):
            work.take(index, piece)
            self._staged += nbytes
        return first

    # ------------------------------------------------------------------ layers

    async def gather(self, layer: int, ready: Event | None) -> None:
        """Copy one layer's sections of every part that has memory.

        Where a device copies, this returns once the copies are submitted, unless more than a
        window of them is under way.

        Args:
            layer: Number of the model layer.
            ready: What the device has to wait for.

        Raises:
            LayoutError: if the view does not fit the space.

        Cancellation: re-raised once no thread reads the caller's memory any more; copies of a
        device go on, see :meth:`abandon`.
        """
        core, plan = self._core, self.plan
        plan.ready = ready
        groups = plan.space.layout.groups
        mine = {n for n, g in enumerate(groups) if any(x.index == layer for x in g.layers)}
        begun = [b for b in self._begun if any(new.group in mine for new in b.parts)]
        share = {n: max(1, len(groups[n].layers)) for n in mine}
        nbytes = sum(
            b.work.pipeline.raw_bytes(new.group, new.tokens) // share[new.group]
            for b in begun
            for new in b.parts
            if new.group in mine
        )
        before = [len(b.gathers) for b in begun]
        if nbytes < INLINE_BYTES:
            _copy(begun, layer)
        else:
            await core.workers.run(_copy, begun, layer)
        core.bytes_gathered += nbytes
        fresh = [g for b, n in zip(begun, before, strict=True) for g in b.gathers[n:]]
        self._flying += [(g, nbytes // len(fresh)) for g in fresh]
        await self._drain(core.window_bytes)

    async def _drain(self, limit: int) -> None:
        """Wait until no more than this many bytes are under way."""
        self._flying = [(g, n) for g, n in self._flying if not is_over(g.event)]
        while sum(n for _, n in self._flying) > limit:
            gather = self._flying[0][0]
            # a device that fails is dealt with at the end, where whatever it gathered is skipped
            with suppress(Exception):
                await gather.device.wait(gather.event)
            del self._flying[0]

    # ------------------------------------------------------------------ the end

    async def finish(self) -> None:
        """Seal and publish what was gathered, then store the rest.

        Cancellation: as :func:`tierkv.mover.store.store`; call :meth:`abandon` afterwards.
        """
        for item in self._begun:
            submit_sums(item.work, item.gathers)
        await store(self._core, self._behind, [self.plan], self._begun)

    async def abandon(self) -> None:
        """Roll back whatever is not published, once no copy touches anything. Idempotent.

        Cancellation: re-raised afterwards.
        """
        try:
            await settled(self._core, [gather for b in self._begun for gather in b.gathers])
        finally:
            begun, self._begun = self._begun, []
            for item in begun:
                if not item.work.handed_over:
                    item.work.abandon()


def _copy(begun: list[Begun], layer: int) -> None:
    import torch

    for item in begun:
        if item.work.device is not None:
            submit([item.work], item.gathers, layer)
            continue
        with torch.inference_mode():
            for move in item.work.moves(layer):
                copy_move(move)
