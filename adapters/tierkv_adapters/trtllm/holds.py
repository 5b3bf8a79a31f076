"""Which blocks every rank holds ready, and which holds are given back: decisions without I/O.

TensorRT-LLM counts what it was offered as computed; there is no way to tell it that a load failed.
So nothing is offered but what every rank *holds*: in memory, verified there, and leased, so that it
cannot be evicted. The scheduler's side owns the holds and alone gives them back. Whoever looks up
an offer pins its blocks under the same lock under which holds are chosen to go, so no hold of an
offer is given back before the load is over. A run of which a part was damaged is offered no more.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv_adapters.serving.replicas import ReplicaIndex, needed_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.blocks import BlockKey, PartId
    from tierkv.decisions.types import GroupRule

__all__ = ["HoldBook", "HoldCounters", "Run"]


@dataclass(slots=True)
class HoldCounters:
    """Plain counts.

    Attributes:
        held: Runs of blocks that all ranks came to hold.
        short: Runs that were asked for and gained nothing.
        returned: Runs given back to make room.
        merged: Runs given back because a longer one took their place.
        lost: Runs lost with a rank's connection.
        damaged: Runs of which a rank has lost a part that it held.
    """

    held: int = 0
    short: int = 0
    returned: int = 0
    merged: int = 0
    lost: int = 0
    damaged: int = 0


@dataclass(eq=False, slots=True)
class Run:
    """Leading blocks of a prompt that all ranks hold.

    Attributes:
        keys: Keys of the blocks, as rank 0 names them.
        parts: The parts of them that are held, as rank 0 names them.
        handles: By rank, what gives the hold back; opaque here.
    """

    keys: tuple[BlockKey, ...]
    parts: tuple[PartId, ...]
    handles: list[Any] = field(default_factory=list)


class HoldBook:
    """See the module. A lookup of the planner (``match``, ``source``) sees held blocks only.

    Thread-safe: the scheduler's thread looks up and pins, the feed's thread admits and evicts;
    nobody does I/O under :attr:`lock`.

    Args:
        rules: Rule of each page group.
        part_bytes: Bytes that a part takes in memory, by group.
        block_tokens: Tokens of a block.
        budget: Bytes that may be held on each rank.
    """

    def __init__(
        self,
        rules: Sequence[GroupRule],
        part_bytes: Sequence[int],
        block_tokens: int,
        budget: int,
    ) -> None:
        self.lock = threading.RLock()
        self.counters = HoldCounters()
        self.rules = tuple(rules)
        self.block_tokens = block_tokens
        self.budget = budget
        self.used = 0
        self._part_bytes = tuple(part_bytes)
        self._index = ReplicaIndex(1)
        self._cover: Counter[PartId] = Counter()
        self._runs: OrderedDict[int, Run] = OrderedDict()  # least recently offered first
        self._tips: dict[BlockKey, Run] = {}
        self._owner: dict[BlockKey, Run] = {}
        self._pins: dict[str, Sequence[BlockKey]] = {}
        self._asked: Sequence[BlockKey] = ()
        self._damaged: list[Run] = []  # not offered any more; to be given back

    def __repr__(self) -> str:
        return f"<HoldBook: {len(self._runs)} runs, {self.used} of {self.budget} bytes>"

    # ------------------------------------------------------------------ the planner's lookups

    def match(
        self,
        keys: Sequence[Sequence[BlockKey]],
        groups: Sequence[GroupRule],
        block_tokens: int,
        *,
        start: int = 0,
    ) -> int:
        """Blocks of the longest prefix that every rank holds; all that is held is ready."""
        self._asked = keys[0]
        return self._index.match(keys, groups, block_tokens, start=start)

    def source(
        self,
        keys: Sequence[Sequence[BlockKey]],
        groups: Sequence[GroupRule],
        block_tokens: int,
        blocks: int,
        *,
        start: int = 0,
    ) -> int:
        """1: what is held is in the first memory tier; see ``ReplicaIndex.source``."""
        return self._index.source(keys, groups, block_tokens, blocks, start=start)

    # ------------------------------------------------------------------ offers

    def pin(self, name: str, blocks: int) -> None:
        """Keep what was just looked up until :meth:`unpin`; under :attr:`lock` with the lookup.

        Args:
            name: The request that is offered it.
            blocks: Leading blocks of the prompt that the offer ends with.
        """
        keys = self._asked[:blocks]
        self._pins[name] = keys
        run = self._owner.get(keys[-1]) if keys else None
        if run is not None and id(run) in self._runs:
            self._runs.move_to_end(id(run))

    def unpin(self, name: str) -> None:
        """The request's load is over, or will not be. Idempotent."""
        with self.lock:
            self._pins.pop(name, None)

    # ------------------------------------------------------------------ holds

    def ready_blocks(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are held and could be offered."""
        return self._index.match([keys], self.rules, self.block_tokens)

    def fit(self, keys: Sequence[BlockKey]) -> tuple[int, list[Run]]:
        """Make room for a run: the least recently offered runs go, those of offers never.

        Args:
            keys: Blocks that are about to be held, as rank 0 names them.

        Returns:
            How many leading blocks there is room for, and the runs to give back first.
        """
        victims: list[Run] = []
        with self.lock:
            mine = set(keys)
            pinned = {key for pin in self._pins.values() for key in pin}
            blocks = len(keys)
            needed = self._more(keys)
            for run in list(self._runs.values()):
                if self.used + needed <= self.budget:
                    break
                alone = {part[:-2] for part in run.parts if self._cover[part] == 1}
                if not alone or alone & pinned or alone & mine:
                    continue
                self._drop(run)
                self.counters.returned += 1
                victims.append(run)
            each = sum(self._part_bytes)  # what a block less can save at most
            while blocks and (over := self.used + needed - self.budget) > 0:
                blocks = max(0, blocks - max(1, over // each))
                needed = self._more(keys[:blocks])
        return blocks, victims

    def _more(self, keys: Sequence[BlockKey]) -> int:
        """Bytes that holding a prefix would add."""
        if not keys:
            return 0
        parts = needed_parts(keys, self.rules, self.block_tokens)
        return sum(self._bytes(part) for part in parts if part not in self._cover)

    def _bytes(self, part: PartId) -> int:
        return self._part_bytes[int.from_bytes(part[-2:], "little")]

    def admit(self, run: Run) -> list[Run]:
        """Every rank holds a run: it may be offered from now on.

        Returns:
            Runs that are not needed beside it any more, to be given back.
        """
        with self.lock:
            for part in run.parts:
                if part not in self._cover:
                    self.used += self._bytes(part)
                self._cover[part] += 1
            self._index.apply(0, [(part, 1) for part in run.parts])
            self._runs[id(run)] = run
            older = {id(self._tips[key]): self._tips[key] for key in run.keys if key in self._tips}
            self._tips[run.keys[-1]] = run
            self._owner.update(dict.fromkeys(run.keys, run))
            self.counters.held += 1
            gone = []
            for other in older.values():
                if all(self._cover[part] > 1 for part in other.parts):
                    self._drop(other)
                    self.counters.merged += 1
                    gone.append(other)
        return gone

    def _drop(self, run: Run) -> None:
        del self._runs[id(run)]
        gone = []
        for part in run.parts:
            self._cover[part] -= 1
            if not self._cover[part]:
                del self._cover[part]
                self.used -= self._bytes(part)
                gone.append(part)
        self._index.apply(0, [(part, 0) for part in gone])
        for key in run.keys:
            if self._owner.get(key) is run:
                del self._owner[key]
        if self._tips.get(run.keys[-1]) is run:
            del self._tips[run.keys[-1]]

    def clear(self) -> list[Run]:
        """A rank was lost, and with it every hold: nothing is ready. Returns the runs."""
        with self.lock:
            runs = list(self._runs.values())
            for run in runs:
                self._drop(run)
            self.counters.lost += len(runs)
            damaged, self._damaged = self._damaged, []
        return runs + damaged

    def damage(self, runs: Sequence[Run]) -> None:
        """A rank has lost a part of these runs, though it was held: they are offered no more."""
        with self.lock:
            for run in runs:
                if id(run) in self._runs:
                    self._drop(run)
                    self.counters.damaged += 1
                    self._damaged.append(run)

    def spent(self) -> list[Run]:
        """Damaged runs that no load under way may still read the rest of, to be given back."""
        with self.lock:
            pinned = {key for pin in self._pins.values() for key in pin}
            gone = [run for run in self._damaged if pinned.isdisjoint(run.keys)]
            self._damaged = [run for run in self._damaged if not pinned.isdisjoint(run.keys)]
        return gone

    def damaged(self) -> bool:
        """Whether damaged runs wait to be given back."""
        return bool(self._damaged)

    def runs(self) -> list[Run]:
        """Runs that are held, least recently offered first."""
        with self.lock:
            return list(self._runs.values())
