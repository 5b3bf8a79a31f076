"""What the scheduler's side knows of one request: its keys, its pages, and what was told of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tierkv.blocks import KeyChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey
    from tierkv.layout import Space
    from tierkv_adapters.serving.orders import RequestFacts

__all__ = ["Plan"]

_SLICE = 64
"""Blocks hashed at first; further slices are as long as all before them."""


class Plan:
    """One request, as planned.

    Attributes:
        facts: What its keys depend on, besides the tokens.
        cacheable: Whether anything of it may be loaded or stored.
        block_tokens: Tokens of a block.
        tokens: Token ids known so far (``array("I")``).
        pages: Per page group, the pages that it has now; -1 where there is none.
        told_tokens: How many tokens the ranks know.
        told_pages: Per group, how many pages the ranks know.
        told: Whether the ranks know the request.
        replaced: Whether the pages that the ranks know are no longer its pages.
        outdated: Whether its pages hold KV of before a reset: nothing of it may be stored.
        computed: Tokens in place when an offer was asked for last.
        known: Blocks from token 0 that all ranks were seen to hold at the last look; -1: not
            looked at since it has other pages.
        saved: Blocks from token 0 that need no further save; -1: to be looked up.
        offered: Tokens offered beyond ``computed`` that nobody accepted or refused yet.
        loading: Tokens ``[start, stop)`` that are on their way, or None.
        cap: Tokens beyond which nothing is loaded; None: no limit.
        save_cap: Tokens beyond which nothing is stored; None: no limit.
        deadline: Seconds that a load may take; None: no deadline.
        failures: Loads of it that fell short.
    """

    __slots__ = (
        "_chains",
        "block_tokens",
        "cacheable",
        "cap",
        "computed",
        "deadline",
        "facts",
        "failures",
        "known",
        "loading",
        "offered",
        "outdated",
        "pages",
        "replaced",
        "save_cap",
        "saved",
        "tokens",
        "told",
        "told_pages",
        "told_tokens",
    )

    def __init__(
        self,
        facts: RequestFacts,
        spaces: Sequence[Space],
        groups: int,
        *,
        cap: int | None,
        save_cap: int | None,
        deadline: float | None,
    ) -> None:
        self.facts = facts
        self.cacheable = bool(spaces)
        self.block_tokens = spaces[0].block_tokens if spaces else 1
        self._chains = [
            KeyChain(space.root(facts.tenant, facts.salt), space.block_tokens) for space in spaces
        ]
        self.tokens: array[int] = array("I")
        self.pages: tuple[array[int], ...] = tuple(array("q") for _ in range(groups))
        self.told_tokens = 0
        self.told_pages = [0] * groups
        self.told = self.replaced = self.outdated = False
        self.computed = self.offered = self.failures = 0
        self.known = self.saved = -1
        self.loading: tuple[int, int] | None = None
        self.cap = cap
        self.save_cap = save_cap
        self.deadline = deadline

    def __repr__(self) -> str:
        return f"<Plan of {self.facts.id!r}: {len(self.tokens)} tokens, {self.saved} blocks saved>"

    def learn(self, tokens: Sequence[int]) -> bool:
        """Append token ids; False, and nothing more is cached, if one is no unsigned 32-bit int."""
        try:
            self.tokens.extend(tokens if isinstance(tokens, array) else array("I", tokens))
        except (OverflowError, TypeError):
            self.cacheable = False
        return self.cacheable

    def hashed(self, beyond: int, most: int) -> int:
        """How far to hash for a look at the blocks behind ``beyond``: slices that grow."""
        done = len(self._chains[0].keys)
        return min(most, done if done > beyond else max(2 * done, beyond + _SLICE))

    def keys(self, blocks: int) -> list[Sequence[BlockKey]]:
        """Keys of the leading blocks by rank; hashes those that are new (2 us a block and rank)."""
        if len(self._chains[0].keys) < blocks:
            upto = self.tokens[: blocks * self.block_tokens]
            for chain in self._chains:
                chain.follow(upto, self.facts.media)
        return [
            chain.keys if len(chain.keys) == blocks else chain.keys[:blocks]
            for chain in self._chains
        ]

    def void(self) -> None:
        """It lost its pages, and what was planned with them."""
        self.pages = tuple(array("q") for _ in self.pages)
        self.told_pages = [0] * len(self.pages)
        self.replaced = self.told
        self.outdated = False
        self.offered, self.known, self.saved = 0, -1, -1
        self.loading = None

    def outdate(self) -> None:
        """Whatever is stored of it is void, and so is what its pages hold, if it has any."""
        self.outdated = any(self.pages)
        self.offered, self.known, self.saved = 0, -1, -1

    def paged(self, pages: Sequence[Sequence[int]], replace: bool, since: Sequence[int]) -> None:
        """It got pages.

        Args:
            pages: Per group, further pages, or all of them.
            replace: Whether these are all.
            since: Per group, the page before which a difference does not matter any more: nothing
                before it is read or written again.
        """
        if not replace:
            for mine, more in zip(self.pages, pages, strict=True):
                mine.extend(more)
            return
        fresh = tuple(array("q", group) for group in pages)
        for group, first in enumerate(since):
            end = self.told_pages[group]
            if end and self.pages[group][first:end] != fresh[group][first:end]:
                self.replaced = True
        self.pages = fresh
