"""Who wants to know which parts are where: first all of them, then every change."""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from tierkv.errors import ClosedError
from tierkv.workers import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import PartId
    from tierkv.mover.core import Core

__all__ = ["Residency", "Watching"]

_log = logging.getLogger("tierkv")
_SLICE: Final = 1024
"""Most parts of one batch: under a millisecond on the loop."""


class Residency(NamedTuple):
    """Where one part is.

    Attributes:
        part: The part.
        tiers: Bit ``i``: tier ``i`` (fast to slow) has a copy that a lookup may count on; 0: the
            part is nowhere, or in tiers alone that are broken.
    """

    part: PartId
    tiers: int


class _Watcher:
    """One who is told; the walk through all parts that he is on, if any."""

    __slots__ = ("again", "told", "walking", "whole")

    def __init__(self, told: Callable[[Sequence[Residency]], object]) -> None:
        self.told: Callable[[Sequence[Residency]], object] | None = told
        self.walking = False
        self.again = False  # whether a walk has to start over
        self.whole = False  # whether he was told that he has heard of every part

    def tell(self, batch: Sequence[Residency]) -> None:
        if self.told is None:
            return
        try:
            self.told(batch)
        except Exception:  # noqa: BLE001 - a decision must not fail by who hears of it
            self.told = None
            _log.exception("a watcher of residency failed, and is told nothing any more")


class Watching:
    """The watchers of one engine.

    What is told is looked up at that moment, never earlier. So the last that anybody heard of a
    part is right, in whichever order a walk through all parts and a change came to it. While
    nobody watches, the decisions tell nobody anything.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._watchers: list[_Watcher] = []
        self._moved: dict[PartId, None] = {}
        self._afresh = False  # whether all parts have to be told of once more
        self._due = False

    def __repr__(self) -> str:
        return f"<Watching: {len(self._watchers)} watchers, {len(self._moved)} parts to tell of>"

    def add(self, told: Callable[[Sequence[Residency]], object]) -> Callable[[], None]:
        """Tell ``told`` of all parts, and of every change from now on; see :meth:`Engine.watch`.

        Raises:
            ClosedError: if the engine is closed.
        """
        if self._core.closed:
            raise ClosedError("the engine is closed")
        watcher = _Watcher(told)
        self._watchers.append(watcher)
        self._core.decisions.watch(self._note)
        self._walk(watcher)

        def stop() -> None:
            watcher.told = None
            self._tidy()

        return stop

    def close(self) -> None:
        """Tell nobody anything any more. Idempotent."""
        for watcher in self._watchers:
            watcher.told = None
        self._tidy()

    def _tidy(self) -> None:
        self._watchers = [watcher for watcher in self._watchers if watcher.told is not None]
        if not self._watchers:
            self._core.decisions.watch(None)
            self._moved.clear()
            self._afresh = False

    # ------------------------------------------------------------------ changes

    def _note(self, part: PartId | None) -> None:
        """Hear of a change, amid a decision."""
        if part is None:
            self._afresh = True
        else:
            self._moved[part] = None
        if not self._due:
            self._due = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        """Pass on what has changed since the last turn of the loop; a slice of it if it is much."""
        self._due = False
        if self._afresh and not self._core.closed:
            self._afresh = False
            for watcher in self._watchers:
                self._walk(watcher)
        moved = list(islice(self._moved, _SLICE))
        for part in moved:
            del self._moved[part]
        batch = list(map(Residency._make, self._core.decisions.residency(moved)))
        for watcher in list(self._watchers) if batch else ():
            watcher.tell(batch)
        self._tidy()
        if self._moved:
            self._due = True
            self._loop.call_soon(self._tell)

    # ------------------------------------------------------------------ everything

    def _walk(self, watcher: _Watcher) -> None:
        watcher.again = True
        if not watcher.walking:
            watcher.walking = True
            self._core.workers.spawn(self._all, watcher, name="watch", lane=Lane.BACKGROUND)

    async def _all(self, watcher: _Watcher) -> None:
        """Tell of every part, a slice each turn of the loop."""
        decisions = self._core.decisions
        try:
            while watcher.again:
                watcher.again, done, row = False, False, 0
                while not (done or watcher.again or watcher.told is None):
                    found, done = decisions.resident(row, _SLICE)
                    row += _SLICE
                    if found:
                        watcher.tell(list(map(Residency._make, found)))
                    await asyncio.sleep(0)
        finally:
            watcher.walking = False
        if not watcher.whole:
            watcher.whole = True
            watcher.tell(())
        self._tidy()
