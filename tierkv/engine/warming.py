"""Machine code for what an engine will do, compiled before it is needed, and beside the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv import jit
from tierkv.config import engine_chains
from tierkv.jit import copying
from tierkv.pipeline.warming import cold, warm
from tierkv.workers import Lane, Signal

if TYPE_CHECKING:
    from tierkv.config import EngineConfig
    from tierkv.layout import Space
    from tierkv.mover.core import Core

__all__ = ["Warming"]


class Warming:
    """Compiles what the copies and the configured chains need, in one worker thread.

    Nobody waits for it: until it is done, library calls do the same. Closing waits for the piece
    that is being compiled, some tenths of a second; the others are left. They are, too, where the
    loop ends without closing: after an exception, or Ctrl-C.
    """

    def __init__(self, core: Core, config: EngineConfig) -> None:
        self._core = core
        self._chains = sorted(engine_chains(config))
        self._seen = 0
        self._todo: list[tuple[Space, str]] = []
        self._wanted = Signal()

    def begin(self, space: Space | None) -> None:
        """At opening: compile for copies, and for the blocks of the one space that is known."""
        self._look([] if space is None else [space])
        if self._todo or not copying.known():
            self._wanted.set()
        # one loop for the engine's life: no job is started in one that has nothing to do
        self._core.workers.supervise("compile", self._run, Lane.BACKGROUND)

    def tick(self) -> None:
        """Compile for spaces that came since, and what was asked for where it could not be."""
        spaces = self._core.spaces
        if len(spaces) != self._seen:
            self._seen = len(spaces)
            self._look(list(spaces.values()))
        if self._todo or jit.behind():
            self._wanted.set()

    def _look(self, spaces: list[Space]) -> None:
        self._todo = [(s, chain) for s in spaces for chain in self._chains if cold(s, chain)]

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = Signal()
            todo, self._todo = self._todo, []
            await self._core.workers.run_long(self._work, todo)  # no tier waits for it

    def _work(self, todo: list[tuple[Space, str]]) -> None:
        """In a thread, in one go: engines that open one after the other share what it finds."""
        with jit.later():
            copying.ready()
        jit.catch_up(self._stopped)
        for space, chain in todo:
            if cold(space, chain):  # nobody was through with it meanwhile
                warm(space, chain, self._stopped)
        jit.catch_up(self._stopped)

    def _stopped(self) -> bool:
        core = self._core
        return core.closed or core.workers.stopping
