"""A planner, and an index that tests fill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.blocks import AdapterId, Identity, KeyChain, part_id
from tierkv.decisions.types import GroupRule
from tierkv.layout import GroupKind, Layout, Space
from tierkv_adapters.serving.negative import NegativeCache
from tierkv_adapters.serving.orders import RequestFacts
from tierkv_adapters.serving.planner import Planner
from tierkv_adapters.serving.replicas import ReplicaIndex
from tierkv_adapters.serving.settings import ServingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv_adapters.serving.orders import StepOrders

BLOCK = 8
PAGE = 4
FULL = GroupRule(GroupKind.FULL)
TOKENS = tuple(range(1, 41))  # five blocks


class World:
    """A planner, and the index that it looks into."""

    def __init__(
        self,
        ranks: int = 1,
        groups: Sequence[GroupRule] = (FULL,),
        settings: ServingSettings | None = None,
    ) -> None:
        self.index = ReplicaIndex(ranks)
        self.groups = tuple(groups)
        self.negative = NegativeCache(30.0)
        self.ranks = ranks
        self.planner = Planner(
            self.spaces,
            groups,
            self.index,
            self.negative,
            settings or ServingSettings(),
            page_tokens=[PAGE] * len(groups),
        )
        self._page = 100

    def spaces(self, adapter: AdapterId | None) -> list[Space]:
        return [
            Space(
                Identity("m", "w", () if adapter is None else (adapter,), (rank, self.ranks)),
                Layout.uniform(1, 1, 4, "float32"),
                BLOCK,
            )
            for rank in range(self.ranks)
        ]

    def store(
        self,
        tokens: Sequence[int] = TOKENS,
        facts: RequestFacts | None = None,
        *,
        ranks: Sequence[int] | None = None,
        bits: int = 1,
    ) -> None:
        """Let ranks hold these tokens (0 bits: no longer)."""
        facts = facts or RequestFacts("x")
        for rank in range(self.ranks) if ranks is None else ranks:
            space = self.spaces(facts.adapter)[rank]
            chain = KeyChain(space.root(facts.tenant, facts.salt), BLOCK)
            chain.follow(tokens, facts.media)
            names = [part_id(k, g) for k in chain.keys for g in range(len(self.groups))]
            self.index.apply(rank, [(name, bits) for name in names])

    def admit(self, id: str = "a", tokens: Sequence[int] = TOKENS, **facts: object) -> None:
        self.planner.admit(
            RequestFacts(id, **facts),  # type: ignore[arg-type]
            tokens,
            load_limit=None,
            save_limit=None,
        )

    def pages(self, tokens: int) -> list[list[int]]:
        count = -(-tokens // PAGE)
        self._page += count
        return [list(range(self._page - count, self._page)) for _ in self.groups]

    def load(self, id: str = "a", computed: int = 0) -> StepOrders:
        """Take the offer that there is, and hand over the step."""
        offered = self.planner.offer(id, computed, 0.0)
        assert offered > 0
        self.planner.accept(id, self.pages(computed + offered), offered)
        return self.planner.step()
