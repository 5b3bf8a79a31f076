"""vLLM's page pool in small: reference counts, a prefix cache, oldest free page first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tierkv.testing.serving.content import Truth
    from tierkv.testing.serving.objects import Mode

__all__ = ["PagePool"]


class PagePool:
    """Pages of all groups, from one numbering; 0 is the null page.

    Attributes:
        tables: Per request and group, its pages.
        fresh: Pages given out since the list was taken, by group.
    """

    def __init__(self, mode: Mode) -> None:
        self._groups = mode.groups
        self._caching = mode.prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict((p, None) for p in range(1, mode.pages))
        self._refs: dict[int, int] = {}
        self._found: dict[Hashable, int] = {}
        self._name: dict[int, Hashable] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.fresh: list[set[int]] = [set() for _ in self._groups]

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def prefix(self, truth: Truth, tokens: int) -> tuple[tuple[list[int], ...], int]:
        """The longest prefix in the pages, and how many tokens it has; one token is left."""
        size = self._groups[0].page_tokens
        count = (tokens - 1) // size if self._caching else 0
        while count > 0:
            tables = tuple(
                self._look(truth, number, count * size, group.window)
                for number, group in enumerate(self._groups)
            )
            if all(table is not None for table in tables):
                return tuple(table or [] for table in tables), count * size
            count -= 1
        return tuple([] for _ in self._groups), 0

    def _look(self, truth: Truth, group: int, tokens: int, window: int | None) -> list[int] | None:
        size = self._groups[group].page_tokens
        first = 0 if window is None else max(0, tokens - window + 1) // size
        pages = [0] * first
        for at in range(first, tokens // size):
            page = self._found.get((group, truth.state((at + 1) * size - 1)))
            if page is None:
                return None
            pages.append(page)
        return pages

    def allocate(
        self, name: str, computed: int, stop: int, hit: tuple[list[int], ...] | None = None
    ) -> bool:
        """Give a request pages up to token ``stop``; False: too few are free, it got none.

        Args:
            name: The request.
            computed: Tokens in place or on their way: pages behind every window are given back.
            stop: Token behind the last that needs a page.
            hit: Pages of the prefix that was found, for a request without any.
        """
        start = hit if hit is not None else self.tables[name]
        wanted = []
        for number, group in enumerate(self._groups):
            size = group.page_tokens
            gone = 0 if group.window is None else max(0, computed - group.window + 1) // size
            wanted.append([at for at in range(len(start[number]), -(-stop // size)) if at >= gone])
            if hit is None:
                self._drop(start[number], gone)
        revived = {p for table in hit or () for p in table if p in self._free}
        if sum(map(len, wanted)) > len(self._free) - len(revived):
            return False
        if hit is not None:
            for table in hit:
                for page in table:
                    self._hold(page)
            self.tables[name] = tuple(list(table) for table in hit)
        for number, (table, group) in enumerate(zip(self.tables[name], self._groups, strict=True)):
            due = set(wanted[number])
            for at in range(len(table), -(-stop // group.page_tokens)):
                table.append(self._new(number) if at in due else 0)
        return True

    def _drop(self, table: list[int], gone: int) -> None:
        for at in range(min(gone, len(table)) - 1, -1, -1):
            if table[at] == 0:
                break
            self._release(table[at])
            table[at] = 0

    def _new(self, group: int) -> int:
        page, _ = self._free.popitem(last=False)
        self._refs[page] = 1
        name = self._name.pop(page, None)
        if name is not None and self._found.get(name) == page:
            del self._found[name]
        self.fresh[group].add(page)
        return page

    def _hold(self, page: int) -> None:
        if page:
            self._free.pop(page, None)
            self._refs[page] = self._refs.get(page, 0) + 1

    def _release(self, page: int) -> None:
        self._refs[page] -= 1
        if not self._refs[page]:
            del self._refs[page]
            self._free[page] = None
            for fresh in self.fresh:
                fresh.discard(page)

    def remember(self, name: str, truth: Truth, tokens: int) -> None:
        """Find the full pages of a request's first ``tokens`` from now on."""
        if not self._caching or name not in self.tables:
            return
        for number, table in enumerate(self.tables[name]):
            size = self._groups[number].page_tokens
            for at in range(tokens // size):
                page = table[at] if at < len(table) else 0
                if page and page not in self._name:
                    self._name[page] = key = (number, truth.state((at + 1) * size - 1))
                    self._found.setdefault(key, page)

    def release(self, name: str) -> None:
        """A request gives back all of its pages, the last first."""
        for table in self.tables.pop(name, ()):
            for page in reversed(table):
                if page:
                    self._release(page)

    def forget(self) -> None:
        """No prefix is found any more."""
        self._found.clear()
        self._name.clear()

    def take_fresh(self) -> list[list[int]]:
        """Pages given out since the last call and still in use, by group."""
        fresh = [sorted(pages) for pages in self.fresh]
        self.fresh = [set() for _ in self._groups]
        return fresh
