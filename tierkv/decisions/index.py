"""What is known of every part: one dict and a few dozen bytes of columns a row, no objects."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.blocks import PartId

__all__ = ["EXACT", "MAX_TIERS", "NO_ROW", "ORPHAN", "PRIVATE", "Index"]

NO_ROW: Final = -1
MAX_TIERS: Final = 8
"""Tiers that fit the one-byte masks."""

EXACT: Final = 1
"""Flag: the KV is exact, not derived."""
ORPHAN: Final = 2
"""Flag: an ancestor is nowhere; no prefix can reach this part until it is refilled."""
PRIVATE: Final = 4
"""Flag: a session's partial tail."""

_CHUNK_BITS: Final = 12
_CHUNK: Final = 1 << _CHUNK_BITS


class Index:
    """Columns of all rows, and the tree of parts.

    A row stands for one part: resident somewhere, being stored, leased, or merely the missing
    parent of a part that is there. Rows are recycled. Masks hold one bit a tier.

    Attributes:
        rows: Row of each part.
        parent: Row of the part one block before, or -1.
        first: First child, -1 if there is none; ``after`` and ``before`` link siblings.
        children: Per tier, how many children are in (or on their way into) that tier.
        resident: Tiers that hold a copy.
        pending: Tiers into which it is being written.
        shown: Tiers in which the parent counts this row as a child.
        lossless: Tiers whose copy is lossless.
        free: Tiers in which the policy may evict it.
        flags: ``EXACT | ORPHAN | PRIVATE``.
        charge: Per tier, bytes charged for the resident copy.
        generation: Generation of the resident copies.
        expiry: Time at which it expires; infinite without TTL.
        tenant: Number of the tenant.
        touched: Access clock of the last use.
    """

    __slots__ = (
        "_names",
        "_spare",
        "after",
        "before",
        "charge",
        "children",
        "expiry",
        "first",
        "flags",
        "free",
        "generation",
        "lossless",
        "parent",
        "pending",
        "resident",
        "rows",
        "shown",
        "size",
        "tenant",
        "touched",
    )

    def __init__(self, tiers: int) -> None:
        if not 1 <= tiers <= MAX_TIERS:
            raise ConfigError(f"an engine has 1 to {MAX_TIERS} tiers, not {tiers}")
        self.rows: dict[PartId, int] = {}
        self.parent = array("i")
        self.first = array("i")
        self.after = array("i")
        self.before = array("i")
        self.children = tuple(array("I") for _ in range(tiers))
        self.resident = bytearray()
        self.pending = bytearray()
        self.shown = bytearray()
        self.lossless = bytearray()
        self.free = bytearray()
        self.flags = bytearray()
        self.charge = tuple(array("Q") for _ in range(tiers))
        self.generation = array("Q")
        self.expiry = array("d")
        self.tenant = array("I")
        self.touched = array("Q")
        self.size = 0
        # names sit in numpy object arrays, which the garbage collector does not follow
        self._names: list[np.ndarray[Any, Any]] = []
        self._spare = array("i")

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> PartId:
        """Part of a live row."""
        part: PartId = self._names[row >> _CHUNK_BITS][row & (_CHUNK - 1)]
        return part

    def _grow(self) -> None:
        for links in (self.parent, self.first, self.after, self.before):
            links.frombytes(b"\xff" * (links.itemsize * _CHUNK))
        for column in (*self.children, *self.charge, self.generation, self.tenant, self.touched):
            column.frombytes(bytes(column.itemsize * _CHUNK))
        self.expiry.frombytes(bytes(8 * _CHUNK))
        for mask in (
            self.resident,
            self.pending,
            self.shown,
            self.lossless,
            self.free,
            self.flags,
        ):
            mask.extend(bytes(_CHUNK))
        self._names.append(np.empty(_CHUNK, dtype=object))

    def add(self, part: PartId, parent: int, tenant: int) -> int:
        """Make a row for a part that has none, as a child of row ``parent`` (or of none)."""
        if self._spare:
            row = self._spare.pop()
        else:
            row = self.size
            if row == len(self.resident):
                self._grow()
            self.size += 1
        self._names[row >> _CHUNK_BITS][row & (_CHUNK - 1)] = part
        self.rows[part] = row
        self.expiry[row] = float("inf")
        self.tenant[row] = tenant
        if parent >= 0:
            self.link(row, parent)
        return row

    def link(self, row: int, parent: int) -> None:
        """Hang a row that has no parent below ``parent``, and count it there."""
        head = self.first[parent]
        self.parent[row] = parent
        self.after[row] = head
        self.before[row] = NO_ROW
        if head >= 0:
            self.before[head] = row
        self.first[parent] = row
        shown = self.shown[row]
        for tier, children in enumerate(self.children):
            if shown >> tier & 1:
                children[parent] += 1

    def remove(self, row: int) -> None:
        """Forget a row that has neither copies nor children."""
        parent, after, before = self.parent[row], self.after[row], self.before[row]
        if after >= 0:
            self.before[after] = before
        if before >= 0:
            self.after[before] = after
        elif parent >= 0:
            self.first[parent] = after
        self.parent[row] = self.after[row] = self.before[row] = NO_ROW
        self.flags[row] = 0
        self.generation[row] = 0
        self.touched[row] = 0
        names = self._names[row >> _CHUNK_BITS]
        del self.rows[names[row & (_CHUNK - 1)]]
        names[row & (_CHUNK - 1)] = None
        self._spare.append(row)

    def kids(self, row: int) -> Iterator[int]:
        """Children of a row, newest first."""
        child = self.first[row]
        while child >= 0:
            following = self.after[child]
            yield child
            child = following
