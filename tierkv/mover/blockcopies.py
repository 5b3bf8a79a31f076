"""A batch of blocks in host memory, and its frames: copied both ways, summed on the way.

See :mod:`tierkv.mover.grids` for which bytes of a frame are which bytes of a view. With machine
code (:mod:`tierkv.jit.copying`) frames by the hundred take one call and one pass; without, each
row is a call from C, and tiles are summed while they are in the cache.
"""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import TYPE_CHECKING, Final

import numpy as np

from tierkv.errors import CapacityError
from tierkv.jit import copying
from tierkv.mover.rowcopies import RowCopies
from tierkv.mover.steps import never

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierkv.abc import View
    from tierkv.mover.grids import Grid

__all__ = ["Blocks", "address_of"]

_TOGETHER_BYTES: Final = 1024 * 1024
"""Frames are verified, and then copied while they are in the cache still, so many bytes at once: a
large one by itself, small ones together, which saves calls."""
_LOOSE_BYTES: Final = 32 * 1024 * 1024
"""Where torch copies a section of many blocks in one operation, that is worth more: what a caller
that is cancelled may have to wait for."""
_RUN_BYTES: Final = 512 * 1024
"""As much with machine code: two such groups fit the L2 cache."""
_SPENT_BYTES: Final = 3 * 1024 * 1024
"""Frames that are larger fill the caches by the second: what is copied is to make room at once."""


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

    Attributes:
        run: The same for machine code; None where there is none, or it cannot do these sections.
    """

    def __init__(
        self, grid: Grid, view: View, starts: Sequence[int], frames: Sequence[memoryview]
    ) -> None:
        if min(map(len, frames)) < grid.nbytes:
            raise CapacityError(f"a frame takes {grid.nbytes} bytes, its memory has fewer")
        self.grid = grid
        self._frames = frames
        at = np.array(list(map(address_of, frames)), np.int64)
        shifts = grid.shifts(view, starts)
        self.run: copying.Run | None = None
        self._rows: RowCopies | None = None
        if grid.places is not None and copying.ready():
            self.run = copying.Run(grid.places, at, shifts, grid.nbytes)
            return
        self._rows = RowCopies(grid, frames, at, shifts)

    def __repr__(self) -> str:
        return f"<Blocks: {len(self._frames)} of {self.grid!r}>"

    @property
    def together(self) -> int:
        """How many bytes of frames to verify before they are written together."""
        if self._rows is None:
            return _RUN_BYTES
        return _LOOSE_BYTES if self._rows.rows.loose else _TOGETHER_BYTES

    @property
    def stepwise(self) -> bool:
        """Whether :meth:`checked_scatter` takes less than summing first and copying then."""
        return self._rows is None or bool(self._rows.rows.tiles)

    def right(self, number: int, due: tuple[bytes, ...]) -> bool:
        """Whether the sections of a frame have these checksums."""
        if self.run is not None:
            self.run.expect(number, [due])
            return self.run.scatter(0, 0, number, number + 1) < 0
        assert self._rows is not None
        return self._rows.right(number, due)

    def land(
        self,
        low: int,
        high: int,
        due: Sequence[tuple[bytes, ...]] | None,
        *,
        loosely: bool = False,
        stopped: Callable[[], bool] = never,
    ) -> int:
        """Verify frames ``low`` to ``high`` and copy them into the view; in ``view.writing()``.

        Each is summed as a whole before any of it is copied. With machine code its bytes come from
        memory once nevertheless: a group of frames is summed while the one before it is copied,
        which is in the cache still.

        Args:
            low: First of them.
            high: The one behind the last.
            due: The checksums of the sections of each; None: they were verified before.
            loosely: Whether the view may hold wrong bytes: then all is one pass.
            stopped: Asked between groups of frames; once it is true, the rest is left.

        Returns:
            How many are right and in place: those before the first that is not.
        """
        if loosely and due is not None and self.run is None and self.stepwise:
            for number in range(low, high):
                if stopped() or not self.checked_scatter(number, due[number - low]):
                    return number - low
            return high - low
        if due is None or self.run is None:
            return self._land(low, high, due, stopped)
        self.run.expect(low, due)
        return self._land_run(low, high, stopped, loosely=loosely)

    def _land(
        self,
        low: int,
        high: int,
        due: Sequence[tuple[bytes, ...]] | None,
        stopped: Callable[[], bool],
    ) -> int:
        step = -(-self.together // self.grid.nbytes)
        for first in range(low, high, step):
            if stopped():
                return first - low
            stop = min(first + step, high)
            right = stop
            if due is not None:
                right = self._first_wrong(first, stop, due[first - low : stop - low])
            self.scatter(first, right)
            if right < stop:
                return right - low
        return high - low

    def _land_run(self, low: int, high: int, stopped: Callable[[], bool], *, loosely: bool) -> int:
        step = -(-self.together // self.grid.nbytes)
        spent = step == 1 and self.grid.nbytes > _SPENT_BYTES
        waits = low  # frames from here on were verified at most
        for first in range(low, high, step):
            if stopped():
                return waits - low
            stop = min(first + step, high)
            if loosely:
                wrong = self.scatter(first, stop, first, stop)
            else:
                wrong = self.scatter(waits, first, first, stop, spent)
            if wrong >= 0:
                if not loosely:
                    self.scatter(first, wrong)
                return wrong - low
            waits = stop if loosely else first
        if waits < high and not stopped():
            self.scatter(waits, high)
            waits = high
        return waits - low

    def _first_wrong(self, low: int, high: int, due: Sequence[tuple[bytes, ...]]) -> int:
        for number, wanted in zip(range(low, high), due, strict=True):
            if not self.right(number, wanted):
                return number
        return high

    def scatter(
        self, low: int, high: int, first: int = 0, stop: int = 0, spent: bool = False
    ) -> int:
        """Copy frames number ``low`` to ``high`` into the view; inside ``view.writing()``.

        Where there is a :attr:`run`, frames ``first`` to ``stop`` are verified in the same pass:
        the first of them that does not have the checksums that the run expects is returned.
        ``spent`` frames make room in the caches as they are copied.

        Returns:
            A frame that is wrong, or -1.
        """
        if self.run is not None:
            return self.run.scatter(low, high, first, stop, spent)
        assert self._rows is not None
        self._rows.scatter(low, high)
        return -1

    def checked_scatter(self, number: int, due: Sequence[bytes]) -> bool:
        """Sum and copy a frame tile by tile, each copied while it is in the cache.

        Only for a view that may hold wrong bytes: some are written before the damage is found.

        Args:
            number: Which frame.
            due: The checksums of its sections.

        Returns:
            Whether all sections are as they were summed.
        """
        if self.run is not None:
            self.run.expect(number, [due])
            return self.run.scatter(number, number + 1, number, number + 1) < 0
        assert self._rows is not None
        return self._rows.checked_scatter(number, due)

    def gather(self, low: int, high: int, sums: bool = True) -> list[tuple[bytes, ...]]:
        """Copy blocks ``low`` to ``high`` of the view into their frames.

        Args:
            low: First of them.
            high: The one behind the last.
            sums: Whether anybody wants the checksums.

        Returns:
            For each: the checksum of each section, padding included; of no use without ``sums``.
        """
        if self.run is not None:
            return self.run.gather(low, high, sums)
        assert self._rows is not None
        return [tuple(self._rows.gather(number)) for number in range(low, high)]
