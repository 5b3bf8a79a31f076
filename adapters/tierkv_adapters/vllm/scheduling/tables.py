"""Which pages of vLLM's tables a connector may load into or store from.

*Windows*: pages that left a window are given away without notice, so that a table is looked at
anew whenever something is stored.

*States* (Mamba, linear attention; cache mode ``align``): a step reads the state of the page of the
token before it and writes that of the page of its last token, over and over until the page is full.
So the page at index i holds the state behind token ``(i + 1) * page`` only if a step ended, or
began, at just that token; pages in between have none. :class:`Tables` notes where steps began and
ended, and hands out those pages alone. Kernels that write the state at an earlier border as well
(prefill checkpoints) are told of by vLLM, page by page.

Steps that vLLM schedules ahead of the results of the step before are certain here, since
speculative decoding is refused for such models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Tables"]


class Tables:
    """Reads vLLM's page tables; keeps what they do not tell. Pages are listed by moved group.

    Args:
        groups: vLLM's ``kv_cache_groups``.

    Attributes:
        moved: Numbers of the groups that are loaded and stored, in vLLM's order.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.moved = [
            n for n, group in enumerate(groups) if getattr(group, "enable_kv_transfer", True)
        ]
        self._windows: list[tuple[int, int]] = []  # (window, page tokens)
        self._states: dict[int, int] = {}  # moved group -> page tokens
        self._sure: dict[str, set[tuple[int, int]]] = {}  # request -> (moved group, token)

    def learn(self, groups: Sequence[tuple[str, int | None, int]]) -> None:
        """Hear what the moved groups are: kind, window and page tokens of each."""
        self._windows = [(window, page) for _, window, page in groups if window is not None]
        self._states = {
            number: page
            for number, (kind, _, page) in enumerate(groups)
            if kind == GroupKind.STATE.value
        }

    @property
    def drops(self) -> bool:
        """Whether requests lose pages while they run, so that their table has to be looked at."""
        return bool(self._windows or self._states)

    def leave(self, request: Any) -> int:
        """Tokens that an offer has to leave: vLLM computes the last token of a whole prompt again.

        It does so with pages for what the token *behind* the prompt sees; the last token sees one
        more. Where a window's page begins just there, the one before it is missing. And a state
        would take that token in twice.
        """
        if self._states:
            return 1
        count = request.num_tokens
        return int(any(count >= w and (count - w + 1) % page == 0 for w, page in self._windows))

    def pages(self, blocks: Sequence[Sequence[int]] | None) -> list[list[int]]:
        """Pages of the moved groups; vLLM's null block, 0, is no page (-1)."""
        if blocks is None:
            return [[] for _ in self.moved]
        return [[page or -1 for page in blocks[group]] for group in self.moved]

    def table(self, output: Any, name: str) -> list[list[int]] | None:
        """All pages of a request that a step schedules; None: this vLLM does not tell."""
        state = getattr(output, "kv_connector_block_state", None)
        blocks = state.get_block_ids(name) if state is not None else None
        return None if blocks is None else self.pages(blocks)

    def copied(self, output: Any) -> list[list[int]]:
        """Pages that a step overwrites with copies of others, though they are no request's."""
        copies = getattr(output, "kv_cache_block_copies", None) or ()
        return [[copy.dst_block_id for copy in copies], *([] for _ in self.moved[1:])]

    def note(self, output: Any, name: str, had: int) -> None:
        """A step computes tokens of a request from ``had`` on: note whose states it leaves."""
        if not self._states:
            return
        sure = self._sure.setdefault(name, set())
        ends = had, had + output.num_scheduled_tokens.get(name, 0)
        for number, page in self._states.items():
            sure.update((number, token) for token in ends if token and token % page == 0)
        state = getattr(output, "kv_connector_block_state", None)
        offers = getattr(state, "boundary_state_offloads", None) or {}
        for group, block, token in offers.get(name, ()):
            number = self.moved.index(group) if group in self.moved else -1
            size, table = self._states.get(number, 0), self.table(output, name)
            if not size or not token or token % size or table is None:
                continue
            at = token // size - 1
            if at < len(table[number]) and table[number][at] == block:
                sure.add((number, token))

    def sure(self, name: str, table: Sequence[Sequence[int]]) -> list[list[int]]:
        """A table without the pages of states that are another token's than their place says."""
        out = [list(pages) for pages in table]
        known, kept = self._sure.get(name, set()), set()
        for number, page in self._states.items():
            for at, block in enumerate(out[number]):
                entry = number, (at + 1) * page
                if block >= 0 and entry in known:
                    kept.add(entry)
                else:
                    out[number][at] = -1
        if self._states:
            self._sure[name] = kept  # a page that is gone does not come back
        return out

    def forget(self, name: str) -> None:
        """A request lost its pages, or is over."""
        self._sure.pop(name, None)

    @property
    def states(self) -> bool:
        """Whether there are recurrent states among the groups."""
        return bool(self._states)
