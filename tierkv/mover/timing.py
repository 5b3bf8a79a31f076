"""How long batches take, and whether a tier hangs: fed to the decisions, told to who waits.

A tier hangs when it has batches under way and none has come back for its *patience*: the setting
``tier_timeout``, or four times what the batches under way should take, whichever is longer; or
when one single batch has not come back in four times that. What hangs goes on hanging: the thread
and the memory that it may touch stay with the engine's own job. Only whoever waits is let go.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tierkv.decisions.cost import BreakerState
from tierkv.errors import BackendError
from tierkv.workers import Signal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.abc import Observer
    from tierkv.decisions.core import Decisions
    from tierkv.mover.faults import FaultLog
    from tierkv.mover.levels import Level

__all__ = ["Batch", "Watch"]

_log = logging.getLogger("tierkv.mover")
_TIMES = 4.0


class Batch:
    """One call of a backend that is under way.

    Attributes:
        direction: ``"read"`` or ``"write"``.
        nbytes: Its bytes.
        began: When, on the loop's clock.
        start: When, on the engine's clock.
        late: Whether it was given up as hanging.
    """

    __slots__ = ("began", "direction", "late", "nbytes", "start")

    def __init__(self, direction: str, nbytes: int, began: float, start: float) -> None:
        self.direction = direction
        self.nbytes = nbytes
        self.began = began
        self.start = start
        self.late = False


class Watch:
    """Times batches and keeps the breakers of all tiers fed.

    Tiers in host memory cannot hang and have no breaker.
    """

    def __init__(
        self,
        decisions: Decisions,
        *,
        clock: Callable[[], float],
        observer: Observer,
        faults: FaultLog,
        timeout: float,
    ) -> None:
        self._decisions = decisions
        self._clock = clock
        self._observer = observer
        self._faults = faults
        self._timeout = timeout
        self._states: dict[tuple[int, str], BreakerState] = {}

    # ------------------------------------------------------------------ asking

    def usable(self, level: Level) -> bool:
        """Whether reads of this tier are worth starting."""
        if level.memory is not None:
            return True
        return self._decisions.costs.breaker(level.index, "read").closed

    def hangs(self, level: Level) -> bool:
        """Whether nobody should start a write in this tier, or wait for one."""
        if level.memory is not None:
            return False
        if not self._decisions.costs.breaker(level.index, "write").admits(self._clock()):
            return True
        return any(batch.late and batch.direction == "write" for batch in level.flying)

    async def landed(self, level: Level, signal: Signal, *, writing: bool = False) -> bool:
        """Wait until ``signal`` is set or the tier is found to hang; whether it is set.

        With ``writing`` also while only a write of it hangs: a tier that answers reads again is no
        reason to wait for that write.
        """
        signals = [signal, level.stalled, *([level.stuck] if writing else ())]
        if not any(known.is_set() for known in signals):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for known in signals:
                known.attach(waiter)
            try:
                await waiter
            finally:
                for known in signals:
                    known.detach(waiter)
        return signal.is_set()

    # ------------------------------------------------------------------ batches

    def begin(self, level: Level, direction: str, nbytes: int) -> Batch | BackendError:
        """Start to time a batch, or refuse it."""
        start = self._clock()
        if level.memory is None and not self._decisions.admit(level.index, direction, start):
            why = f"{direction}s are left out for a while: it failed or hung"
            return BackendError(level.name, why, retryable=True)
        self.tell(level)
        loop = asyncio.get_running_loop()
        batch = Batch(direction, nbytes, loop.time(), start)
        level.flying[batch] = None
        if level.timer is None and level.memory is None:
            level.timer = loop.call_later(self._patience(level), self._check, level)
        return batch

    def end(self, level: Level, batch: Batch, nbytes: int, *, failed: bool) -> None:
        """A batch came back.

        Args:
            level: Its tier.
            batch: The batch.
            nbytes: Bytes that were moved.
            failed: Whether the medium failed it as a whole.
        """
        self._leave(level, batch)
        if level.memory is not None:
            return
        now, tier, decisions = self._clock(), level.index, self._decisions
        # batches overlap: what passed before the last one ended was accounted to that one
        start = max(batch.start, level.ended.get(batch.direction, 0.0))
        level.ended[batch.direction] = now
        if batch.late:
            if not failed:
                decisions.alive(tier, now)
        elif failed:
            decisions.failed(tier, batch.direction, now)
        else:
            decisions.sample(tier, batch.direction, nbytes, max(now - start, 0.0), now)
        self.tell(level)

    def cut(self, level: Level, batch: Batch) -> None:
        """A batch was cancelled (the engine closes): it tells nothing."""
        self._leave(level, batch)
        if level.memory is None:
            self._decisions.untried(level.index, batch.direction, self._clock())

    def _leave(self, level: Level, batch: Batch) -> None:
        del level.flying[batch]
        level.progress = asyncio.get_running_loop().time()
        if batch.late and not any(b.late and b.direction == "write" for b in level.flying):
            level.stuck = Signal()
        if not level.flying and level.timer is not None:
            level.timer.cancel()
            level.timer = None

    # ------------------------------------------------------------------ hanging

    def _patience(self, level: Level) -> float:
        costs = self._decisions.costs
        expected = sum(
            costs.line(level.index, batch.direction).seconds(batch.nbytes)
            for batch in level.flying
            if not batch.late
        )
        return max(self._timeout, _TIMES * expected)

    def _check(self, level: Level) -> None:
        level.timer = None
        live = [batch for batch in level.flying if not batch.late]
        if not live:
            return
        loop = asyncio.get_running_loop()
        now, patience = loop.time(), self._patience(level)
        silent = now - max(live[0].began, level.progress)
        limit = patience if silent >= patience else _TIMES * patience
        late = [batch for batch in live if now - batch.began >= limit]
        for batch in late:
            batch.late = True
            error = TimeoutError(f"no answer for {now - batch.began:.3g} s")
            self._faults.raised(level.name, batch.direction, error)
        if late:
            self._decisions.failed(level.index, late[0].direction, self._clock(), hung=True)
            level.stalled.set()
            if any(batch.direction == "write" for batch in late):
                level.stuck.set()
            self.tell(level)
        if len(late) < len(live):
            rest = min(patience - silent, _TIMES * patience - (now - live[0].began))
            level.timer = loop.call_later(max(rest, 0.05 * patience), self._check, level)

    def tell(self, level: Level) -> None:
        """Tell of breakers that opened or closed."""
        for direction in ("read", "write"):
            state = self._decisions.costs.breaker(level.index, direction).state
            key = (level.index, direction)
            before = self._states.get(key, BreakerState.CLOSED)
            if state is before:
                continue
            self._states[key] = state
            self._observer.breaker(tier=level.name, to=state.value)
            if before is BreakerState.CLOSED:
                _log.error(
                    "tier %s fails or hangs: %ss are left out for a while", level.name, direction
                )
            elif state is BreakerState.CLOSED:
                _log.warning("tier %s works again: %ss go on", level.name, direction)
                if level.stalled.is_set():
                    level.stalled = Signal()
