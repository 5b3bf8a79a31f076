"""Plain caches around an eviction policy: objects by name, and chains of blocks.

What a policy is worth without an engine around it, and the reference that state machines compare
with: :class:`ObjectCache` is the cache of the literature, in which any object may leave;
:class:`ChainCache` evicts leaves only, so that what is resident is always a set of whole prefixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import Policy

__all__ = ["ChainCache", "ObjectCache"]


class ObjectCache:
    """A cache of independent objects whose victims a policy names.

    An object that is too large for the whole cache is not stored. Room for a new one is made
    after it was inserted, and while it is held: the policy then knows for whom (ARC wants to).

    Args:
        policy: Tracks nothing yet; it is told the capacity.
        capacity: Bytes; objects of one byte each make it a number of objects.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        policy.resize(float(capacity))
        self.policy = policy
        self.capacity = capacity
        self.used = 0
        self.clock = 0
        self._rows: dict[int, int] = {}
        self._idents: list[int] = []
        self._nbytes: list[int] = []
        self._spare: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, ident: int) -> bool:
        return ident in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def access(self, ident: int, nbytes: int = 1) -> bool:
        """Ask for an object, and store it if it is not there.

        Args:
            ident: Its name, from 1 on (policies keep no ghost of 0).
            nbytes: Its size if it has to be stored.

        Returns:
            Whether it was there.
        """
        clock = self.clock
        self.clock = clock + 1
        row = self._rows.get(ident)
        if row is not None:
            self.policy.touch(row, clock)
            return True
        if nbytes <= self.capacity:
            self._store(ident, nbytes, clock)
        return False

    def remove(self, ident: int) -> None:
        """Take an object out, as an owner does that no longer wants it."""
        self._drop(self._rows[ident], evicted=False)

    def _store(self, ident: int, nbytes: int, clock: int) -> None:
        if self._spare:
            row = self._spare.pop()
            self._idents[row], self._nbytes[row] = ident, nbytes
        else:
            row = len(self._idents)
            self._idents.append(ident)
            self._nbytes.append(nbytes)
        self._rows[ident] = row
        self.policy.insert(row, nbytes, clock, ident)
        self.used += nbytes
        while self.used > self.capacity:
            victim = self.policy.victim()
            if victim is None:
                raise AssertionError(f"{self.policy.name} names no victim among {len(self)} rows")
            self._drop(victim, evicted=True)
        self.policy.release(row)

    def _drop(self, row: int, *, evicted: bool) -> None:
        self.policy.remove(row, evicted=evicted, ident=self._idents[row])
        del self._rows[self._idents[row]]
        self.used -= self._nbytes[row]
        self._spare.append(row)


class ChainCache:
    """A cache of prefix chains from which only leaves leave.

    Args:
        policy: Tracks nothing yet; it is told the capacity.
        capacity: Blocks.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        policy.resize(float(capacity))
        self.policy = policy
        self.capacity = capacity
        self.clock = 0
        self._rows: dict[int, int] = {}
        self._idents: list[int] = []
        self._parents: list[int] = []
        self._children: list[int] = []
        self._spare: list[int] = []
        self._leased = -1  # the last row of the chain that is being asked for

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, ident: int) -> bool:
        return ident in self._rows

    def request(self, chain: Sequence[int]) -> int:
        """Look a chain up, leaf least recent, and store what is missing of it.

        Nothing of the chain leaves while this goes on; what then finds no room is not stored.

        Args:
            chain: Names of the blocks, root first. A name implies all names before it.

        Returns:
            Leading blocks that were there.
        """
        policy, rows = self.policy, self._rows
        top = self.clock + len(chain) - 1
        self.clock += len(chain)
        hits = 0
        last = -1
        for ident in chain:
            row = rows.get(ident, -1)
            if row < 0:
                break
            policy.touch(row, top - hits)
            last = row
            hits += 1
        if last >= 0:
            policy.hold(last)  # the blocks before it are held by their children
        self._leased = last
        for place in range(hits, len(chain)):
            row = self._store(chain[place], last, top - place)
            if row < 0:
                break
            last = self._leased = row
        self._leased = -1
        if last >= 0 and not self._children[last]:
            policy.release(last)
        return hits

    def _store(self, ident: int, parent: int, clock: int) -> int:
        if len(self._rows) >= self.capacity:
            victim = self.policy.victim()
            if victim is None:
                return -1
            self._evict(victim)
        if self._spare:
            row = self._spare.pop()
            self._idents[row], self._parents[row], self._children[row] = ident, parent, 0
        else:
            row = len(self._idents)
            self._idents.append(ident)
            self._parents.append(parent)
            self._children.append(0)
        if parent >= 0:
            self._children[parent] += 1
        self._rows[ident] = row
        self.policy.insert(row, 1, clock, ident)
        return row

    def _evict(self, row: int) -> None:
        self.policy.remove(row, evicted=True, ident=self._idents[row])
        del self._rows[self._idents[row]]
        self._spare.append(row)
        parent = self._parents[row]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent] and parent != self._leased:
                self.policy.release(parent)
