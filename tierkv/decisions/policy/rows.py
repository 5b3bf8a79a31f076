"""Numbers by row: dense columns, or dicts while few rows are spread among many."""

from __future__ import annotations

from typing import Final

from tierkv.decisions.columns import STEP, IntColumn
from tierkv.errors import CapacityError

__all__ = ["ABSENT", "MAX_ROWS", "NAME", "ROW_BITS", "Rows"]

ROW_BITS: Final = 28
MAX_ROWS: Final = 1 << ROW_BITS
"""Rows that an index may have."""

ABSENT: Final = -1
"""What a cell of a row that is not tracked holds."""

NAME: Final = (1 << 63) - 1
"""Mask of the bits of a part's 64-bit ``ident`` that a cell holds."""

_SPARSE_COST: Final = 12  # a dict entry costs about as much as this many column cells
_SMALL: Final = 4 * STEP  # so many rows are always kept in columns


class Rows:
    """Cells of 64 signed bits for the tracked rows; what policies keep of each row.

    Row numbers come from the index of all tiers and tenants, so a small partition may hold few
    rows with large numbers: it then takes dicts, and columns again when its rows are many.

    Attributes:
        cells: One mapping of row to number a field, all of the same kind. Adding a row may
            replace them, so none is kept across it. The first field of a tracked row is not
            negative.
        count: Tracked rows.
        size: Rows for which the columns have cells.
        sparse: Whether the fields are dicts instead.
    """

    __slots__ = ("_columns", "cells", "count", "size", "sparse")

    def __init__(self, fields: int) -> None:
        self._columns = tuple(IntColumn("q", 0xFF) for _ in range(fields))
        self.cells: list[memoryview[int] | dict[int, int]] = [c.view for c in self._columns]
        self.sparse = False
        self.size = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __contains__(self, row: int) -> bool:
        first = self.cells[0]
        return row in first if self.sparse else row < self.size and first[row] >= 0

    def add(self, row: int, *values: int) -> None:
        """Start tracking a row with these fields.

        Raises:
            CapacityError: if the row number is too large.
        """
        if row >= self.size or self.sparse:
            self.make_room(row)
        self.cells[0][row] = values[0]
        for place in range(1, len(values)):
            self.cells[place][row] = values[place]
        self.count += 1

    def discard(self, row: int) -> None:
        """Stop tracking a tracked row."""
        self.count -= 1
        if not self.sparse:
            self.cells[0][row] = ABSENT
            return
        for cells in self.cells:
            assert isinstance(cells, dict)
            del cells[row]

    def make_room(self, row: int) -> None:
        """Let ``row`` have cells, of the kind that suits so many tracked rows.

        Raises:
            CapacityError: if the row number is too large.
        """
        if row >= MAX_ROWS:
            raise CapacityError(f"row {row}: an index holds at most {MAX_ROWS} parts a process")
        worth = (self.count + 1) * _SPARSE_COST  # rows for which columns are no dearer
        if self.sparse:
            if worth > row:
                self._to_columns(row)
        elif row < _SMALL or 2 * worth > row:
            self._grow(row + 1)
        else:
            self._to_dicts()

    def _grow(self, size: int) -> None:
        self.cells = [column.grow(size) for column in self._columns]
        self.size = len(self.cells[0])

    def _to_columns(self, row: int) -> None:
        before = self.cells
        self._grow(max(row, *before[0]) + 1)
        self.sparse = False
        for old, new in zip(before, self.cells, strict=True):
            assert isinstance(old, dict)
            for known, value in old.items():
                new[known] = value

    def _to_dicts(self) -> None:
        tracked = [row for row in range(self.size) if self.cells[0][row] >= 0]
        self.cells = [{row: cells[row] for row in tracked} for cells in self.cells]
        self._columns = tuple(IntColumn("q", 0xFF) for _ in self._columns)
        self.size, self.sparse = 0, True
