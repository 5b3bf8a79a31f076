"""What is known of every part: one dict and a few dozen bytes of columns a row, no objects."""

from __future__ import annotations

import struct
from array import array
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv.decisions.columns import STEP, FloatColumn, IntColumn
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkv.blocks import PartId

__all__ = [
    "EXACT",
    "IDENT",
    "MAX_TIERS",
    "NO_ROW",
    "ORPHAN",
    "PRIVATE",
    "TIERS_OF",
    "Index",
    "identify",
]

NO_ROW: Final = -1
MAX_TIERS: Final = 8
"""Tiers that fit the one-byte masks."""
TIERS_OF: Final = tuple(
    tuple(tier for tier in range(MAX_TIERS) if mask >> tier & 1) for mask in range(1 << MAX_TIERS)
)
"""Tiers of each mask, fastest first: to look them up takes a third of taking the mask apart."""

EXACT: Final = 1
"""Flag: the KV is exact, not derived."""
ORPHAN: Final = 2
"""Flag: an ancestor is nowhere; no prefix can reach this part until it is refilled."""
PRIVATE: Final = 4
"""Flag: a session's partial tail."""

IDENT: Final = struct.Struct("<Q24xH").unpack
"""What :func:`identify` is made of, for the hottest path: start of the key, and group."""
_STEP_BITS: Final = STEP.bit_length() - 1


def identify(part: PartId) -> int:
    """64 bits that name a part for good, for ghosts and sketches: key's first 8 bytes ^ group."""
    start, group = IDENT(part)
    return int(start ^ group)


class Index:
    """Columns of all rows, and the tree of parts.

    A row stands for one part: resident somewhere, being stored, leased, or merely the missing
    parent of a part that is there. Rows are recycled. Masks hold one bit a tier.

    A column is a memory view; :meth:`add` may replace them all, so none is kept across it.

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
        fresh: Tiers into which it was promoted on a hit, and not asked for since.
        flags: ``EXACT | ORPHAN | PRIVATE``.
        charge: Per tier, bytes charged for the resident copy.
        generation: Generation of the resident copies.
        expiry: Time at which it expires; infinite without TTL.
        tenant: Number of the tenant.
        touched: Access clock of the last use.
    """

    __slots__ = (
        "_columns",
        "_expiry",
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
        "fresh",
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
        self._columns: dict[str, tuple[IntColumn, ...]] = {
            **{name: (IntColumn("i", 0xFF),) for name in ("parent", "first", "after", "before")},
            **{
                name: (IntColumn("B"),)
                for name in ("resident", "pending", "shown", "lossless", "free", "fresh", "flags")
            },
            "generation": (IntColumn("Q"),),
            "tenant": (IntColumn("I"),),
            "touched": (IntColumn("Q"),),
            "children": tuple(IntColumn("I") for _ in range(tiers)),
            "charge": tuple(IntColumn("Q") for _ in range(tiers)),
        }
        self._expiry = FloatColumn()
        self.size = 0
        # names sit in numpy object arrays, which the garbage collector does not follow
        self._names: list[np.ndarray[Any, Any]] = []
        self._spare = array("i")
        self._grow()

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> PartId:
        """Part of a live row."""
        part: PartId = self._names[row >> _STEP_BITS][row & (STEP - 1)]
        return part

    def _grow(self) -> None:
        rows = self.size + STEP
        columns = {
            name: tuple(column.grow(rows) for column in group)
            for name, group in self._columns.items()
        }
        (self.parent,), (self.first,) = columns["parent"], columns["first"]
        (self.after,), (self.before,) = columns["after"], columns["before"]
        (self.resident,), (self.pending,) = columns["resident"], columns["pending"]
        (self.shown,), (self.lossless,) = columns["shown"], columns["lossless"]
        (self.free,), (self.flags,) = columns["free"], columns["flags"]
        (self.fresh,) = columns["fresh"]
        (self.generation,), (self.tenant,) = columns["generation"], columns["tenant"]
        (self.touched,) = columns["touched"]
        self.children, self.charge = columns["children"], columns["charge"]
        self.expiry = self._expiry.grow(rows)
        self._names.append(np.empty(STEP, dtype=object))

    def add(self, part: PartId, parent: int, tenant: int) -> int:
        """Make a row for a part that has none, as a child of row ``parent`` (or of none)."""
        if self._spare:
            row = self._spare.pop()
        else:
            row = self.size
            if row == STEP * len(self._names):
                self._grow()
            self.size += 1
        self._names[row >> _STEP_BITS][row & (STEP - 1)] = part
        self.rows[part] = row
        self.expiry[row] = inf
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
        if shown:
            for tier in TIERS_OF[shown]:
                self.children[tier][parent] += 1

    def remove(self, row: int, part: PartId) -> None:
        """Forget the row of a part that has neither copies nor children."""
        parent = self.parent[row]
        if parent >= 0:
            after, before = self.after[row], self.before[row]
            if after >= 0:
                self.before[after] = before
            if before >= 0:
                self.after[before] = after
            else:
                self.first[parent] = after
            self.parent[row] = NO_ROW
        self.flags[row] = 0  # other columns are written before they are read again
        del self.rows[part]
        self._names[row >> _STEP_BITS][row & (STEP - 1)] = None
        self._spare.append(row)

    def kids(self, row: int) -> Iterator[int]:
        """Children of a row, newest first."""
        child = self.first[row]
        while child >= 0:
            following = self.after[child]
            yield child
            child = following

    def has_live_child(self, row: int) -> bool:
        """Whether a child has a copy, or is being stored, in any tier."""
        child = self.first[row]
        while child >= 0:
            if self.resident[child] | self.pending[child]:
                return True
            child = self.after[child]
        return False
