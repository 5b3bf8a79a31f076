"""A batch of blocks and their frames, copied row by row by library calls, summed on the way.

Each row is a ``memmove``, and tiles are summed while they are in the cache; see
:mod:`tierkv.mover.rowgrids`.
"""

from __future__ import annotations

from collections import deque
from ctypes import memmove
from itertools import chain, cycle, islice, pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

import xxhash

from tierkv.sections import INTEGERS
from tierkv.views import spanning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.jit.copying import Numbers
    from tierkv.mover.grids import Grid
    from tierkv.mover.rowgrids import Loose

    _Row: TypeAlias = list[int] | Numbers

__all__ = ["RowCopies"]

_FEW: Final = 4096


def _plain(row: _Row) -> list[int]:
    return row if isinstance(row, list) else row.tolist()


class RowCopies:
    """A batch of blocks and their frames, for library calls.

    Args:
        grid: Where they are in the view.
        frames: Whole frames; kept alive by this.
        at: int64 ``[frames]``: where each begins.
        shifts: Of :meth:`tierkv.mover.grids.Grid.shifts`.
    """

    def __init__(
        self, grid: Grid, frames: Sequence[memoryview], at: Numbers, shifts: Numbers
    ) -> None:
        self._cuts, self._pads, self._units = grid.cuts, grid.pads, grid.units
        self._frames, self._at, self._shifts = frames, at, shifts
        self.rows = grid.rows
        near, far = grid.rows.addresses(shifts, at)
        self._near: list[_Row]
        self._far: list[_Row]
        # plain numbers, all at once where they are few: not for each small block
        few = near.size <= _FEW
        self._near = near.tolist() if few else list(near)
        self._far = far.tolist() if few else list(far)

    def __repr__(self) -> str:
        return f"<RowCopies: {len(self._frames)} of {self.rows!r}>"

    def right(self, number: int, due: Sequence[bytes]) -> bool:
        """Whether the sections of a frame have these checksums."""
        pieces = map(self._frames[number].__getitem__, self._cuts)
        return tuple(map(xxhash.xxh3_128_digest, pieces)) == tuple(due)

    def scatter(self, low: int, high: int) -> None:
        """Copy frames number ``low`` to ``high`` into the view."""
        near = chain.from_iterable(map(_plain, self._near[low:high]))
        far = chain.from_iterable(map(_plain, self._far[low:high]))
        deque(map(memmove, near, far, cycle(self.rows.lengths)), 0)
        if self.rows.loose:
            self._strided(low, high, gather=False)

    def checked_scatter(self, number: int, due: Sequence[bytes]) -> bool:
        """Sum and copy a frame tile by tile, each copied while it is in the cache.

        Only where there are tiles. It stops at the first section that is not what is due.
        """
        frame, rows = self._frames[number], self.rows
        near, far = iter(_plain(self._near[number])), iter(_plain(self._far[number]))
        lengths, wanted = iter(rows.lengths), iter(due)
        digest, state = xxhash.xxh3_128_digest, None
        pending = 0
        for tile in rows.tiles:
            pending += tile.rows
            if tile.whole:
                found = list(map(digest, map(frame.__getitem__, tile.cuts)))
            else:
                state = state or xxhash.xxh3_128()
                state.update(frame[tile.cuts[0]])
                if tile.more:
                    continue
                found, state = [state.digest()], None
            if found != list(islice(wanted, len(found))):
                return False
            deque(map(memmove, islice(near, pending), islice(far, pending), lengths), 0)
            pending = 0
        return True

    def gather(self, number: int) -> list[bytes]:
        """Copy a block into its frame; the checksums of its sections, padding included."""
        frame, rows = self._frames[number], self.rows
        for low, high in self._pads:
            frame[low:high] = bytes(high - low)
        near, far = iter(_plain(self._near[number])), iter(_plain(self._far[number]))
        lengths, digest = iter(rows.lengths), xxhash.xxh3_128_digest
        if not rows.tiles:
            deque(map(memmove, far, near, lengths), 0)
            self._strided(number, number + 1, gather=True)
            return list(map(digest, map(frame.__getitem__, self._cuts)))
        found: list[bytes] = []
        state = None
        for count, cuts, more, whole in rows.tiles:
            deque(map(memmove, islice(far, count), islice(near, count), islice(lengths, count)), 0)
            if whole:
                found += map(digest, map(frame.__getitem__, cuts))
                continue
            state = state or xxhash.xxh3_128()
            state.update(frame[cuts[0]])
            if not more:
                found.append(state.digest())
                state = None
        return found

    # ------------------------------------------------------------------ loose sections

    def _strided(self, low: int, high: int, *, gather: bool) -> None:
        """Copy the loose sections of some blocks: as many blocks at once as are evenly spread."""
        runs: dict[int, list[tuple[int, int, int]]] = {}
        for part in self.rows.loose:
            kind = part.kind
            if kind not in runs:
                runs[kind] = list(self._runs(low, high, self._shifts[kind].tolist()))
            for first, count, apart in runs[kind]:
                if apart >= 0:
                    self._copy(part, first, count, apart, None, gather=gather)
                    continue
                for unit in range(self._units):
                    self._copy(part, first, 1, 0, unit, gather=gather)

    def _runs(
        self, low: int, high: int, shifts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Cut blocks where distances change, in memory or in the view.

        Yields:
            First block; how many; bytes between their ranges, or -1 if those of the one block are
            not at equal distances.
        """
        at, units = self._at.tolist(), self._units
        first = low
        while first < high:
            mine, last = shifts[first], first + 1
            apart = mine[1] - mine[0] if units > 1 else 0
            if apart < 0 or any(b - a != apart for a, b in pairwise(mine)):
                yield first, 1, -1
                first = last
                continue
            if last < high and units == 1:
                apart = shifts[last][0] - mine[0]
            distance = at[last] - at[first] if last < high else 0
            while (
                last < high
                and min(apart, distance) > 0
                and self._follows(last, apart, distance, shifts, at)
            ):
                last += 1
            yield first, last - first, max(apart, 0)
            first = last

    def _follows(
        self,
        number: int,
        apart: int,
        distance: int,
        shifts: Sequence[Sequence[int]],
        at: Sequence[int],
    ) -> bool:
        """Whether a block and its frame follow the ones before them at these distances."""
        before = shifts[number - 1]
        wanted = [n + apart * self._units for n in before]
        near = at[number] - at[number - 1] == distance
        return near and shifts[number] == wanted and self._same_memory(number)

    def _same_memory(self, number: int) -> bool:
        return self._frames[number].obj is self._frames[number - 1].obj

    def _copy(
        self, part: Loose, first: int, count: int, apart: int, unit: int | None, *, gather: bool
    ) -> None:
        """One operation of torch: a section of ``count`` blocks, or of one range of one block."""
        heads, mine, dim = part.shape
        size, bits = part.size, part.bits
        units = self._units if unit is None else 1
        shape = (count, units, heads, mine, dim)
        apart //= size
        ahead = int(self._shifts[part.kind, first, unit or 0]) // size
        near = bits.as_strided(
            shape, (units * apart, apart, *part.step), bits.storage_offset() + ahead
        )
        at = self._at
        distance = int(at[first + 1] - at[first]) if count > 1 else 0
        length = distance * (count - 1) + len(self._frames[first])
        flat = spanning(self._frames[first], int(at[first]), length // size, INTEGERS[size])
        packed = (distance // size, mine * dim, part.tokens * dim, dim, 1)
        far = flat.as_strided(shape, packed, part.offset // size + (unit or 0) * mine * dim)
        if gather:
            far.copy_(near)
        else:
            near.copy_(far)
