"""What the ranks are told: the orders that are collected for the next step."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tierkv_adapters.serving.orders import Grown, LoadOrder, SaveOrder, StepOrders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_adapters.serving.plans import Plan

__all__ = ["Telling"]


class Telling:
    """Collects the orders of one step, and with them what the ranks need to know for them.

    Args:
        page_tokens: Tokens of a page of each group.
        strict: Whether each group keeps all of its pages.
    """

    __slots__ = ("_named", "_orders", "_page_tokens", "_strict", "_taken")

    def __init__(self, page_tokens: Sequence[int], strict: Sequence[bool]) -> None:
        self._page_tokens = tuple(page_tokens)
        self._strict = tuple(strict)
        self._orders = StepOrders()
        self._taken = [array("q") for _ in self._page_tokens]
        self._named: set[str] = set()  # requests that the orders speak of

    def step(self, prefill: tuple[int, float] | None) -> StepOrders:
        """Hand over what was collected."""
        orders, self._orders = self._orders, StepOrders()
        self._named.clear()
        if any(self._taken):
            orders.taken = tuple(self._taken)
            self._taken = [array("q") for _ in self._page_tokens]
        orders.prefill = prefill
        return orders

    def reset(self) -> None:
        """Tell that all KV up to now is void; what was to be saved of it is not."""
        self._orders.saves.clear()
        self._orders.reset = True

    def pages(
        self, plan: Plan | None, pages: Sequence[Sequence[int]], replace: bool, kept: int
    ) -> None:
        """A request got pages: those that do not keep their content are told at once.

        Args:
            plan: The request; None: nothing is known of it.
            pages: Per group, further pages, or all if ``replace``.
            replace: Whether these are all.
            kept: With ``replace``: leading tokens whose pages keep their content.
        """
        for taken, group, size in zip(self._taken, pages, self._page_tokens, strict=True):
            fresh = group[kept // size :] if replace and kept else group
            taken.extend(page for page in fresh if page >= 0)
        if plan is not None and plan.cacheable:
            # pages that leave a window are given away without notice, but are not needed again
            done = 0 if plan.loading else max(plan.saved, 0) * plan.block_tokens
            plan.paged(
                pages,
                replace,
                [
                    0 if strict else done // size
                    for strict, size in zip(self._strict, self._page_tokens, strict=True)
                ],
            )

    def load(self, plan: Plan, start: int, stop: int, sync: bool) -> None:
        """Order tokens ``[start, stop)`` to be loaded."""
        self._tell(plan, stop)
        self._orders.loads.append(LoadOrder(plan.facts.id, start, stop, plan.deadline, sync))

    def save(self, plan: Plan, start: int, stop: int) -> None:
        """Order tokens ``[start, stop)`` to be saved."""
        self._tell(plan, stop)
        self._orders.saves.append(SaveOrder(plan.facts.id, start, stop))

    def void(self, plan: Plan) -> None:
        """Tell that a request lost its pages."""
        self._withdraw(plan)
        if plan.told:
            self._orders.voided.append(plan.facts.id)
        plan.void()

    def end(self, plan: Plan) -> None:
        """Tell that a request is over."""
        self._withdraw(plan)
        if plan.told:
            self._orders.ended.append(plan.facts.id)

    def _tell(self, plan: Plan, upto: int) -> None:
        """Tell the ranks what an order for the first ``upto`` tokens needs."""
        orders, id = self._orders, plan.facts.id
        self._named.add(id)
        if not plan.told:
            orders.fresh.append(plan.facts)
            plan.told = True
        tokens = plan.tokens[plan.told_tokens : upto]
        first = [0] * len(plan.pages) if plan.replaced else plan.told_pages
        pages = tuple(group[at:] for group, at in zip(plan.pages, first, strict=True))
        if tokens or plan.replaced or any(pages):
            orders.grown.append(Grown(id, tokens, pages, plan.replaced))
        plan.told_tokens += len(tokens)
        plan.told_pages = [len(group) for group in plan.pages]
        plan.replaced = False

    def _withdraw(self, plan: Plan) -> None:
        """Take back what was ordered for a request since the last step."""
        orders, id = self._orders, plan.facts.id
        if id not in self._named:
            return
        self._named.discard(id)
        if any(order.id == id for order in orders.loads):
            plan.loading = None
        orders.loads[:] = [order for order in orders.loads if order.id != id]
        orders.saves[:] = [order for order in orders.saves if order.id != id]
        for grown in orders.grown:
            if grown.id == id:
                plan.told_tokens -= len(grown.tokens)
        orders.grown[:] = [grown for grown in orders.grown if grown.id != id]
        if any(facts.id == id for facts in orders.fresh):
            plan.told = False
        orders.fresh[:] = [facts for facts in orders.fresh if facts.id != id]
