"""Copies between tiers that are still to be made: what each is, and the queue they wait in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import Demote
    from tierkv.layout import Space

__all__ = ["Copy", "CopyQueue"]

_DEMOTION, _WRITE, _PROMOTION = range(3)
_SHARE = 4  # promotions may take one part in so many of the queue


@dataclass(slots=True, eq=False)
class Copy:
    """One copy to make.

    Attributes:
        part: What is copied.
        generation: Which publication of it.
        nbytes: Length of its frame in the source, or a few bytes more (never another page).
        source: Tier it is in.
        target: Tier it goes to.
        space: Its space; None if only its frame tells.
        root: Root of its key chain; None if only its frame tells.
        parent: The part before it, if a prefix needs that and it is known.
        demote: Set if the source copy goes away afterwards.
        chain: Codec chain that a rule of compression wants there; None: that of the target, or
            the one that it has.
        promotion: Whether nobody needs it: it may evict only what is colder, and is the first to
            be dropped.
        ahead: Whether such a copy is made ahead of a use that is expected (a prefetch), not on a
            hit.
        since: When it was queued.
        made: Whether it is in the target now.
        settled: Whether it was made, or was given up.
    """

    part: PartId
    generation: int
    nbytes: int
    source: int
    target: int
    space: Space | None = None
    root: BlockKey | None = None
    parent: PartId | None = None
    demote: Demote | None = None
    promotion: bool = False
    ahead: bool = False
    chain: str | None = None
    since: float = 0.0
    made: bool = False
    settled: bool = False


class CopyQueue:
    """What waits to be copied, bounded in bytes; three lines for each target tier.

    Demotions go first, then write-through, then promotions, which also give way, newest first,
    when something else needs their room in the queue.

    Attributes:
        nbytes: Bytes waiting.
    """

    def __init__(self, tiers: int, limit: int) -> None:
        self._limit = limit
        self._lines: list[tuple[deque[Copy], ...]] = [
            (deque(), deque(), deque()) for _ in range(tiers)
        ]
        self._named: dict[tuple[PartId, int], Copy] = {}
        self._promoting = 0
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<CopyQueue: {len(self)} copies, {self.nbytes} bytes>"

    def __len__(self) -> int:
        return sum(len(line) for lines in self._lines for line in lines)

    def find(self, part: PartId, target: int) -> Copy | None:
        """The copy of a part to a tier that waits or is under way."""
        return self._named.get((part, target))

    def waiting(self) -> list[Copy]:
        """Every copy that waits."""
        return [copy for lines in self._lines for line in lines for copy in line]

    def oldest(self) -> float | None:
        """When the copy that waits longest was queued; promotions do not count."""
        heads = [line[0].since for lines in self._lines for line in lines[:_PROMOTION] if line]
        return min(heads, default=None)

    def offer(self, copy: Copy) -> bool:
        """Take a copy if there is room for it."""
        if copy.promotion and self._promoting + copy.nbytes > self._limit // _SHARE:
            return False
        over = self.nbytes + copy.nbytes - self._limit
        if over > 0 and not copy.promotion:
            self._shed(over)
            over = self.nbytes + copy.nbytes - self._limit
        if over > 0:
            return False
        self.put(copy)
        return True

    def put(self, copy: Copy) -> None:
        """Take a copy whatever its size: somebody waits for it, or for the room it leaves."""
        self._lines[copy.target][_rank(copy)].append(copy)
        self._named[copy.part, copy.target] = copy
        self.nbytes += copy.nbytes
        self._promoting += copy.nbytes * copy.promotion

    def take(self, target: int, parts: int, limit: int, room: Callable[[Copy], int]) -> list[Copy]:
        """Take the next copies into a tier, out of one and the same other tier.

        Args:
            target: Where to.
            parts: Most copies.
            limit: Most bytes; the first copy is taken whatever its size.
            room: Bytes that a copy may need on its way.
        """
        line = next((line for line in self._lines[target] if line), None)
        batch: list[Copy] = []
        size = 0
        while line and len(batch) < parts and (not batch or line[0].source == batch[0].source):
            size += room(line[0])
            if batch and size > limit:
                break
            batch.append(line.popleft())
            self._gone(batch[-1])
        return batch

    def settle(self, batch: Sequence[Copy]) -> None:
        """Note that these copies were made, or given up."""
        for copy in batch:
            copy.settled = True
            if self._named.get((copy.part, copy.target)) is copy:
                del self._named[copy.part, copy.target]

    def drop_promotions(self) -> None:
        """Give up every promotion that waits."""
        self._shed(self._promoting)

    def _shed(self, nbytes: int) -> None:
        dropped: list[Copy] = []
        for lines in self._lines:
            while lines[_PROMOTION] and nbytes > 0:
                dropped.append(lines[_PROMOTION].pop())
                self._gone(dropped[-1])
                nbytes -= dropped[-1].nbytes
        self.settle(dropped)

    def _gone(self, copy: Copy) -> None:
        self.nbytes -= copy.nbytes
        self._promoting -= copy.nbytes * copy.promotion


def _rank(copy: Copy) -> int:
    if copy.promotion:
        return _PROMOTION
    return _DEMOTION if copy.demote is not None else _WRITE
