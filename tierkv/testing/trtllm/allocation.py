"""Which pages a request has, as its position moves and windows slide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.testing.trtllm.memory import Memory
    from tierkv.testing.trtllm.modes import Mode
    from tierkv.testing.trtllm.requests import Request

__all__ = ["Allocation"]


class Allocation:
    """Gives pages to requests and takes them back."""

    def __init__(self, mode: Mode, memory: Memory) -> None:
        self._mode = mode
        self._memory = memory

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request may begin.

        A flat pool never evicts (``GUARANTEED_NO_EVICT``): the pages that running requests can
        come to need stay reserved for them. Layer groups need room for the prompt only.
        """
        if self._mode.grouped:
            return self.room_for(request, request.context)
        owed = sum(self._most(r) - len(r.pages[0]) for r in running)
        return self._memory.room(0) - owed >= self._most(request)

    def begin(self, request: Request) -> None:
        """Allocate what a request needs first, its position being where it will compute."""
        self.cover(request, self._first(request))

    def room_for(self, request: Request, stop: int) -> bool:
        """Whether there are pages for the tokens before ``stop``."""
        missing = self._blocks(stop)
        groups = enumerate(request.pages)
        return all(missing - len(pages) <= self._memory.room(group) for group, pages in groups)

    def cover(self, request: Request, stop: int) -> None:
        """Have a page for each block of the tokens before ``stop`` that any window reaches."""
        for group, pages in enumerate(request.pages):
            dead = self._dead(group, request.position)
            while len(pages) < self._blocks(stop):
                pages.append(-1 if len(pages) < dead else self._memory.take(group))

    def slide(self, request: Request) -> None:
        """Take back the pages that no later token of the request attends to."""
        for group, pages in enumerate(request.pages):
            for block in range(min(self._dead(group, request.position), len(pages))):
                if pages[block] >= 0:
                    self._memory.give(group, pages[block], late=True)
                    pages[block] = -1

    def release(self, request: Request, *, late: bool = False) -> None:
        """Take all pages of a request back."""
        for group, pages in enumerate(request.pages):
            for page in pages:
                if page >= 0:
                    self._memory.give(group, page, late=late)
            pages.clear()

    def attended(self, group: int, position: int) -> int:
        """First token that the token at ``position`` attends to."""
        window = self._mode.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _dead(self, group: int, position: int) -> int:
        return self.attended(group, position) // self._mode.tokens_per_block

    def _first(self, request: Request) -> int:
        if not self._mode.grouped or self._mode.chunk is None:
            return request.context
        return min(request.position + self._mode.chunk, request.context)

    def _most(self, request: Request) -> int:
        return self._blocks(len(request.prompt.tokens) + request.prompt.max_tokens)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._mode.tokens_per_block)
