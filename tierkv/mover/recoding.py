"""Conversion in place: copies in memory tiers that are due for another codec chain become smaller.

A loop of the engine takes what the decisions have put in line, and has it converted batch by batch
(:mod:`tierkv.mover.converting`). Whoever had leased the old frame before finishes on it: the copy
is then left alone and looked at again later.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tierkv.errors import ClosedError
from tierkv.mover.converting import Conversion
from tierkv.mover.slices import SLICE
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import PartId
    from tierkv.mover.core import Core
    from tierkv.mover.levels import Level
    from tierkv.mover.shrinking import Shrinking
    from tierkv.mover.turns import Turn

__all__ = ["Recoder"]

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_PARTS = 64


class Recoder:
    """The loop that converts.

    Attributes:
        converted: Copies that became smaller.
        saved_bytes: Bytes that this gave back to their tiers.
        kept: Copies that would not have become smaller.
        refused: Sections whose values a codec refused: they were stored losslessly instead.
        put_off: Copies that were in use, or for which there was no room just then.
    """

    def __init__(self, core: Core, turns: Sequence[Turn]) -> None:
        self.converted = 0
        self.saved_bytes = 0
        self.kept = 0
        self.refused = 0
        self.put_off = 0
        self._core = core
        self._turns = turns
        self._limit = max(1, min(_BATCH_BYTES, core.window_bytes))
        self._kick = Signal()
        self._done = Signal()
        self._settled = 0
        self._level: Level | None = None
        self._ended = False

    def __repr__(self) -> str:
        queued, taken = self._core.decisions.recodes
        return f"<Recoder: {queued - taken} waiting, {self.converted} done>"

    def kick(self) -> None:
        """Look whether something is in line. Cheap; called at every tick and after every store."""
        if self._core.decisions.recodes_wait(self._core.clock()):
            self._kick.set()

    async def settled(self, parts: Sequence[PartId]) -> None:
        """Convert what is due of these parts; what somebody is reading is not waited for.

        Raises:
            ClosedError: if the engine is closed meanwhile.
        """
        core = self._core
        if not core.decisions.compressing:
            return
        for start in range(0, len(parts), SLICE):
            now = core.clock()
            due = [p for p in parts[start : start + SLICE] if core.decisions.due(p, now)]
            if due:
                core.decisions.recheck(due, now)
            await asyncio.sleep(0)
        goal = core.decisions.recodes[0]
        self.kick()
        while self._settled < goal:
            if self._ended:
                raise ClosedError("the engine was closed before everything was compressed")
            level = self._level
            if level is None:
                await self._done.wait()
            elif not await core.landed(level, self._done):
                return  # its device hangs

    async def run(self) -> None:
        """Convert what comes in line, for the engine's life."""
        core = self._core
        self._settled = core.decisions.recodes[1]
        try:
            while True:
                batch = core.decisions.take_recodes(_BATCH_PARTS, self._limit, core.clock())
                if batch:
                    level = self._level = core.levels[batch[0].tier]
                    turn = self._turns[level.index]
                    await Conversion(core, level, turn, self._limit, self._told).run(batch)
                self._settle()
                await asyncio.sleep(0)
                if not batch and not core.decisions.recodes_wait(core.clock()):
                    await self._kick.wait()
                    self._kick = Signal()
        except asyncio.CancelledError:
            if core.workers.stopping:
                self._ended = True
                self._done.set()
            raise

    def _settle(self) -> None:
        self._settled, self._level = self._core.decisions.recodes[1], None
        done, self._done = self._done, Signal()
        done.set()

    def _told(self, level: Level, frame: Shrinking, result: str, saved: int) -> None:
        """Count what became of a copy."""
        refused = frame.refused if result in ("converted", "kept") else 0
        self.converted += result == "converted"
        self.kept += result == "kept"
        self.put_off += result == "put_off"
        self.saved_bytes += saved
        self.refused += refused
        chain = frame.recode.chain
        self._core.observer.recoded(
            tier=level.name, chain=chain, result=result, saved=saved, refused=refused
        )
