"""What an engine does for those who plan with its content: tell where parts are, keep some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.engine.lifecycle import Lifecycle
from tierkv.engine.parts import check_space
from tierkv.errors import ConfigError
from tierkv.session import SessionState
from tierkv.session.base import check_fidelity
from tierkv.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import BlockKey
    from tierkv.engine.watching import Residency
    from tierkv.layout import Space
    from tierkv.prefetch import Hold

__all__ = ["Keeping"]


class Keeping(Lifecycle):
    """What schedulers ask of an engine; :class:`~tierkv.engine.Engine` adds sessions."""

    def _space(self, space: Space | None) -> Space:
        space = self.default_space if space is None else check_space(space)
        if space is None:
            raise ConfigError(
                "this engine has no space of its own: pass space= to open() or session(), or use "
                "engine.space(identity, layout).session(...)"
            )
        return space

    def watch(self, told: Callable[[Sequence[Residency]], object]) -> Callable[[], None]:
        """Tell ``told`` where all parts are, and from now on of every copy that comes or goes.

        First come all parts, in batches over several turns of the loop, ended by one empty batch;
        changes come in between and afterwards, at most one batch of them a turn. The last that was
        told of a part is always right; parts of which nothing was told are nowhere. Private tails
        of sessions are among them. Copies whose time is up count until they are collected (within
        a tick), and lossy ones count, too: not every session may use what is told here. When a
        tier breaks or comes back, all parts are told of once more.

        Args:
            told: Called on the engine's loop with a sequence of
                :class:`~tierkv.engine.watching.Residency`. It must be quick and not raise: one
                that does is logged, and told nothing any more. It may call anything, also the
                function returned here.

        Returns:
            A function that stops it: idempotent, on the engine's loop; ``told`` is not called
            after it. So does closing the engine.

        Raises:
            ClosedError: if the engine is not open.

        Without a watcher nothing is noted at all (30 ns for each copy that comes or goes). A
        watcher costs the loop about half a microsecond a change, and two microseconds for each
        part at the beginning, beside what ``told`` itself takes.
        """
        return self._keepers()[0].add(told)

    async def hold(
        self,
        space: Space | None,
        keys: Sequence[BlockKey],
        *,
        tenant: str = "",
        salt: bytes = b"",
        fidelity: str = "exact",
        deadline: float | str | None = None,
    ) -> Hold:
        """Bring leading blocks into a memory tier, verify them there, and keep them.

        A standing lease, for those who promise the blocks to others: whoever loads them before
        :meth:`~tierkv.prefetch.Hold.release` finds them in RAM, undamaged when they were verified.
        It counts as one use of the prefix. Several holds may overlap; no session's turn is taken.
        Held blocks count as leases in :meth:`Engine.stats`, and cannot be evicted; everything else
        can: stores that find no other room are refused as ever, and a hold itself evicts nothing
        that was used later than its own blocks.

        Args:
            space: Space of the blocks; None takes the engine's.
            keys: Keys of full blocks, from the first of the chain on.
            tenant: Whose they are.
            salt: Their salt.
            fidelity: ``"exact"``, or ``"lossy"`` if lossy copies are of use.
            deadline: Seconds (or text such as ``"2s"``) after which nothing further is brought or
                verified. None: it takes as long as the tiers do, which time out by themselves;
                nobody ever waits for memory.

        Returns:
            The hold. It has fewer blocks than keys, down to none, where blocks are nowhere, tiers
            fail, copies are damaged (they are dropped then), memory is full of what is used more,
            or the time was up. What is in a device's memory alone is not brought.

        Raises:
            ClosedError: if the engine is closed.
            ConfigError: if it has no memory tier, no space is given, or an argument is malformed.

        Cancellation: every lease is given back, once no thread reads the blocks any more (at most
        16 MiB are waited for); reads under way go on, and what they bring stays in memory.
        """
        space = self._space(space)
        lossy = check_fidelity(fidelity) == "lossy"
        within = None if deadline is None else parse_duration(deadline)
        until = None if within is None else self.core.clock() + within
        root = SessionState("", tenant, space, salt).root
        return await self._keepers()[1].hold(space, root, keys, lossy=lossy, until=until)
