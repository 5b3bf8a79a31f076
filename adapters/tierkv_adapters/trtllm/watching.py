"""What is held, watched: a part that was held and left a rank's memory was damaged.

A lease keeps a part where it is. Only verification takes a held part away, when whoever reads it
finds that its bytes are not what they were. Every prefix with such a part has to be offered no
more, before somebody else is promised it.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierkv_adapters.serving.replicas import ReplicaIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tierkv.blocks import PartId
    from tierkv_adapters.trtllm.holds import Run

__all__ = ["Residency"]


class Residency(ReplicaIndex):
    """What the ranks have in their tiers, and which of it is held.

    The thread that holds calls :meth:`asking`, :meth:`watch`, :meth:`forget` and :meth:`damaged`;
    those of the feeds tell what changes.

    Args:
        ranks: How many there are.
        lost: Told of a rank whose connection broke.
        wake: Called when :meth:`damaged` has something to look at.
    """

    def __init__(self, ranks: int, lost: Callable[[int], None], wake: Callable[[], None]) -> None:
        super().__init__(ranks)
        self._lost = lost
        self._wake = wake
        self._memory = [~0] * ranks  # tiers that are in memory, as bits
        self._watched: list[Counter[PartId]] = [Counter() for _ in range(ranks)]
        self._left: deque[tuple[int, PartId]] = deque()
        self._suspects: set[tuple[int, PartId]] = set()

    def learn(self, rank: int, memory_tiers: int) -> None:
        """Hear which tiers of a rank are in memory."""
        self._memory[rank] = memory_tiers

    # ------------------------------------------------------------------ the feeds' threads

    def apply(self, rank: int, changes: Iterable[tuple[PartId, int]]) -> None:
        """Take in what changed at a rank; see :meth:`ReplicaIndex.apply`."""
        changes = list(changes)
        super().apply(rank, changes)
        watched, memory = self._watched[rank], self._memory[rank]
        left = [(rank, part) for part, tiers in changes if part in watched and not tiers & memory]
        if left:
            self._left.extend(left)
            self._wake()

    def lost(self, rank: int) -> None:
        """Note that a rank's feed broke; see :meth:`ReplicaIndex.lost`."""
        super().lost(rank)
        self._lost(rank)

    # ------------------------------------------------------------------ the thread that holds

    @contextmanager
    def asking(self, parts: Sequence[Sequence[PartId]]) -> Iterator[None]:
        """Watch these parts, by rank, while the ranks are asked to hold them.

        One rank may have long held its own when the last one answers.
        """
        pairs = [(rank, part) for rank, own in enumerate(parts) for part in own]
        self._watch(pairs)
        try:
            yield
        finally:
            self._unwatch(pairs)

    def watch(self, run: Run) -> None:
        """A run is held from now on."""
        self._watch(_parts_of(run))

    def forget(self, run: Run) -> None:
        """A run is given back."""
        self._unwatch(_parts_of(run))

    def _watch(self, pairs: Iterable[tuple[int, PartId]]) -> None:
        for rank, part in pairs:
            self._watched[rank][part] += 1

    def _unwatch(self, pairs: Iterable[tuple[int, PartId]]) -> None:
        for rank, part in pairs:
            watched = self._watched[rank]
            watched[part] -= 1
            if watched[part] <= 0:
                del watched[part]

    def damaged(self, runs: Sequence[Run]) -> list[Run]:
        """Those of the held runs that have lost a part.

        What was told of before a hold may arrive behind it: a part counts as gone if it is not in
        memory at the next look either.
        """
        gone = {
            (rank, part)
            for rank, part in self._suspects
            if not self.tiers(rank, part) & self._memory[rank]
        }
        self._suspects = set()
        while self._left:
            self._suspects.add(self._left.popleft())
        if not gone:
            return []
        return [run for run in runs if not gone.isdisjoint(_parts_of(run))]

    def suspects(self) -> bool:
        """Whether :meth:`damaged` should be asked again soon."""
        return bool(self._suspects or self._left)


def _parts_of(run: Run) -> Iterator[tuple[int, PartId]]:
    """Every part that a run holds, with its rank."""
    for rank, held in enumerate(run.handles):
        for part in held.parts:
            yield rank, part
