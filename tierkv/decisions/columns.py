"""Growable columns of numbers that neither fragment the heap nor pause to grow."""

from __future__ import annotations

import mmap
from typing import Final, Literal

__all__ = ["STEP", "FloatColumn", "IntColumn"]

STEP: Final = 4096
"""Rows by which a column grows."""

IntCode = Literal["b", "B", "i", "I", "q", "Q"]
_SIZES: Final = {"b": 1, "B": 1, "i": 4, "I": 4, "q": 8, "Q": 8, "d": 8}


class _Column:
    """An anonymous mapping: it grows by ``mremap``, which moves page tables, not numbers.

    Two dozen arrays that grow side by side on the C heap leave a quarter of it in holes.
    """

    __slots__ = ("_blank", "_code", "_map", "_rows")

    def __init__(self, code: str, blank: int) -> None:
        self._code = code
        self._blank = bytes([blank]) * (_SIZES[code] * STEP) if blank else b""
        self._rows = 0
        self._map: mmap.mmap | None = None

    def _extend(self, rows: int) -> None:
        """Have at least ``rows`` rows; no view of the mapping may be alive."""
        size = _SIZES[self._code]
        wanted = -(-rows // STEP) * STEP
        if self._map is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, wanted * size, flags=flags)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                # two MiB a column would be more than a small index takes
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        elif wanted > self._rows:
            self._map.resize(wanted * size)
        if self._blank:
            for start in range(self._rows * size, wanted * size, len(self._blank)):
                self._map[start : start + len(self._blank)] = self._blank
        self._rows = wanted


class IntColumn(_Column):
    """A column of integers; read and write it through :attr:`view`."""

    __slots__ = ("view",)

    def __init__(self, code: IntCode, blank: int = 0) -> None:
        super().__init__(code, blank)
        self.view: memoryview[int] = memoryview(b"")

    def grow(self, rows: int) -> memoryview[int]:
        """Have at least ``rows`` rows; earlier views are dead from then on.

        Args:
            rows: Rows wanted; new ones hold the blank byte throughout.
        """
        self.view.release()
        self._extend(rows)
        assert self._map is not None
        self.view = memoryview(self._map).cast(self._code)  # type: ignore[call-overload]
        return self.view


class FloatColumn(_Column):
    """A column of floats; read and write it through :attr:`view`."""

    __slots__ = ("view",)

    def __init__(self) -> None:
        super().__init__("d", 0)
        self.view: memoryview[float] = memoryview(b"").cast("d")

    def grow(self, rows: int) -> memoryview[float]:
        """Have at least ``rows`` rows; earlier views are dead from then on."""
        self.view.release()
        self._extend(rows)
        assert self._map is not None
        self.view = memoryview(self._map).cast("d")
        return self.view
