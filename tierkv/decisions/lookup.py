"""What one lookup has found so far."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

from tierkv.errors import ConfigError
from tierkv.layout import GroupKind

if TYPE_CHECKING:
    from tierkv.decisions.types import FoundPart, MissReason, Query

__all__ = ["Lookup", "Loose"]

_NEED_ALL: Final = (GroupKind.FULL, GroupKind.LATENT)


class Loose:
    """A sliding or state group of one lookup: which parts are held, how far they reach back."""

    __slots__ = ("group", "held", "since", "start", "suffix", "window")

    def __init__(self, group: int, window: int | None, start: int) -> None:
        self.group = group
        self.start = start  # what is before it is in place
        self.suffix = group.to_bytes(2, "little")
        self.window = window  # None: a state group, which needs the part at the boundary only
        self.since = start  # parts since..now are all there
        self.held: deque[tuple[int, FoundPart]] = deque()

    def first(self, tokens: int, last: int, block_tokens: int) -> int:
        """First block whose part is needed where a prefix of ``tokens`` ends with ``last``."""
        if self.window is None:
            return max(last, self.start)
        if self.window == 1:
            return last + 1
        return max(max(0, tokens - (self.window - 1)) // block_tokens, self.start)


class Lookup:
    """One lookup under way; a handle for the caller, who reads :attr:`id` at most.

    Attributes:
        id: Number of the lookup, as in the decision log.
        query: What is looked up.

    Raises:
        ConfigError: if it starts behind its last block.
    """

    __slots__ = (
        "best",
        "clock",
        "counts",
        "done",
        "end",
        "epoch",
        "found",
        "heard",
        "id",
        "loose",
        "position",
        "query",
        "reason",
        "rows",
        "strict",
    )

    def __init__(self, number: int, query: Query) -> None:
        if not 0 <= query.start <= len(query.keys):
            raise ConfigError(f"start is a block from 0 to {len(query.keys)}, not {query.start}")
        self.id = number
        self.query = query
        self.strict = [
            (group, group.to_bytes(2, "little"))
            for group, rule in enumerate(query.groups)
            if rule.kind in _NEED_ALL
        ]
        self.loose = [
            Loose(group, rule.window, query.start)
            for group, rule in enumerate(query.groups)
            if rule.kind not in _NEED_ALL
        ]
        self.counts = query.touch and not query.ahead  # admission and hints hear of it
        self.clock = self.heard = 0  # heard: blocks that admission has been told of
        self.reset(0)

    def reset(self, epoch: int) -> None:
        """Start over."""
        self.position = 0
        self.end = len(self.query.keys)
        self.best = self.query.start
        self.reason: MissReason | None = None
        self.found: list[FoundPart] = []
        self.rows = array("i")  # rows of `found`
        self.done = False
        self.epoch = epoch
        for loose in self.loose:
            loose.since = loose.start
            loose.held.clear()

    def tokens(self, blocks: int) -> int:
        """Tokens of a prefix of so many blocks."""
        query = self.query
        return query.tokens if blocks == len(query.keys) else blocks * query.block_tokens
