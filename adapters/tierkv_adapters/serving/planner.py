"""The scheduler's side of every adapter: what is offered, loaded and saved, decided in pure code.

The life of a request: :meth:`Planner.admit`; any number of :meth:`Planner.offer`; when the engine
gave it pages :meth:`Planner.accept` (a load is ordered if it took the offer), and once the ranks
report, :meth:`Planner.loaded` or :meth:`Planner.failed`; :meth:`Planner.advance` with every step
that computes some of it, which orders saves of the blocks that become full;
:meth:`Planner.preempt` whenever it loses its pages, :meth:`Planner.finish` at last.
:meth:`Planner.step` hands over what was planned since the step before.

Ranks hear of a request when there is something to do for it, and of pages and tokens together with
the order that needs them; what nobody loads or saves costs no message. Only ``taken``, the pages
whose content changes hands, is told of every request: a copy may still read them.

What ranks hold is a hint that may be out of date (vLLM's issue 39702 is an assertion that it is
not): a load that falls short is followed by computing, and the block that failed is not offered
again to anybody for a while. A request is refused further loads once two of them fell short.

*Cost* on the scheduler's thread: as measured in :mod:`tierkv_adapters.vllm.scheduling.scheduler`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierkv.layout import GroupKind
from tierkv_adapters.serving.offers import Offers
from tierkv_adapters.serving.plans import Plan
from tierkv_adapters.serving.replicas import STRICT
from tierkv_adapters.serving.telling import Telling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import AdapterId
    from tierkv.decisions.types import GroupRule
    from tierkv.layout import Space
    from tierkv_adapters.serving.negative import NegativeCache
    from tierkv_adapters.serving.orders import RequestFacts, StepOrders
    from tierkv_adapters.serving.seams import PlanSettings, Replicas

__all__ = ["Planner"]

_MOST_FAILURES: Final = 2


class Planner(Offers):
    """Decides for the requests of one engine; not thread-safe, never waits, raises nothing.

    A request that was never admitted, or is over, may be named to any method: what the engine does
    with pages is then told to the ranks, and nothing else happens.

    Args:
        spaces: For an adapter, or None, the space of each rank; nothing: not cacheable.
        groups: Rule of each page group, in the layout's order.
        page_tokens: Tokens of a page of each group; a block is a whole number of each.
        index: What the ranks hold.
        negative: What failed lately.
        settings: Deadline and least size of loads.
    """

    def __init__(
        self,
        spaces: Callable[[AdapterId | None], Sequence[Space]],
        groups: Sequence[GroupRule],
        index: Replicas,
        negative: NegativeCache,
        settings: PlanSettings,
        *,
        page_tokens: Sequence[int],
    ) -> None:
        super().__init__(spaces, groups, index, negative, settings, page_tokens=page_tokens)
        self._must = [g for g, rule in enumerate(self._groups) if rule.kind in STRICT]
        self._borders = [g for g, r in enumerate(self._groups) if r.kind is GroupKind.STATE]
        self._leaving: dict[str, Plan] = {}  # over, but a load of theirs is still under way
        self._told = Telling(page_tokens, [rule.kind in STRICT for rule in self._groups])

    # ------------------------------------------------------------------ life of a request

    def admit(
        self,
        facts: RequestFacts,
        tokens: Sequence[int],
        *,
        cacheable: bool = True,
        load_limit: int | None = None,
        save_limit: int | None = None,
        deadline: float | None = None,
    ) -> None:
        """Take a request in; nothing happens if it is in already.

        Args:
            facts: What it is.
            tokens: The token ids it has so far.
            cacheable: Whether any of it may be loaded or stored.
            load_limit: Load no token at or behind this position.
            save_limit: Store no token at or behind this position.
            deadline: Seconds that its loads may take; None: as the settings say.
        """
        if facts.id in self._plans:
            return
        if facts.id in self._leaving:  # of two loads of one name, nobody could tell which ended
            load_limit = 0
        plan = Plan(
            facts,
            self._spaces_of(facts) if cacheable else (),
            len(self._groups),
            cap=load_limit,
            save_cap=save_limit,
            deadline=self._settings.load_deadline if deadline is None else deadline,
        )
        if plan.cacheable:
            plan.learn(tokens)
        self._plans[facts.id] = plan
        self.counters.requests += 1
        self.counters.uncacheable += not plan.cacheable

    def accept(
        self, id: str, pages: Sequence[Sequence[int]], tokens: int, *, sync: bool = False
    ) -> None:
        """Hear what pages the engine gave for an offer, and order the load.

        Args:
            id: The request.
            pages: Per group, all of its pages; those before ``computed`` may be shared.
            tokens: How many tokens of the offer it takes; 0: none, and the pages are not its yet
                (they are told with :meth:`advance`).
            sync: Whether the forward pass of the step being planned reads what is loaded.
        """
        plan = self._plans.get(id)
        if plan is None or tokens <= 0:
            if plan is not None:
                plan.offered = 0
            return
        start = plan.computed
        stop = start + tokens
        plan.offered, plan.loading = 0, (start, stop)
        self._told.pages(plan, pages, True, start)
        # where the offer lies behind a hole, the engine has what fills it: it is saved as well, and
        # what is stored behind it costs no copy
        hole = 0 <= plan.known < start // plan.block_tokens
        plan.saved = plan.known if hole else stop // plan.block_tokens
        self._told.load(plan, start, stop, sync)
        self.counters.loads += 1
        self.counters.accepted_tokens += tokens

    def loaded(self, id: str) -> None:
        """All that was ordered to be loaded is in place."""
        plan = self._ended(id)
        if plan is not None and plan.loading is not None:
            self.counters.loaded_tokens += plan.loading[1] - plan.loading[0]
            plan.loading = None

    def failed(self, id: str, tokens_in_place: int, now: float, *, anew: bool = False) -> None:
        """A load ended with so many tokens in place, less than ordered as a rule.

        The first block that is not there is not offered to anybody for a while.

        Args:
            id: The request.
            tokens_in_place: Leading tokens that are in its pages, counted from token 0.
            now: The time.
            anew: Whether the engine computes all of it again, whatever is in place.
        """
        plan = self._ended(id)
        if plan is None or plan.loading is None:
            return
        start, stop = plan.loading
        plan.loading = None
        place = min(max(tokens_in_place, start), stop)
        self.counters.loaded_tokens += place - start
        if plan is not self._plans.get(id):  # it is over: the load was given up, nothing failed
            return
        if place == stop and not anew:
            return
        block = min(place, stop - 1) // plan.block_tokens
        last = stop // plan.block_tokens
        if self._borders and place == start:  # nothing is in place without the state at the end
            block = max(block, last - 1)
        if block < last:
            self._negative.failed((plan.keys(last)[0][block],), now)
        plan.failures += 1
        cap = block * plan.block_tokens if plan.failures < _MOST_FAILURES else 0
        plan.cap = cap if plan.cap is None else min(plan.cap, cap)
        plan.known, plan.saved = -1, min(plan.saved, block)
        self.counters.failed_loads += 1
        self.counters.failed_tokens += stop - place

    def due(self, id: str, computed: int) -> bool:
        """Whether :meth:`advance` with that many tokens computed would order a save."""
        plan = self._plans.get(id)
        if plan is None or not plan.cacheable or plan.outdated or plan.loading is not None:
            return False
        upto = computed if plan.save_cap is None else min(computed, plan.save_cap)
        return upto // plan.block_tokens > plan.saved

    def advance(
        self,
        id: str,
        *,
        tokens: Sequence[int],
        pages: Sequence[Sequence[int]],
        computed: int,
        replace: bool = False,
        kept: int = 0,
    ) -> tuple[int, int] | None:
        """The engine computes more of a request in this step: plan the saves of what is full then.

        Args:
            id: The request.
            tokens: Token ids that follow those known.
            pages: Per group, further pages, or all if ``replace``; -1 where there is none.
            computed: Leading tokens whose KV is certainly right once this step is over; tokens
                that are only guessed (speculation) are not among them.
            replace: Whether ``pages`` are all of its pages.
            kept: With ``replace``: leading tokens that were in place before the step; their pages
                keep their content.

        Returns:
            Tokens ``[start, stop)`` that are ordered to be saved; None: nothing is.
        """
        plan = self._plans.get(id)
        self._told.pages(plan, pages, replace, kept)
        if plan is None or not plan.cacheable:
            return None
        if (tokens and not plan.learn(tokens)) or not self.due(id, computed):
            return None
        size = plan.block_tokens
        upto = min(computed, len(plan.tokens))
        full = (upto if plan.save_cap is None else min(upto, plan.save_cap)) // size
        if plan.saved < 0:
            plan.saved = plan.known if plan.known >= 0 else self._longest(plan, full)
        start = plan.saved
        stop = self._backed(plan, start, full)
        if stop < full:  # nothing behind a hole would ever be found again
            self.counters.unbacked_blocks += full - max(start, stop)
            plan.save_cap = stop * size
        stops = self._stops(plan, start, stop)
        # blocks without a state behind them go with the next that has one
        plan.saved = max(start, full) if not self._borders else max((start, *stops))
        first = start
        for stop in stops:
            self._told.save(plan, first * size, stop * size)
            self.counters.saves += 1
            self.counters.saved_blocks += stop - first
            first = stop
        return (start * size, first * size) if stops else None

    def taken(
        self, pages: Sequence[Sequence[int]], *, replace: bool = False, kept: int = 0
    ) -> None:
        """Pages are written to in this step, whosever they are: no copy may go on reading them.

        Args:
            pages: By group.
            replace: Whether they are all pages of one request.
            kept: With ``replace``: leading tokens whose pages keep their content.
        """
        self._told.pages(None, pages, replace, kept)

    def preempt(self, id: str) -> None:
        """The engine took all of a request's pages away; it may come back with others."""
        plan = self._plans.get(id)
        if plan is not None:
            self._told.void(plan)

    def finish(self, id: str, *, awaited: bool = True) -> None:
        """A request is over, in whatever state it was; saves ordered earlier go on.

        Args:
            id: The request.
            awaited: Whether the end of a load that is under way will be told.
        """
        plan = self._plans.pop(id, None)
        if plan is None:
            return
        self._told.end(plan)
        if awaited and plan.loading is not None:
            self._leaving[id] = plan

    def renew(self) -> None:
        """All that the ranks hold is void, as if other weights computed from now on.

        A rank that is emptied at once, whoever does it, may still store what it was ordered before;
        the next step has it stop that, and empty itself again before it follows any new order.
        Requests that have pages keep them, as the engine wants it, but nothing more of them is
        stored until they lose them.
        """
        for plan in self._plans.values():
            plan.outdate()
        self._told.reset()

    def step(self, prefill: tuple[int, float] | None = None) -> StepOrders:
        """Hand over what was planned since the last call.

        Args:
            prefill: (tokens, seconds) of an earlier step that was mostly prefill.
        """
        return self._told.step(prefill)

    # ------------------------------------------------------------------ parts of the above

    def _backed(self, plan: Plan, start: int, stop: int) -> int:
        """Where blocks from ``start`` on end whose pages are there; only strict groups count."""
        for group in self._must:
            per = plan.block_tokens // self._page_tokens[group]
            pages = plan.pages[group][start * per : stop * per]
            whole = len(pages) // per
            if -1 in pages:
                whole = min(whole, pages.index(-1) // per)
            stop = start + whole
        return stop

    def _stops(self, plan: Plan, start: int, stop: int) -> list[int]:
        """Where saves of blocks ``[start, stop)`` end: at every state, or else at the last block.

        A prefix can be found again only where the state of every recurrent group is stored, and a
        save stores that behind its last token.
        """
        if not self._borders or stop <= start:
            return [stop] if stop > start else []
        pages = [(plan.pages[g], plan.block_tokens // self._page_tokens[g]) for g in self._borders]
        return [
            block
            for block in range(start + 1, stop + 1)
            if all(block * per <= len(held) and held[block * per - 1] >= 0 for held, per in pages)
        ]

    def _ended(self, id: str) -> Plan | None:
        """The request that a report of a load is about."""
        plan = self._plans.get(id)
        if plan is None or plan.loading is None:
            plan = self._leaving.pop(id, None)
        return plan
