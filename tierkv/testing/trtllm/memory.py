"""The engine's pages: whose they are, what they hold, and what they hold after that."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from tierkv.testing.trtllm.content import HEADS, KV, WIDTH
from tierkv.testing.trtllm.violations import Violation

if TYPE_CHECKING:
    from torch import Tensor

    from tierkv.testing.trtllm.modes import Mode

__all__ = ["POISON", "Memory"]

POISON = 0xDD
"""What the pages of nobody are full of."""


class Memory:
    """Pages of every rank and layer group; page numbers are the same on all ranks.

    Free pages are poisoned, so that what is read from them too late, or written into them, shows.
    A page that a request lost without being asked (a window slid, an allocation was rolled back)
    keeps its bytes until it is given to somebody, as on a device. The last page of each group is
    nobody's, and holds a pattern that changes: page -1 leads there.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        shape = (KV, HEADS, mode.tokens_per_block, WIDTH)
        groups = range(len(mode.windows))
        self.pools = [
            [
                torch.full((mode.pages, len(mode.layers_of(g)), *shape), POISON, dtype=torch.uint8)
                for g in groups
            ]
            for _ in range(mode.ranks)
        ]
        """Per rank and group, ``[pages, layers, kv, heads, tokens, bytes]``."""
        self._free = [deque(range(mode.pages - 1)) for _ in groups]
        self._spoilt: list[set[int]] = [set() for _ in groups]
        self._taken: list[set[int]] = [set() for _ in groups]
        self._pattern = 0
        self._mark_last_pages()

    def room(self, group: int) -> int:
        """Free pages of a group."""
        return len(self._free[group])

    def take(self, group: int) -> int:
        """A page for a request."""
        page = self._free[group].popleft()
        if page in self._spoilt[group]:
            self._spoilt[group].discard(page)
            self._taken[group].add(page)
        return page

    def give(self, group: int, page: int, *, late: bool = False) -> None:
        """Take a page back. ``late``: it keeps its bytes until it is given to somebody, soon."""
        if late:
            self._free[group].appendleft(page)
            self._spoilt[group].add(page)
            return
        self._free[group].append(page)
        self._taken[group].discard(page)
        for pools in self.pools:
            pools[group][page] = POISON

    def spoil_taken(self) -> None:
        """Poison what was given away since the last call and still had another's bytes."""
        for group, pages in enumerate(self._taken):
            for page in pages:
                for pools in self.pools:
                    pools[group][page] = POISON
            pages.clear()

    def rows(self, rank: int, layer: int, pages: list[int], first: int, stop: int) -> Tensor:
        """KV ``[tokens, kv, heads, bytes]`` of tokens ``[first, stop)`` of one layer."""
        group, at = self._place(layer)
        block = self._mode.tokens_per_block
        begin = first // block
        numbers = torch.tensor(pages[begin : -(-stop // block)])
        found = self.pools[rank][group][numbers, at].permute(0, 3, 1, 2, 4)
        return found.reshape(-1, *found.shape[2:])[first - begin * block : stop - begin * block]

    def write(self, rank: int, layer: int, pages: list[int], first: int, rows: Tensor) -> None:
        """Put ``rows`` ``[tokens, kv, heads, bytes]`` where the tokens from ``first`` on live."""
        group, at = self._place(layer)
        block = self._mode.tokens_per_block
        done = 0
        while done < len(rows):
            number, offset = divmod(first + done, block)
            count = min(block - offset, len(rows) - done)
            if pages[number] >= 0:
                part = rows[done : done + count].permute(1, 2, 0, 3)
                pool = self.pools[rank][group]
                pool[pages[number], at, :, :, offset : offset + count] = part
            done += count

    def check(self) -> None:
        """Nothing was written where nothing may be.

        Raises:
            Violation: ``free-written`` or ``last-page-written``.
        """
        for rank, pools in enumerate(self.pools):
            for group, pool in enumerate(pools):
                clean = [page for page in self._free[group] if page not in self._spoilt[group]]
                written = (pool[clean] != POISON).flatten(1).any(1)
                if bool(written.any()):
                    page = clean[int(written.nonzero()[0])]
                    where = f"rank {rank}, group {group}, page {page}, which is free"
                    raise Violation("free-written", f"bytes were written into {where}")
                if bool((pool[-1] != self._pattern).any()):
                    where = f"rank {rank}, group {group}"
                    raise Violation("last-page-written", f"the last page changed: {where}")
        self._mark_last_pages()

    def lost(self) -> list[int]:
        """Per group, pages that are not free."""
        return [self._mode.pages - 1 - len(free) for free in self._free]

    def _place(self, layer: int) -> tuple[int, int]:
        groups = len(self._mode.windows)
        return layer % groups, layer // groups

    def _mark_last_pages(self) -> None:
        self._pattern = self._pattern % 100 + 1
        for pools in self.pools:
            for pool in pools:
                pool[-1] = self._pattern
