"""A rank: carries out what the scheduler's side ordered, on the pages of one worker."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from tierkv.errors import ClosedError
from tierkv_adapters.serving.counters import RankCounters
from tierkv_adapters.serving.engine_side import EngineSide
from tierkv_adapters.serving.eras import EraSpaces
from tierkv_adapters.serving.job_board import JobBoard
from tierkv_adapters.serving.jobs import Ended, Job
from tierkv_adapters.serving.request_book import RequestBook
from tierkv_adapters.serving.settings import RankSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from tierkv.abc import Event
    from tierkv.blocking import CacheManager, Pending
    from tierkv.blocks import AdapterId
    from tierkv.layout import Space
    from tierkv_adapters.serving.orders import LoadOrder, RequestFacts, SaveOrder, StepOrders
    from tierkv_adapters.serving.pages import PagePools

__all__ = ["Ended", "Rank", "RankCounters"]


class Rank:
    """Carries out :class:`~tierkv_adapters.serving.orders.StepOrders` on one worker's pages.

    One thread calls it, the worker's; the engine's loop does the work. A step goes::

        rank.begin(orders)  # pages that are about to be written are nobody else's source any more
        rank.start_loads()
        rank.wait_loads(ids)  # only those that this very step reads
        ...  # the forward pass
        rank.start_saves()
        for ended in rank.poll():
            ...

    Nothing that happens to bytes raises here: a damaged block, a tier that hangs, an engine that
    was closed, orders that make no sense make a result shorter. It then has a reason, and
    :attr:`counters` and a line of the log tell of it.

    *Loads* write into the request's pages only what was verified. What :meth:`poll` reports of a
    load is in the pages for every forward pass that is started later; behind the tokens reported
    there may be anything. Until then the pages have to stay the request's, also if it is ended.

    *Saves* read the pages behind the work of the engine that was submitted when
    :meth:`start_saves` was called. They hold nothing back: if the pages of a save that has not
    begun are given away, it is dropped, and the same if the request is voided.

    Args:
        manager: The engine of this rank, open.
        pools: The worker's pages.
        space: The space of requests with an adapter, or without.
        settings: How patient it is.
        clock: Monotonic seconds.

    Raises:
        ClosedError: if the manager is not open.
        ConfigError: if no device plug-in knows the memory of the pools.

    Attributes:
        counters: What became of the orders so far.
        requests: Requests that the scheduler's side has seen, as far as it told.
    """

    def __init__(
        self,
        manager: CacheManager,
        pools: PagePools,
        space: Callable[[AdapterId | None], Space],
        *,
        settings: RankSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = RankSettings() if settings is None else settings
        self.counters = RankCounters()
        self.requests = 0
        self._manager = manager
        self._pools = pools
        self._spaces = EraSpaces(space)
        self._clock = clock
        self._side = side = EngineSide(
            manager, pools, settings, lambda job: self._board.begins(job), clock, self.counters
        )
        self._board = JobBoard(
            manager, pools.groups, settings, self.counters, clock, side.carry, side.part
        )
        self._requests = RequestBook(pools.groups)
        self._loads: list[LoadOrder] = []
        self._saves: list[SaveOrder] = []
        self._closed = False
        manager.call(side.look)

    def __repr__(self) -> str:
        return f"<Rank {len(self._requests)} requests, {self._board!r}>"

    # ------------------------------------------------------------------ a step

    def begin(self, orders: StepOrders) -> None:
        """Take in a step's orders, and wait for copies out of pages that it is about to write.

        Call it before anything writes to pages that were given to requests in this step. It waits
        for nothing but copies under way, and for them only if they read such pages.
        """
        self._requests.step()
        if orders.reset:
            self._try("what is void could not be forgotten", self._renew)
        for name in orders.ended:
            self._try("a request could not be ended", self._end, name)
        for name in orders.voided:
            self._try("a request could not be voided", self._void, name)
        for facts in orders.fresh:
            self._try("a request could not be taken", self._meet, facts)
        for grown in orders.grown:
            self._try("tokens could not be taken", self._requests.grow, grown)
        if any(orders.taken):
            taken = self._pools.owned(orders.taken)
            self._requests.taken(taken)
            self._board.fence(taken)
        self._loads += orders.loads
        self._saves += orders.saves
        for hint in orders.hints:
            self._try("a hint could not be taken", self._side.hints.take, hint, self._spaces.of)
        self.requests = max(self.requests, orders.requests)
        if orders.prefill is not None:
            self._try("the speed of prefill could not be told", self._computed, orders.prefill)

    def start_loads(self) -> None:
        """Start the loads that :meth:`begin` was given; does not wait."""
        loads, self._loads = self._loads, []
        ready = self._ready() if loads else None
        for order in loads:
            until = None if order.deadline is None else self._clock() + order.deadline
            self._try("a load could not be started", self._start, "load", order, ready, until)

    def wait_loads(self, ids: Iterable[str]) -> None:
        """Wait until the loads of these requests have ended: at most for their deadlines."""
        self._board.wait_loads(ids)

    def start_saves(self) -> None:
        """Start the saves that :meth:`begin` was given; call it once the forward pass is started.

        Does not wait: the copies come behind everything on the calling thread's current stream.
        """
        saves, self._saves = self._saves, []
        ready = self._ready() if saves else None
        for order in saves:
            self._try("a save could not be started", self._start, "save", order, ready, None)

    def poll(self) -> list[Ended]:
        """Loads and saves that ended since the last call; each is told once."""
        return self._board.take_ended()

    def busy(self) -> bool:
        """Whether there are loads or saves whose end :meth:`poll` has not told."""
        return self._board.is_busy()

    def saving(self, id: str) -> bool:
        """Whether a request has saves under way or waiting, also if it is over."""
        return self._board.is_saving(id)

    # ------------------------------------------------------------------ the end

    def drain(self, within: float) -> bool:
        """Wait for all loads and saves, for at most ``within`` seconds; whether all have ended."""
        return self._board.drain(within)

    def close(self, within: float = 30.0) -> bool:
        """Give up what is under way, and leave all sessions and pins. Idempotent.

        The manager stays open.

        Returns:
            Whether nothing of it touches the pages any more, after at most ``within`` seconds. If
            not, the copies that hang keep the pools' tensors alive.
        """
        if self._closed:
            return self._board.drain(0)
        self._closed = True
        self._loads, self._saves = [], []
        self._board.abandon("closed")
        for name in self._requests.names():
            self._end(name)
        with contextlib.suppress(ClosedError):  # the engine closed, and released them itself
            self._manager.submit(self._side.hints.close)
        ended = self._board.drain(within)
        if not ended:
            self._board.complain("close", "copies are still under way; they are given up")
        return ended

    # ------------------------------------------------------------------ one order

    def _try(self, what: str, act: Callable[..., None], *args: object) -> None:
        """Do it; whatever it raises is counted and logged, as the serving engine must go on."""
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self._board.fault(what, repr(error))

    def _renew(self) -> None:
        self._loads, self._saves = [], []
        self._board.withdraw("reset")
        with contextlib.suppress(ClosedError):  # nothing of it is found here any more
            self._manager.submit(self._side.renew, done=self._renewed)

    def _renewed(self, pending: Pending[None]) -> None:
        try:
            pending.result()
        except ClosedError:  # as above
            pass
        except Exception as error:  # noqa: BLE001 - see `_try`
            self._board.fault("what is void could not be forgotten", repr(error))

    def _end(self, name: str) -> None:
        request = self._requests.pop(name)
        if request is not None:
            self._board.end(request)

    def _void(self, name: str) -> None:
        request = self._requests.get(name)
        if request is not None:
            request.lose()
            self._board.drop_saves(request, "voided")

    def _meet(self, facts: RequestFacts) -> None:
        self._end(facts.id)  # one of that name that was never ended
        request = self._requests.meet(facts)
        request.space = self._spaces.of(facts)  # if it has none, the request is known still

    def _computed(self, prefill: tuple[int, float]) -> None:
        tokens, seconds = prefill
        if not self._closed and tokens > 0 and seconds > 0:
            self._manager.submit(self._side.computed, self._spaces.now(), tokens, seconds)

    def _ready(self) -> Event | None:
        """Behind the engine's work on the pages so far."""
        device = self._side.device
        return None if device is None else device.current().record()

    def _start(
        self,
        kind: Literal["load", "save"],
        order: LoadOrder | SaveOrder,
        ready: Event | None,
        until: float | None,
    ) -> None:
        request = self._requests.get(order.id)
        known = request is not None
        if request is None:
            request = self._requests.stranger(order.id)
        job = Job(request, kind, order.start, order.stop, self._clock(), until=until, ready=ready)
        try:
            if self._closed or not known:
                raise LookupError("closed" if self._closed else "unknown")
            self._requests.equip(job)
        except Exception as error:  # noqa: BLE001 - whoever waits for it has to hear
            reason = str(error) if isinstance(error, LookupError | ValueError) else repr(error)
            self._board.refuse(job, reason)
        else:
            self._board.add(job)
