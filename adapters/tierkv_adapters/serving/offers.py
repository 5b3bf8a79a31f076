"""What can be offered of a request: the longest prefix that every rank holds and none failed at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv_adapters.serving.eras import Eras
from tierkv_adapters.serving.replicas import STRICT
from tierkv_adapters.serving.seams import PlannerCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import AdapterId, BlockKey
    from tierkv.decisions.types import GroupRule
    from tierkv.layout import Space
    from tierkv_adapters.serving.negative import NegativeCache
    from tierkv_adapters.serving.orders import RequestFacts
    from tierkv_adapters.serving.plans import Plan
    from tierkv_adapters.serving.seams import PlanSettings, Replicas

__all__ = ["Offers"]


class Offers:
    """The part of a :class:`~tierkv_adapters.serving.planner.Planner` that looks and answers.

    Attributes:
        counters: What was planned so far.
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
        self._spaces = spaces
        self._eras = Eras()
        self._groups = tuple(groups)
        self._page_tokens = tuple(page_tokens)
        self._strict = all(rule.kind in STRICT for rule in self._groups)
        self._index = index
        self._negative = negative
        self._settings = settings
        self._plans: dict[str, Plan] = {}
        self.counters = PlannerCounters()

    def known(self, id: str) -> int | None:
        """How many tokens of a request are known; None if it was not admitted or is over."""
        plan = self._plans.get(id)
        return None if plan is None else len(plan.tokens)

    def learn(self, id: str, tokens: Sequence[int]) -> None:
        """Take in token ids that follow those known, such as those decoded before a preemption."""
        plan = self._plans.get(id)
        if plan is not None and plan.cacheable:
            plan.learn(tokens)

    def offer(self, id: str, computed: int, now: float, *, leave: int = 0) -> int:
        """How many tokens behind the first ``computed`` can be brought; changes nothing.

        May be asked as often as the engine likes: only the last answer counts.

        Args:
            id: The request.
            computed: Leading tokens that the engine has in place.
            now: The time, for what failed a while ago.
            leave: Tokens of the request that have to be left to compute.

        Returns:
            Tokens; ``computed`` plus that many ends a block. 0: nothing.
        """
        plan = self._plans.get(id)
        if plan is None or not plan.cacheable or plan.loading is not None:
            return 0
        size, before = plan.block_tokens, (plan.computed, plan.offered)
        plan.computed, plan.offered = computed, 0
        limit = len(plan.tokens) - leave
        most = (limit if plan.cap is None else min(limit, plan.cap)) // size
        if most * size <= computed:
            return 0
        self.counters.lookups += 1
        if any(computed % tokens for tokens in self._page_tokens):
            self.counters.misaligned += 1  # a load would write into a page that others may share
            return 0
        start = computed // size
        # from token 0, also where the first part is in place already: saves go on from there, as
        # behind a hole in what is stored others find nothing
        plan.known = blocks = self._longest(plan, most)
        if blocks < start:  # the engine has in place what would fill the hole
            blocks = self._longest(plan, most, start)
        blocks = self._allowed(plan, start, blocks, now)
        tokens = blocks * size - computed
        if tokens <= 0 or tokens < self._settings.min_load_tokens:
            return 0
        plan.offered = tokens
        if before != (computed, tokens):
            self.counters.offered_tokens += tokens
        return tokens

    def source(self, id: str) -> int:
        """Bit of the slowest tier that the load offered or under way reads; 0: none is known."""
        plan = self._plans.get(id)
        if plan is None or not plan.cacheable:
            return 0
        start, stop = plan.loading or (plan.computed, plan.computed + plan.offered)
        size = plan.block_tokens
        blocks = stop // size
        if stop <= start:
            return 0
        return self._index.source(
            plan.keys(blocks), self._groups, size, blocks, start=start // size
        )

    def names(self, id: str, start: int, stop: int) -> Sequence[BlockKey]:
        """Keys on rank 0 of the blocks of tokens ``[start, stop)``; none if it is not known."""
        plan = self._plans.get(id)
        if plan is None or not plan.cacheable or stop > len(plan.tokens):
            return ()
        size = plan.block_tokens
        return plan.keys(stop // size)[0][start // size :]

    def _spaces_of(self, facts: RequestFacts) -> list[Space]:
        """The space of each rank for a request."""
        return [self._eras.within(space, facts.era) for space in self._spaces(facts.adapter)]

    def _longest(self, plan: Plan, most: int, start: int = 0) -> int:
        """Blocks from token 0 that could be loaded, if the first ``start`` are in place."""
        index, groups, size = self._index, self._groups, plan.block_tokens
        if not self._strict:
            return index.match(plan.keys(most), groups, size, start=start)
        blocks = start
        while blocks < most:  # a prompt that nobody holds is not hashed to its end
            upto = plan.hashed(blocks, most)
            blocks = index.match(plan.keys(upto), groups, size, start=blocks)
            if blocks < upto:
                break
        return blocks

    def _allowed(self, plan: Plan, start: int, blocks: int, now: float) -> int:
        """Blocks before the first that failed a short while ago."""
        if blocks <= start or not len(self._negative):
            return blocks
        names = plan.keys(blocks)[0]
        for block in range(start, blocks):
            if self._negative.blocked(names[block], now):
                self.counters.blocked += 1
                if self._strict:
                    return block
                return self._longest(plan, block, start if plan.known < start else 0)
        return blocks
