"""Parts that left, by name, in the order in which they left: what a policy learns from."""

from __future__ import annotations

from array import array
from typing import Final

from tierkv.decisions.columns import IntColumn

__all__ = ["PRIME", "GhostClocks", "GhostTable", "Ghosts"]

PRIME: Final = (1 << 30) - 35
"""Names are told apart by the remainder of this division: Python divides by 30 bits fastest."""

_CLOCK: Final = (1 << 32) - 1
_LEAST: Final = 15  # one less than the fewest places of clocks
_NONE: Final = 0  # node 0 is the end of every list
_NAME: Final = (1 << 64) - 1
_WAYS: Final = 4
_EMPTY: Final = -1
_NO_NAMES: Final = array("Q", [0] * _WAYS)
_NO_VALUES: Final = array("q", [_EMPTY] * _WAYS)


class Ghosts:
    """A queue of names with one number each; a name is found, added or taken out in O(1).

    Nodes lie in arrays: about 40 bytes a name at most, no object that the garbage collector
    follows, and no pause. The table that finds a name grows by one bucket for each node, by linear
    hashing (Litwin, VLDB 1980): a dict of big ints would take 100 bytes a name, and stop for all
    of them when it grows. Names are taken to be hashes; their low bits choose the bucket.

    Attributes:
        count: Names that are remembered now.
        limit: Most names that are kept; the oldest are forgotten beyond it.
    """

    __slots__ = (
        "_after",
        "_heads",
        "_mask",
        "_names",
        "_newer",
        "_newest",
        "_older",
        "_oldest",
        "_spare",
        "_values",
        "count",
        "limit",
    )

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.count = 0
        self._names = array("Q", [0])
        self._values = array("q", [0])
        self._older = array("i", [_NONE])
        self._newer = array("i", [_NONE])
        self._after = array("i", [_NONE])  # next node of the bucket, or next spare node
        self._heads = array("i", [_NONE])
        self._mask = 0  # buckets 0..mask are addressed by it, those beyond by the bit above it too
        self._oldest = self._newest = self._spare = _NONE

    def __len__(self) -> int:
        return self.count

    def __contains__(self, name: int) -> bool:
        name &= _NAME
        names, after = self._names, self._after
        node = self._heads[self._bucket(name)]
        while node and names[node] != name:
            node = after[node]
        return node != _NONE

    def add(self, name: int, value: int = 0) -> None:
        """Remember a name as the newest; a name that is there already is moved.

        Names beyond the limit are forgotten, oldest first, two at most: a limit that was lowered
        takes effect little by little.
        """
        if self.pop(name) is None and not self.limit:
            return
        name &= _NAME
        node = self._spare
        if node:
            self._spare = self._after[node]
        else:
            node = len(self._names)
            self._names.append(0)
            self._values.append(0)
            self._older.append(_NONE)
            self._newer.append(_NONE)
            self._after.append(_NONE)
            self._split()
        self._names[node], self._values[node] = name, value
        bucket = self._bucket(name)
        self._after[node] = self._heads[bucket]
        self._heads[bucket] = node
        newest = self._newest
        self._older[node], self._newer[node] = newest, _NONE
        if newest:
            self._newer[newest] = node
        else:
            self._oldest = node
        self._newest = node
        self.count += 1
        for _ in range(2):
            if self.count > self.limit:
                self.drop_oldest()

    def pop(self, name: int) -> int | None:
        """Forget a name; its number, or None if it was not remembered."""
        name &= _NAME
        bucket = self._bucket(name)
        names, after = self._names, self._after
        node, before = self._heads[bucket], _NONE
        while node and names[node] != name:
            node, before = after[node], node
        if not node:
            return None
        if before:
            after[before] = after[node]
        else:
            self._heads[bucket] = after[node]
        older, newer = self._older[node], self._newer[node]
        if older:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer:
            self._older[newer] = older
        else:
            self._newest = older
        after[node] = self._spare
        self._spare = node
        self.count -= 1
        return self._values[node]

    def drop_oldest(self) -> None:
        """Forget the name that came first; nothing if there is none."""
        if self._oldest:
            self.pop(self._names[self._oldest])

    def _bucket(self, name: int) -> int:
        bucket = name & (self._mask << 1 | 1)
        return bucket if bucket < len(self._heads) else name & self._mask

    def _split(self) -> None:
        """Add one bucket, and move the names there that belong to it."""
        heads, names, after = self._heads, self._names, self._after
        added = len(heads)
        if added > self._mask << 1 | 1:
            self._mask = self._mask << 1 | 1
        source = added & self._mask
        heads.append(_NONE)
        node = heads[source]
        heads[source] = _NONE
        while node:
            following = after[node]
            home = self._bucket(names[node])
            after[node] = heads[home]
            heads[home] = node
            node = following


class GhostTable:
    """What is known of parts that left, by name, where only the freshest matter: no order.

    Four entries of 16 bytes to a set. The table grows by a set, again by linear hashing; a full
    set forgets its smallest number.
    """

    __slots__ = ("_mask", "_names", "_reach", "_sets", "_values")

    def __init__(self) -> None:
        self._names = _NO_NAMES[:]
        self._values = _NO_VALUES[:]
        self._sets = 1
        self._mask = 0  # sets 0..mask are addressed by it, those beyond by the bit above it too
        self._reach = 1

    @property
    def capacity(self) -> int:
        """Entries that it has room for."""
        return self._sets * _WAYS

    def put(self, name: int, value: int, most: int) -> None:
        """Remember a number.

        Args:
            name: Whose it is.
            value: Not negative; it grows with time or worth.
            most: Sets that the table may have; it grows by two a call at most.
        """
        if self._sets < most:
            self._grow(min(2, most - self._sets))
        name &= _NAME
        place = name & self._reach
        start = (place if place < self._sets else name & self._mask) * _WAYS
        known = self._names[start : start + _WAYS]
        values = self._values
        if name in known:
            place = start + known.index(name)
        else:
            ways = values[start : start + _WAYS]
            place = start + ways.index(min(ways))
        self._names[place], values[place] = name, value

    def pop(self, name: int) -> int | None:
        """Forget a name; its number, or None if it is not known."""
        name &= _NAME
        place = name & self._reach
        start = (place if place < self._sets else name & self._mask) * _WAYS
        known = self._names[start : start + _WAYS]
        if name not in known:
            return None
        place = start + known.index(name)
        value = self._values[place]
        self._names[place], self._values[place] = 0, _EMPTY
        return None if value == _EMPTY else value

    def _grow(self, sets: int) -> None:
        for _ in range(sets):
            added = self._sets
            self._sets += 1
            if added > self._reach:
                self._mask = self._reach
                self._reach = self._mask << 1 | 1
            self._names.extend(_NO_NAMES)
            self._values.extend(_NO_VALUES)
            source = (added & self._mask) * _WAYS
            for place in range(source, source + _WAYS):
                name = self._names[place]
                if name & self._reach == added:
                    moved = added * _WAYS + place - source
                    self._names[moved], self._values[moved] = name, self._values[place]
                    self._names[place], self._values[place] = 0, _EMPTY


class GhostClocks:
    """The last clock of parts that left, by name: one to two a row, and the newest wins.

    A name chooses one place by its low bits, and is known there by its remainder: one hash in a
    thousand million is taken for another in its place, and mere numbers never are. Remainder and
    clock take 32 bits each, side by side. Nothing is searched, and nothing moves.

    Args:
        rows: Rows to begin with.

    Attributes:
        mask: Bits of a name that choose its place; one less than there are places.
        cells: By twice the place: remainder of the name modulo :data:`PRIME`, 0 if the place is
            empty. Behind it: the low bits of the clock.
    """

    __slots__ = ("_column", "cells", "mask")

    def __init__(self, rows: int) -> None:
        self.mask = (1 << max(_LEAST, rows - 1).bit_length()) - 1
        self._column = IntColumn("I")
        self.cells = self._column.grow(2 * (self.mask + 1))

    def put(self, name: int, clock: int) -> None:
        """Remember a clock.

        Args:
            name: Whose it is: 64 bits.
            clock: Positive.
        """
        place = (name & self.mask) << 1
        self.cells[place] = name % PRIME
        self.cells[place + 1] = clock & _CLOCK

    def pop(self, name: int, now: int, ahead: int) -> int:
        """Forget a name; its clock, or 0 if it is not known.

        Args:
            name: Whose it is: 64 bits.
            now: The clock now, which its own is taken to be near.
            ahead: By how much its own may be ahead of that, 2^31 at most; it may be the rest of
                2^32 behind.
        """
        place, mark = (name & self.mask) << 1, name % PRIME
        if not mark or self.cells[place] != mark:
            return 0
        self.cells[place] = 0
        passed = now - self.cells[place + 1] & _CLOCK
        if passed > _CLOCK - min(ahead, _CLOCK >> 1):
            passed -= _CLOCK + 1
        return max(0, now - passed)

    def grow(self, rows: int) -> None:
        """Double until there is a place for each row; what is known stays known."""
        while self.mask < rows - 1:
            size = 2 * (self.mask + 1)
            self.cells = self._column.grow(2 * size)
            # in the one half or the other each is in its place; a name is not looked for elsewhere
            self.cells[size : 2 * size] = self.cells[:size]
            self.mask = size - 1
