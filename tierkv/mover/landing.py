"""Landing: the blocks of one window, from where their bytes arrived into the views.

A view in host memory is written when :meth:`Landing.begin` returns. One in a device's memory is
being written then: :meth:`Landing.finish` waits for it, while the next window is read and verified.
Nothing is reported before that.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from tierkv.decisions.types import EvictReason, MissReason
from tierkv.errors import BackendError, CodecError
from tierkv.mover.collecting import collect
from tierkv.mover.core import INLINE_BYTES, derivation, stored_part
from tierkv.mover.rawparts import (
    is_right,
    land_run,
    prepare_all,
    together_bytes,
    verify_and_write,
    write_together,
)
from tierkv.mover.scattering import (
    Arrived,
    Order,
    coded_bytes,
    examine,
    open_part,
    send,
    submit_folds,
    write,
    wrong_folds,
)
from tierkv.mover.staged import decoding_room
from tierkv.mover.steps import Ready, Step, asks_to_stop, never, on_device, stop
from tierkv.mover.submitted import outlast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import Buffer
    from tierkv.mover.core import Core
    from tierkv.mover.fetch import Fetcher
    from tierkv.mover.load import LoadPlan
    from tierkv.mover.submitted import Sent

__all__ = ["Landing"]


class Landing:
    """One window on its way from memory into the views."""

    def __init__(self, core: Core, fetcher: Fetcher, window: Sequence[Step]) -> None:
        self._core = core
        self._fetcher = fetcher
        self._ready: list[Ready] = []
        self._rooms: list[Buffer] = []
        self._coded: list[tuple[LoadPlan, list[Ready]]] = []
        self._broken: set[int] = set()  # plans whose device failed
        self._above = False  # whether a faster tier may want what was verified
        self._stopped: Callable[[], bool] = never
        self.window = window
        self.sent: list[Sent] = []

    async def begin(self, reached: dict[int, int]) -> None:
        """Verify what arrived, and write it or put it on its way.

        Args:
            reached: By id of the plan: the block that it goes on with. Moved on.

        Raises:
            ClosedError: if the engine is closed.
            LayoutError: if a view does not hold the tokens.

        Cancellation: a thread that copies is waited for until it is done with the blocks that it
            is at (1 MiB or one; 32 MiB where torch copies with strides); then :meth:`settle`.
        """
        core = self._core
        self._above = any(map(self._fetcher.wanted_above, core.levels))
        self._ready = collect(core, self.window, reached)
        if any(map(on_device, self._ready)):
            await self._fold()
        self._stopped = asks_to_stop()
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
            self._broken |= {id(item.step.plan) for item in self._ready if on_device(item)}
        self.account()

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

    # ------------------------------------------------------------------ working

    async def _fold(self) -> None:
        """Let devices verify what is in their own memory."""
        pairs: dict[int, list[tuple[Arrived, Ready]]] = {}
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
        away: list[tuple[LoadPlan, list[Ready]]] = []
        for _, group in groupby(self._ready, key=lambda item: id(item.step.plan)):
            items = list(group)
            plan = items[0].step.plan
            if id(plan) in self._broken:
                continue
            if not on_device(items[0]):
                with plan.view.writing():
                    self._land(items)
            else:
                fine = takewhile(lambda item: item.bad is None and self._examine(item), items)
                away.append((plan, list(fine)))
            if self._stopped():
                return
        for plan, items in away:
            if any(coded_bytes(item.parts) for item in items):
                self._coded.append((plan, items))
            elif items:
                self._send(plan, items, None)

    def _land(self, items: Sequence[Ready]) -> None:
        """Verify and write blocks of one host view, up to the first that is damaged."""
        checked: list[Ready] = []
        size = 0
        plainly = not items[0].step.plan.view.owned_by_engine and not self._above
        done = 0 if self._above else land_run(items, self._stopped)
        for item in items[done:]:
            if self._stopped():
                return  # whoever waits for this was cancelled, and has to wait for its end
            if item.bad is not None:
                break
            if not (plainly and is_right(item)) and not self._examine(item):
                break
            checked.append(item)
            size += item.nbytes
            if size >= together_bytes(item):
                if not self._write_all(checked):
                    return
                checked, size = [], 0
        self._write_all(checked)

    def _open(self) -> None:
        """Open all frames and look all views up, before large copies empty the caches."""
        for _, group in groupby(self._ready, key=lambda item: id(item.step.plan)):
            items = list(group)
            plan, here = items[0].step.plan, not on_device(items[0])
            with plan.view.writing() if here else nullcontext():
                opened = [
                    (part, item.step.start, item)
                    for item in items
                    for part in item.parts
                    if not part.placed and self._opened(item, part)
                ]
                if here:
                    prepare_all(opened, plan.view)

    @staticmethod
    def _opened(item: Ready, part: Arrived) -> bool:
        try:
            open_part(part, item.step.plan.space, item.step.plan.root)
        except CodecError:
            item.bad = item.bad or part
            return False
        return True

    def _write_all(self, items: Sequence[Ready]) -> bool:
        """Write verified blocks in order, up to one that cannot be decoded; whether all are."""
        raw: list[Arrived] = []
        for item in items:
            if all(part.blocks is not None for part in item.parts):
                raw += [part for part in item.parts if not part.written]
                item.done = True
                continue
            write_together(raw)
            raw = []
            item.done = self._write(item)
            if not item.done:
                return False
        write_together(raw)
        return True

    def _examine(self, item: Ready) -> bool:
        plan, step = item.step.plan, item.step
        here = plan.target.device is None and plan.view.owned_by_engine
        for part in item.parts:
            flight = step.flights.get(part.found.part)
            fresh = part.resident is None and (flight is None or not flight.checked)
            try:
                if not part.placed and not (here and verify_and_write(part)):
                    examine(part, plan.space, plan.root)
            except CodecError:
                item.bad = part
                plan.progress.spilled |= here
                return False
            assert part.header is not None
            if flight is not None:
                flight.header, flight.checked = part.header, True
            level = self._core.levels[part.found.tier]
            if fresh and self._above and self._fetcher.wanted_above(level):
                item.news.append((part.found.tier, stored_part(part.header)))
            if not part.raw or part.header.fidelity != "exact":  # raw frames lose nothing
                item.derived = item.derived or derivation(part.header)
                if item.derived and plan.exact:  # not what it was looked up as
                    item.bad = part
                    plan.progress.spilled |= here
                    return False
        return True

    @staticmethod
    def _write(item: Ready) -> bool:
        for part in item.parts:
            try:
                write(Order([part], item.step.start), item.step.plan.view)
            except CodecError:
                item.bad = part
                item.step.plan.progress.spilled = True  # by the parts before it
                return False
        return True

    def _send(self, plan: LoadPlan, items: Sequence[Ready], room: memoryview | None) -> None:
        orders = [Order(item.parts, item.step.start) for item in items]
        try:
            bad = send(plan.target, orders, None, room, self.sent)
        except BackendError:
            self._broken.add(id(plan))
            return
        for number, item in enumerate(items):
            item.bad = bad.get(number)
            if item.bad is not None:
                plan.progress.spilled = True  # by those behind it
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

    def account(self) -> None:
        """Report what is in place: nothing writes any more."""
        core = self._core
        for item in self._ready:
            plan, step = item.step.plan, item.step
            progress = plan.progress
            if self._broken and id(plan) in self._broken:
                stop(plan, MissReason.FAILED)
                progress.spilled = True
                continue
            if not item.done or step.block != progress.blocks:
                continue
            progress.blocks = step.block + 1
            progress.derived = progress.derived or item.derived
            core.bytes_copied += item.nbytes
            for tier, stored in item.news:
                self._fetcher.offer(core.levels[tier], [stored], plan.space)
            if step.parts:
                name = core.levels[max([found.tier for found in step.parts])].name
                tokens = plan.tokens_of(step.block)
                progress.by_tier[name] = progress.by_tier.get(name, 0) + tokens
