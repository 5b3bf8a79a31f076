"""What the scheduler's side remembers of one request between two hooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_adapters.serving.orders import RequestFacts

__all__ = ["Tracked"]


@dataclass(slots=True)
class Tracked:
    """One request that is known to the planner.

    Attributes:
        facts: What its keys depend on.
        prompt: Token ids that it came with.
        decoded: Token ids that came later.
        computed: Leading tokens that the runtime had in place when it asked.
        stop: Token behind the offer, less what the runtime cancelled of it; ``computed`` if
            nothing is offered.
        offered: Whether the runtime was told to wait for a load.
        loading: Whether a load is ordered, and the request has not run since.
        saves: Whether any save was ordered.
        saved: Token up to which saves were ordered.
        pages: Per group, the pages that the planner was told of with a load; None: of none yet.
        wished: Token up to which the feed was last asked to get its blocks held.
    """

    facts: RequestFacts
    prompt: Sequence[int] = field(repr=False)
    decoded: list[int] = field(default_factory=list, repr=False)
    computed: int = 0
    stop: int = 0
    offered: bool = False
    loading: bool = False
    saves: bool = False
    saved: int = 0
    wished: int = 0
    pages: list[list[int]] | None = None

    def further(self, pages: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """Per group, the pages that follow those told with a load; None if those are others."""
        told, self.pages = self.pages, None
        lists = [list(group) for group in pages]
        if told is None or len(told) != len(lists):
            return None
        if any(mine[: len(old)] != old for old, mine in zip(told, lists, strict=True)):
            return None
        return [mine[len(old) :] for old, mine in zip(told, lists, strict=True)]

    def leading(self, count: int) -> Sequence[int]:
        """The first ``count`` token ids, or all if there are fewer."""
        if count <= len(self.prompt):
            return self.prompt[:count]
        return [*self.prompt, *self.decoded[: count - len(self.prompt)]]
