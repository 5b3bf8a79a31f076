"""A batch of blocks in host memory, and its frames: copied both ways, summed on the way.

See :mod:`tierkv.mover.grids` for which bytes of a frame are which bytes of a view.
"""

from __future__ import annotations

from collections import deque
from ctypes import addressof, c_char, memmove
from itertools import chain, cycle, islice, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import xxhash

from tierkv.errors import CapacityError
from tierkv.sections import INTEGERS
from tierkv.views import spanning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.abc import View
    from tierkv.mover.grids import Grid, Loose, Numbers

    _Row: TypeAlias = list[int] | Numbers

__all__ = ["Blocks", "address_of"]

_FEW = 4096


def _plain(row: _Row) -> list[int]:
    return row if isinstance(row, list) else row.tolist()


def address_of(memory: memoryview) -> int:
    """Where memory begins."""
    if not memory.readonly:
        return addressof(c_char.from_buffer(memory))
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class Blocks:
    """A batch of blocks and their frames.

    Args:
        grid: Where they are in the view.
        view: The view.
        starts: First token of each block.
        frames: Whole frames, in the same order; kept alive by this.

    Raises:
        CapacityError: if the memory of a frame is shorter than the frame.
        LayoutError: if the view does not hold a block.
    """

    def __init__(
        self, grid: Grid, view: View, starts: Sequence[int], frames: Sequence[memoryview]
    ) -> None:
        if min(map(len, frames)) < grid.cuts[-1].stop:
            raise CapacityError(f"a frame takes {grid.cuts[-1].stop} bytes, its memory has fewer")
        self.grid = grid
        self._frames = frames
        self._at = np.array([address_of(frame) for frame in frames], np.int64)
        self._shifts = grid.shifts(view, starts)
        near, far = grid.rows(self._shifts, self._at)
        self._near: list[_Row]
        self._far: list[_Row]
        # plain numbers, all at once where they are few: not for each small block
        few = near.size <= _FEW
        self._near = near.tolist() if few else list(near)
        self._far = far.tolist() if few else list(far)

    def __repr__(self) -> str:
        return f"<Blocks: {len(self._frames)} of {self.grid!r}>"

    def right(self, number: int, due: tuple[bytes, ...]) -> bool:
        """Whether the sections of a frame have these checksums."""
        pieces = map(self._frames[number].__getitem__, self.grid.cuts)
        return tuple(map(xxhash.xxh3_128_digest, pieces)) == due

    def scatter(self, low: int, high: int) -> None:
        """Copy frames number ``low`` to ``high`` into the view; inside ``view.writing()``."""
        near = chain.from_iterable(map(_plain, self._near[low:high]))
        far = chain.from_iterable(map(_plain, self._far[low:high]))
        deque(map(memmove, near, far, cycle(self.grid.lengths)), 0)
        if self.grid.loose:
            self._strided(low, high, gather=False)

    def checked_scatter(self, number: int, due: Sequence[bytes]) -> bool:
        """Sum and copy a frame tile by tile, each copied while it is in the cache.

        Only for a view that may hold wrong bytes: what comes before the damage is written.

        Args:
            number: Which frame.
            due: The checksums of its sections.

        Returns:
            Whether all sections are as they were summed; it stops at the first that is not.
        """
        frame, grid = self._frames[number], self.grid
        near, far = iter(_plain(self._near[number])), iter(_plain(self._far[number]))
        lengths, wanted = iter(grid.lengths), iter(due)
        digest, state = xxhash.xxh3_128_digest, None
        pending = 0
        for tile in grid.tiles:
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
        """Copy a block of the view into its frame; the checksum of each section, padding included.

        Rows are summed while they are in the cache.
        """
        frame, grid = self._frames[number], self.grid
        for low, high in grid.pads:
            frame[low:high] = bytes(high - low)
        near, far = iter(_plain(self._near[number])), iter(_plain(self._far[number]))
        lengths, digest = iter(grid.lengths), xxhash.xxh3_128_digest
        if not grid.tiles:
            deque(map(memmove, far, near, lengths), 0)
            self._strided(number, number + 1, gather=True)
            return list(map(digest, map(frame.__getitem__, grid.cuts)))
        found: list[bytes] = []
        state = None
        for rows, cuts, more, whole in grid.tiles:
            deque(map(memmove, islice(far, rows), islice(near, rows), islice(lengths, rows)), 0)
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
        for part in self.grid.loose:
            kind = part.kind
            if kind not in runs:
                runs[kind] = list(self._runs(low, high, self._shifts[kind].tolist()))
            for first, count, apart in runs[kind]:
                if apart >= 0:
                    self._copy(part, first, count, apart, None, gather=gather)
                    continue
                for unit in range(self.grid.units):
                    self._copy(part, first, 1, 0, unit, gather=gather)

    def _runs(
        self, low: int, high: int, shifts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Cut blocks where distances change, in memory or in the view.

        Yields:
            First block; how many; bytes between their ranges, or -1 if those of the one block are
            not at equal distances.
        """
        at, units = self._at.tolist(), self.grid.units
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
        wanted = [n + apart * self.grid.units for n in before]
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
        units = self.grid.units if unit is None else 1
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
