"""Read-ahead: who reads a document in order will go on reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tierkv.abc import Arrival, Departure, Predictor, Wish
from tierkv.decisions.predict.children import Children
from tierkv.decisions.predict.recent import Recent

if TYPE_CHECKING:
    from tierkv.blocks import BlockKey

__all__ = ["ReadAhead"]


class _Reader(NamedTuple):
    """Where a session is in what it reads.

    Attributes:
        blocks: Blocks of its last request.
        last: Key of the last of them.
        window: Blocks that were wished for ahead of them; 0: it does not read in order.
        until: Block up to which they were.
    """

    blocks: int
    last: BlockKey
    window: int
    until: int


class ReadAhead(Predictor):
    """After blocks that were read in order, the next ones; the window doubles while that lasts.

    A session reads in order when each request goes on from the end of the one before it. From
    the second one on, it wishes for ``first`` blocks beyond the end, and for twice as many each
    time that less than half of the last window is left ahead, as the read-ahead of file systems
    does (Linux' on-demand readahead). A request that goes back, or elsewhere, closes the window.

    What comes next it knows of blocks that were seen before: of the document when it was stored,
    or when somebody else read it.

    Args:
        first: Blocks of the first window.
        most: Blocks of the largest one.
        readers: Most sessions that are watched.
        memory: Most blocks that are remembered, at about 250 bytes each.
    """

    name: ClassVar[str] = "sequential"

    def __init__(
        self, first: int = 8, most: int = 64, readers: int = 4096, memory: int = 131_072
    ) -> None:
        self._first, self._most = first, most
        self._children = Children(memory)
        self._readers: Recent[int, _Reader] = Recent(readers)

    def arrived(self, event: Arrival, now: float) -> list[Wish]:
        """Wish for the next window, if it reads in order and the last one is half used up."""
        keys = event.keys
        if not keys:
            return []
        self._children.learn(keys)
        if not event.session:
            return []
        reader = self._readers.get(event.session)
        here = len(keys)
        on = reader is not None and reader.blocks < here and keys[reader.blocks - 1] == reader.last
        if reader is None or not on:
            if reader is None or reader.last != keys[-1]:  # the same once more changes nothing
                self._readers.set(event.session, _Reader(here, keys[-1], 0, here))
            return []
        window, until = reader.window, max(reader.until, here)
        ahead: list[BlockKey] = []
        if 2 * (until - here) <= window:
            window = (
                min(self._most, 2 * window) if window else max(self._first, here - reader.blocks)
            )
            ahead = self._children.follow(keys[-1], window)
            until = here + len(ahead)
        self._readers.set(event.session, _Reader(here, keys[-1], window, until))
        return [Wish((*keys, *ahead))] if ahead else []

    def ended(self, event: Departure, now: float) -> list[Wish]:
        """Learn what a document is made of."""
        self._children.learn(event.keys, confirm=False)
        return []
