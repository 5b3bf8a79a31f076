"""What the scheduler's hooks decide: offers, loads, saves and ends of requests, by number.

Nothing here does I/O or waits: slow work is left as a wish to the feed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tierkv_adapters.serving.negative import NegativeCache
from tierkv_adapters.serving.planner import Planner
from tierkv_adapters.trtllm.feed import Wish
from tierkv_adapters.trtllm.guarding import guarded
from tierkv_adapters.trtllm.requests import request_facts, request_name
from tierkv_adapters.trtllm.tracking import Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv_adapters.serving.orders import LoadOrder, StepOrders
    from tierkv_adapters.serving.settings import ServingSettings
    from tierkv_adapters.trtllm.feed import Ranks

__all__ = ["Decisions", "SchedulerCounters"]

_log = logging.getLogger("tierkv.trtllm")


@dataclass(slots=True)
class SchedulerCounters:
    """Plain counts, beside the planner's.

    Attributes:
        early: Requests that came before every rank was connected: neither stored nor offered.
        uncacheable: Requests whose KV is not named by what is known of them.
        partial: Offers not made because the runtime's own match ends inside of a block
            (``enable_partial_reuse``).
        clipped: Offers of which the runtime cancelled a part.
        short_of_pages: Loads not ordered because the runtime gave too few pages for its own count.
    """

    early: int = 0
    uncacheable: int = 0
    partial: int = 0
    clipped: int = 0
    short_of_pages: int = 0


@dataclass(frozen=True, slots=True)
class _PlanSettings:
    min_load_tokens: int
    load_deadline: float | None = None  # what was offered has to come


class Decisions:
    """See the module. Made once all ranks are known; in the scheduler's thread only.

    Args:
        ranks: What the ranks told, and what they hold.
        page_tokens: Tokens of one of the runtime's blocks.
        settings: The adapter's settings.
        wish: Leaves a wish to the feed.
        counters: Counted into.

    Attributes:
        errors: Requests of a step that could not be planned.
    """

    def __init__(
        self,
        ranks: Ranks,
        page_tokens: int,
        settings: ServingSettings,
        wish: Callable[[Wish], None],
        counters: SchedulerCounters,
    ) -> None:
        first = ranks.facts[0]
        self._book = ranks.book
        self._groups = len(ranks.rules)
        self._page_tokens = page_tokens
        self._save_decoded = settings.save_decoded
        self._wish = wish
        self._counters = counters
        self._requests: dict[int, Tracked] = {}
        self._dropped: list[int] = []
        self.errors = 0
        self._planner = Planner(
            # rank 0's names stand for all: the book holds what every rank has
            lambda adapter: [first.space(adapter)],
            ranks.rules,
            ranks.book,
            NegativeCache(settings.retry_after),
            _PlanSettings(settings.min_load_tokens),
            page_tokens=first.page_tokens,
        )

    def stats(self) -> dict[str, int]:
        """Counts by name: the planner's and the holds'."""
        found = asdict(self._planner.counters) | asdict(self._book.counters)
        return found | {"held_bytes": self._book.used}

    # ------------------------------------------------------------------ offers

    def offer(self, request: Any, computed: int, *, reachable: bool) -> int:
        """How many tokens behind the first ``computed`` every rank holds; they are pinned.

        Args:
            request: The runtime's request; it is known from now on.
            computed: Leading tokens that the runtime has in place.
            reachable: Whether every rank is connected; if not, nothing is offered.
        """
        number = int(request.request_id)
        name, tokens = request_name(number), request.get_tokens(0)
        tracked = self._admitted(number, request, tokens)
        if tracked is None:
            return 0
        self._book.unpin(name)  # only the last answer counts
        tracked.computed = tracked.stop = computed
        tracked.offered = False
        if not reachable:
            return 0
        if computed % self._page_tokens:
            self._counters.partial += 1
            return 0
        book = self._book
        with book.lock:
            count = self._planner.offer(name, computed, time.monotonic(), leave=1)
            if count:
                book.pin(name, (computed + count) // book.block_tokens)
        tracked.stop, tracked.offered = computed + count, count > 0
        whole = (len(tokens) - 1) // book.block_tokens * book.block_tokens
        if tracked.stop < whole:
            self._wish(Wish(tracked.facts, tokens, whole, stored=False))
        return count

    def _admitted(self, number: int, request: Any, tokens: Sequence[int]) -> Tracked | None:
        """The request, made known to the planner; None if nothing of it may be offered."""
        planner, name = self._planner, request_name(number)
        known, tracked = planner.known(name), self._requests.get(number)
        if known is not None and tracked is not None and known <= len(tokens):
            if known < len(tokens):  # it was rolled back, and comes with what it has decoded
                tracked.prompt, tracked.decoded = tokens, []
                none: list[Sequence[int]] = [()] * self._groups
                planner.advance(name, tokens=tokens[known:], pages=none, computed=0)
            return tracked
        if known is not None:
            planner.finish(name, awaited=False)
        facts, why_not = request_facts(request, len(tokens))
        limit = None if self._save_decoded else len(tokens)
        planner.admit(facts, tokens, cacheable=why_not is None, save_limit=limit)
        if why_not is not None:
            self._counters.uncacheable += 1
            _log.debug("request %d is not cached: %s", number, why_not)
            self._requests.pop(number, None)
            return None
        tracked = self._requests[number] = Tracked(facts, tokens)
        return tracked

    def cancel(self, number: int, start: int, end: int) -> None:
        """Take back the end of an offer for which there were no pages.

        A beginning that is taken back is in place already; loading it again changes no byte.
        """
        tracked = self._requests.get(number)
        if tracked is not None and start < end and end >= tracked.stop:
            self._counters.clipped += 1
            tracked.stop = max(tracked.computed, min(tracked.stop, start))

    # ------------------------------------------------------------------ pages

    def allocated(self, number: int, pages: Sequence[Sequence[int]]) -> None:
        """Hear which pages a request has; an offer that was taken becomes a load."""
        tracked, planner = self._requests.get(number), self._planner
        if tracked is None or not tracked.offered:
            return
        size = self._book.block_tokens
        # an offer that was cut inside of a block is still loaded to the block's end: what has no
        # page goes nowhere
        stop = -(-tracked.stop // size) * size
        lists = [list(group) for group in pages]
        wanted = [tracked.stop // self._page_tokens for _ in lists]
        if any(len(mine) < most for mine, most in zip(lists, wanted, strict=True)):
            self._counters.short_of_pages += 1
            _log.error("request %d: pages for fewer tokens than were taken of an offer", number)
            # never reported as loaded, as what the runtime counts as computed is not there: the
            # ranks end the engine if the request is not taken back
            return
        if stop > tracked.computed:
            for mine in lists:
                mine.extend([-1] * (stop // self._page_tokens - len(mine)))
            planner.accept(request_name(number), lists, stop - tracked.computed)
            tracked.loading, tracked.pages = True, lists
        else:
            planner.accept(request_name(number), lists, 0)
            self._book.unpin(request_name(number))
            self._dropped.append(number)
        tracked.offered = False

    # ------------------------------------------------------------------ steps

    def step(self, output: Any) -> tuple[StepOrders, list[int]]:
        """Plan a step: what to load, what to save once it is computed, and which loads are off."""
        if output is not None:
            for data in output.new_requests:
                self._scheduled(data, True)
            for data in output.cached_requests:
                self._scheduled(data, False)
        orders = self._planner.step()
        orders.loads[:] = [o for o in map(self._clipped, orders.loads) if o is not None]
        dropped, self._dropped = self._dropped, []
        self._note_saves(orders)
        return orders, dropped

    @guarded(lambda _: None)  # what is wrong with one request costs the others nothing
    def _scheduled(self, data: Any, new: bool) -> None:
        number, planner = int(data.request_id), self._planner
        name, tracked = request_name(number), self._requests.get(number)
        pages = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
        if len(pages) == 1 and not pages[0]:
            pages = [[] for _ in range(self._groups)]
        known = planner.known(name) or 0
        tokens = data.new_tokens[known:] if new else data.new_tokens
        replace = new
        if new and tracked is not None and (further := tracked.further(pages)) is not None:
            pages, replace = further, False  # the others are its own since the load was planned
        if tracked is not None:
            tracked.decoded.extend(tokens)
            if tracked.loading:  # it runs, so its load is over on every rank
                tracked.loading = False
                planner.loaded(name)
                self._book.unpin(name)
        upto = min(data.computed_position + data.num_scheduled_tokens, known + len(tokens))
        planner.advance(
            name,
            tokens=tokens,
            pages=pages,
            computed=upto,
            replace=replace,
            kept=data.computed_position if replace else 0,
        )

    def _clipped(self, order: LoadOrder) -> LoadOrder | None:
        """A load order as far as the runtime still wants it."""
        number = int(order.id)
        tracked = self._requests.get(number)
        size = self._book.block_tokens
        if tracked is None:
            return order
        stop = min(order.stop, -(-tracked.stop // size) * size)
        if stop <= order.start:
            self._dropped.append(number)
            return None
        return order._replace(stop=stop)

    @guarded(lambda _: None)  # the orders are made: they have to reach the ranks
    def _note_saves(self, orders: StepOrders) -> None:
        for order in orders.saves:
            tracked = self._requests.get(int(order.id))
            if tracked is None:
                continue
            tracked.saves, tracked.saved = True, order.stop
            if not tracked.wished and order.stop + self._book.block_tokens > len(tracked.prompt):
                self._wish_stored(tracked)  # the prompt is stored: others may come with it

    def _wish_stored(self, tracked: Tracked) -> None:
        if tracked.saved > tracked.wished:
            tracked.wished = tracked.saved
            tokens = tracked.leading(tracked.saved)
            self._wish(Wish(tracked.facts, tokens, tracked.saved, stored=True))

    # ------------------------------------------------------------------ ends

    def finished(self, number: int) -> bool:
        """A request is over, or lost its pages; whether copies may still be at them."""
        name, tracked = request_name(number), self._requests.pop(number, None)
        self._planner.finish(name, awaited=False)
        self._book.unpin(name)
        if tracked is None:
            return False
        self._wish_stored(tracked)
        # whether copies are still under way is known to the ranks alone: they say so at once
        return tracked.saves or tracked.loading

    def reset(self, number: int) -> None:
        """A request lost its pages before it ran, and will be asked for again."""
        name, tracked = request_name(number), self._requests.get(number)
        self._planner.preempt(name)
        self._book.unpin(name)
        if tracked is not None:
            tracked.offered = tracked.loading = False
            tracked.pages = None
