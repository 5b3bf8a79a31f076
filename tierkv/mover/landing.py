"""Landing: the blocks of one window, from where their bytes arrived into the views.

A view in host memory is written when :meth:`Landing.begin` returns. One in a device's memory is
being written then: :meth:`Landing.finish` waits for it, while the next window is read and verified.
Nothing is reported before that.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from tierkv.decisions.types import EvictReason, MissReason
from tierkv.errors import BackendError, CodecError
from tierkv.mover.core import INLINE_BYTES, derivation, stored_part
from tierkv.mover.scattering import (
    Arrived,
    Order,
    coded_bytes,
    examine,
    open_part,
    prepare,
    send,
    submit_folds,
    verify_and_write,
    write,
    wrong_folds,
)
from tierkv.mover.staged import decoding_room
from tierkv.mover.submitted import outlast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.abc import Buffer, StoredPart
    from tierkv.blocks import PartId
    from tierkv.decisions.types import FoundPart
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher, Flight
    from tierkv.mover.inplace import InPlace, Place
    from tierkv.mover.load import LoadPlan
    from tierkv.mover.submitted import Sent

__all__ = ["Landing", "Step", "stop"]


@dataclass(slots=True, eq=False)
class Step:
    """One block of one plan: its parts, and how those that must travel do.

    Attributes:
        plan: The load it belongs to.
        block: Number of the block.
        parts: What the load needs of it.
        flights: Parts that are read as whole frames.
        places: Parts that are read straight into the view.
        held: Parts in the memory of the view's own device.
        cold: Parts that have to be read.
        apart: Whether several batches of others read them: then they are read once more.
    """

    plan: LoadPlan
    block: int
    parts: list[FoundPart]
    flights: dict[PartId, Flight] = field(default_factory=dict)
    places: dict[PartId, tuple[InPlace, Place]] = field(default_factory=dict)
    held: dict[PartId, Arrived] = field(default_factory=dict)
    cold: list[FoundPart] = field(default_factory=list)
    apart: bool = False

    @property
    def start(self) -> int:
        """Token of the view at which the block starts."""
        return self.block * self.plan.space.block_tokens


@dataclass(slots=True, eq=False)
class _Ready:
    """A step whose bytes are in reach, and what came of it."""

    step: Step
    parts: list[Arrived]
    bad: Arrived | None = None
    done: bool = False
    derived: str = ""
    news: list[tuple[int, StoredPart]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(part.found.nbytes for part in self.parts if not part.placed)


def stop(plan: LoadPlan, reason: MissReason) -> None:
    """End a load before the block that it is at; the first reason stays."""
    if plan.progress.reason is None:
        plan.progress.reason = reason


def _on_device(item: _Ready) -> bool:
    return item.step.plan.target.device is not None


class Landing:
    """One window on its way from memory into the views."""

    def __init__(self, core: Core, fetcher: Fetcher, window: Sequence[Step]) -> None:
        self._core = core
        self._fetcher = fetcher
        self._ready: list[_Ready] = []
        self._rooms: list[Buffer] = []
        self._coded: list[tuple[LoadPlan, list[_Ready]]] = []
        self._broken: set[int] = set()  # plans whose device failed
        self.window = window
        self.sent: list[Sent] = []

    async def begin(self, reached: dict[int, int]) -> None:
        """Verify what arrived, and write it or put it on its way.

        Args:
            reached: By id of the plan: the block that it goes on with. Moved on.

        Raises:
            ClosedError: if the engine is closed.
            LayoutError: if a view does not hold the tokens.

        Cancellation: at most one window's copy is waited for; then :meth:`settle`.
        """
        core = self._core
        self._collect(reached)
        await self._fold()
        if sum(item.nbytes for item in self._ready) < INLINE_BYTES:
            self._work()
        else:
            await core.workers.run(self._work)
        for plan, items in self._coded:
            nbytes = sum(coded_bytes(item.parts) for item in items)
            room, buffer = decoding_room(core.staging, nbytes)
            if buffer is not None:
                self._rooms.append(buffer)
            await core.workers.run(self._send, plan, items, room)
        for item in self._ready:
            if item.bad is not None:
                self._refuse(item.step, item.bad)
            if not item.done:
                reached[id(item.step.plan)] = -1  # nothing behind it counts
        self._touch()

    async def finish(self) -> None:
        """Wait until everything is in place, then report it.

        Cancellation: re-raised once nothing writes any more; nothing is reported then.
        """
        try:
            await self.settle()
        except BackendError:
            self._broken |= {id(item.step.plan) for item in self._ready if _on_device(item)}
        for item in self._ready:
            self._account(item)

    async def settle(self) -> None:
        """Wait until nothing of this window is written any more; give its memory back.

        Raises:
            BackendError: if a device fails meanwhile.
        """
        try:
            await outlast(self._core, self.sent)
        finally:
            self.sent = []
            rooms, self._rooms = self._rooms, []
            for room in rooms:
                room.release()

    # ------------------------------------------------------------------ collecting

    def _collect(self, reached: dict[int, int]) -> None:
        for step in self.window:
            name = id(step.plan)
            if step.block != reached.get(name, 0):
                continue  # never past a gap
            parts = self._arrived(step)
            if parts is not None:
                self._ready.append(_Ready(step, parts))
                reached[name] = step.block + 1

    def _arrived(self, step: Step) -> list[Arrived] | None:
        """Bytes of each part of a step; None (and a reason) if one did not arrive."""
        out: list[Arrived] = []
        for found in step.parts:
            part = step.held.get(found.part)
            if part is None:
                part = self._placed(step, found) or self._flown(step, found)
            if part is None:
                part = self._borrowed(found)
            if part is None:
                stop(step.plan, self._why(step, found))
                return None
            out.append(part)
        return out

    @staticmethod
    def _placed(step: Step, found: FoundPart) -> Arrived | None:
        _, place = step.places.get(found.part, (None, None))
        if place is None or place.header is None:
            return None
        return Arrived(found, header=place.header, checked=True, placed=True)

    @staticmethod
    def _flown(step: Step, found: FoundPart) -> Arrived | None:
        flight = step.flights.get(found.part)
        if flight is None or not flight.landed.is_set() or flight.frame is None:
            return None
        return Arrived(found, flight.frame, header=flight.header, checked=flight.checked)

    def _borrowed(self, found: FoundPart) -> Arrived | None:
        core = self._core
        memory = core.levels[found.tier].memory
        if memory is None:
            return None
        buffer = memory.borrow(found.part, found.generation)
        if buffer is None:
            core.lost(found.part, found.tier, found.generation, EvictReason.FAILED)
            return None
        return Arrived(found, buffer.memory, checked=not core.verify_host)

    @staticmethod
    def _why(step: Step, found: FoundPart) -> MissReason:
        failure: EvictReason | None = None
        if found.part in step.places:
            failure = step.places[found.part][1].failure
        if found.part in step.flights:
            failure = step.flights[found.part].failure
        return MissReason.DAMAGED if failure is EvictReason.DAMAGED else MissReason.FAILED

    # ------------------------------------------------------------------ working

    async def _fold(self) -> None:
        """Let devices verify what is in their own memory."""
        pairs: dict[int, list[tuple[Arrived, _Ready]]] = {}
        for item in self._ready:
            mine = [(p, item) for p in item.parts if p.resident is not None and not p.checked]
            if mine:
                pairs.setdefault(id(item.step.plan.target.device), []).extend(mine)
        for group in pairs.values():
            device = group[0][1].step.plan.target.device
            assert device is not None
            parts = [part for part, _ in group]
            try:
                if sum(part.found.nbytes for part in parts) < INLINE_BYTES:
                    numbers = submit_folds(device, parts, None, self.sent)
                else:
                    numbers = await self._core.workers.run(
                        submit_folds, device, parts, None, self.sent
                    )
                await outlast(self._core, self.sent)
            except BackendError:
                self._broken |= {id(item.step.plan) for _, item in group}
                continue
            self.sent.clear()
            wrong = {id(part) for part in wrong_folds(parts, None, numbers)}
            for part, item in group:
                part.checked = id(part) not in wrong
                if not part.checked and item.bad is None:
                    item.bad = part

    def _work(self) -> None:
        """Verify blocks, write those of host views, send the others off. Runs in a thread.

        A plan stops at its first damaged block.
        """
        self._open()
        stopped = set(self._broken)
        away: dict[int, tuple[LoadPlan, list[_Ready]]] = {}
        for item in self._ready:
            plan, name = item.step.plan, id(item.step.plan)
            if name in stopped:
                continue
            if item.bad is not None or not self._examine(item):
                stopped.add(name)
            elif plan.target.device is not None:
                away.setdefault(name, (plan, []))[1].append(item)
            elif self._write(item):
                item.done = True
            else:
                stopped.add(name)
        for plan, items in away.values():
            if any(coded_bytes(item.parts) for item in items):
                self._coded.append((plan, items))
            else:
                self._send(plan, items, None)

    def _open(self) -> None:
        """Open all frames and look all views up, before large copies empty the caches."""
        for _, group in groupby(self._ready, key=lambda item: id(item.step.plan)):
            items = list(group)
            plan = items[0].step.plan
            with nullcontext() if _on_device(items[0]) else plan.view.writing():
                for item in items:
                    for part in item.parts:
                        self._open_part(item, part)

    def _open_part(self, item: _Ready, part: Arrived) -> None:
        plan = item.step.plan
        if part.placed:
            return
        try:
            open_part(part, plan.space, plan.root)
            if not _on_device(item):
                prepare(part, plan.view, item.step.start)
        except CodecError:
            item.bad = item.bad or part

    def _examine(self, item: _Ready) -> bool:
        plan, step = item.step.plan, item.step
        here = plan.target.device is None and plan.view.owned_by_engine
        for part in item.parts:
            flight = step.flights.get(part.found.part)
            fresh = part.resident is None and (flight is None or not flight.checked)
            try:
                if not part.placed and not (here and verify_and_write(part, plan.view)):
                    examine(part, plan.space, plan.root)
            except CodecError:
                item.bad = part
                return False
            assert part.header is not None
            if flight is not None:
                flight.header, flight.checked = part.header, True
            if fresh and self._fetcher.wanted_above(self._core.levels[part.found.tier]):
                item.news.append((part.found.tier, stored_part(part.header)))
            if part.copies is None or part.header.fidelity != "exact":  # raw frames lose nothing
                item.derived = item.derived or derivation(part.header)
        return True

    @staticmethod
    def _write(item: _Ready) -> bool:
        for part in item.parts:
            try:
                write(Order([part], item.step.start), item.step.plan.view)
            except CodecError:
                item.bad = part
                return False
        return True

    def _send(self, plan: LoadPlan, items: Sequence[_Ready], room: memoryview | None) -> None:
        orders = [Order(item.parts, item.step.start) for item in items]
        try:
            bad = send(plan.target, orders, None, room, self.sent)
        except BackendError:
            self._broken.add(id(plan))
            return
        for number, item in enumerate(items):
            item.bad = bad.get(number)
            if item.bad is not None:
                break
            item.done = True

    def _touch(self) -> None:
        """Tell device tiers how long their frames are read."""
        for item in self._ready if self.sent else ():
            for part in item.parts:
                if part.resident is not None:
                    found = part.found
                    resident = self._core.levels[found.tier].resident
                    assert resident is not None
                    resident.touched(found.part, found.generation, self.sent[-1][1])

    # ------------------------------------------------------------------ reporting

    def _refuse(self, step: Step, bad: Arrived) -> None:
        found = bad.found
        flight = step.flights.get(found.part)
        if flight is not None:
            flight.failure, flight.frame = EvictReason.DAMAGED, None
        self._core.damaged(found.part, found.tier, found.generation, "checksum")
        stop(step.plan, MissReason.DAMAGED)

    def _account(self, item: _Ready) -> None:
        core, plan, step = self._core, item.step.plan, item.step
        progress = plan.progress
        if id(plan) in self._broken:
            stop(plan, MissReason.FAILED)
            return
        if not item.done or step.block != progress.blocks:
            return
        progress.blocks = step.block + 1
        progress.derived = progress.derived or item.derived
        core.bytes_copied += item.nbytes
        for tier, stored in item.news:
            self._fetcher.offer(core.levels[tier], [stored], plan.space)
        if step.parts:
            name = core.levels[max(found.tier for found in step.parts)].name
            tokens = plan.tokens_of(step.block)
            progress.by_tier[name] = progress.by_tier.get(name, 0) + tokens
