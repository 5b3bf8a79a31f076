"""Hints about a request's KV, carried out by a rank: keep it for a while, bring some early."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tierkv.blocks import KeyChain
from tierkv.errors import ClosedError
from tierkv_adapters.serving.limited_log import LimitedLog

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from tierkv.blocking import CacheManager, Pending
    from tierkv.layout import Space
    from tierkv.prefetch import Hold
    from tierkv_adapters.serving.counters import RankCounters
    from tierkv_adapters.serving.orders import HintOrder, RequestFacts

__all__ = ["HintSide"]

_log = logging.getLogger("tierkv.serving")
_MEMORY: Final = "host"  # the kind of tiers in which blocks can be held
_SHARE: Final = 0.5


@dataclass(slots=True)
class _Pin:
    """KV of one request that is to stay for a while; belongs to the engine's loop.

    Attributes:
        facts: Of the request.
        space: Where its blocks are.
        until: When its time is over, on the loop's clock.
        blocks: Leading blocks that are held.
        hold: What holds them.
        timer: What ends it.
    """

    facts: RequestFacts
    space: Space
    until: float
    blocks: int = 0
    hold: Hold | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def block_bytes(self) -> int:
        """Raw bytes of one of its blocks."""
        return self.space.layout.raw_bytes(self.space.block_tokens)

    @property
    def nbytes(self) -> int:
        """Raw bytes that it keeps."""
        return self.blocks * self.block_bytes


class HintSide:
    """Follows hints. :meth:`take` is called by the worker's thread, the rest by the engine's loop.

    *Pin*: what is stored of a request, and what is still to be stored of it, is brought into
    memory, verified and leased there until its time is over. Pins together keep at most half of
    the memory tiers, so that there is always room for others; what goes beyond is refused, and
    counted. *Prefetch*: a session's history, or a prompt, is brought into the fastest tier.

    A hint is never worth a failure, nor a wait: what keeps it from being followed is counted and
    logged, and no job of the rank waits until blocks are held.

    Args:
        manager: The engine of the rank.
        fidelity: Which copies are of use.
        counters: The rank's; those of hints are changed on the loop alone.
    """

    def __init__(self, manager: CacheManager, fidelity: str, counters: RankCounters) -> None:
        self._counters = counters
        self._manager = manager
        self._fidelity = fidelity
        tiers = [tier for tier in manager.config.tiers if tier.kind == _MEMORY]
        self._most = int(_SHARE * sum(tier.capacity_bytes for tier in tiers))
        self._pins: dict[str, _Pin] = {}
        self._complaints = LimitedLog(_log)

    # ------------------------------------------------------------------ hints

    def take(self, hint: HintOrder, space: Callable[[RequestFacts], Space]) -> None:
        """Follow a hint; does not wait.

        Args:
            hint: What is hinted at.
            space: The space of a request.

        Raises:
            ClosedError: if the engine is closed.
        """
        follow = self._pin if hint.action == "pin" else self._prefetch
        self._manager.submit(follow, hint, space(hint.facts), done=self._done)

    def _done(self, pending: Pending[bool]) -> None:
        followed = self._followed(pending)
        self._counters.hints += followed
        self._counters.hints_refused += not followed

    def _grown(self, pending: Pending[bool]) -> None:
        self._counters.hints_refused += not self._followed(pending)  # its hint is counted already

    def _followed(self, pending: Pending[bool]) -> bool:
        try:
            return pending.result()
        except Exception as error:  # noqa: BLE001 - see the class
            self._complaints.warning("a hint was not followed", repr(error))
            return False

    async def _prefetch(self, hint: HintOrder, space: Space) -> bool:
        facts = hint.facts
        await self._manager.engine.prefetch(
            session=hint.session,
            tenant=facts.tenant,
            tokens=hint.tokens,
            media=facts.media if hint.tokens is not None else (),
            space=space,
            salt=facts.salt,
            fidelity=self._fidelity,
        )
        return True

    async def _pin(self, hint: HintOrder, space: Space) -> bool:
        assert hint.seconds is not None
        loop = asyncio.get_running_loop()
        pin = _Pin(hint.facts, space, loop.time() + hint.seconds)
        self._drop(self._pins.get(hint.facts.id))
        self._pins[hint.facts.id] = pin
        pin.timer = loop.call_at(pin.until, self._drop, pin)
        return hint.tokens is None or await self._keep(pin, hint.tokens)

    # ------------------------------------------------------------------ pins

    def stored(self, request_id: str, tokens: array[int], stop: int) -> None:
        """A request's tokens up to ``stop`` are stored now: what is pinned grows with it."""
        pin = self._pins.get(request_id)
        if pin is not None and stop // pin.space.block_tokens > pin.blocks:
            with contextlib.suppress(ClosedError):
                self._manager.submit(self._keep, pin, tokens[:stop], done=self._grown)

    async def close(self) -> None:
        """Release all pins, also of an engine that lives on."""
        for pin in list(self._pins.values()):
            self._drop(pin)

    async def _keep(self, pin: _Pin, tokens: Sequence[int]) -> bool:
        """Hold the leading blocks of these tokens instead of what was held before.

        Returns:
            Whether there is room for all of them. Those that are not stored yet come later.
        """
        facts, space = pin.facts, pin.space
        wanted = len(tokens) // space.block_tokens
        blocks = min(wanted, self._room(pin))
        if blocks > pin.blocks:
            chain = KeyChain(space.root(facts.tenant, facts.salt), space.block_tokens)
            leading = tokens[: blocks * space.block_tokens]
            await self._manager.engine.workers.run(chain.follow, leading, facts.media)
            hold = await self._manager.engine.hold(
                space,
                chain.keys[:blocks],
                tenant=facts.tenant,
                salt=facts.salt,
                fidelity=self._fidelity,
            )
            if self._pins.get(facts.id) is not pin or hold.blocks <= pin.blocks:
                hold.release()  # its time is over, or a later hold has more
            else:
                old, pin.hold, pin.blocks = pin.hold, hold, hold.blocks
                if old is not None:
                    old.release()
        return blocks == wanted

    def _room(self, mine: _Pin) -> int:
        """How many blocks a pin may keep, so that all of them stay below their share."""
        others = sum(pin.nbytes for pin in self._pins.values() if pin is not mine)
        return max(0, self._most - others) // mine.block_bytes

    def _drop(self, pin: _Pin | None) -> None:
        if pin is None:
            return
        if self._pins.get(pin.facts.id) is pin:
            del self._pins[pin.facts.id]
        if pin.timer is not None:
            pin.timer.cancel()
        if pin.hold is not None:
            pin.hold.release()
            pin.hold = None
