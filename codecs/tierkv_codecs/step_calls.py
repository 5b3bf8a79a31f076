"""Passes over a tensor by loops of :mod:`tierkv_codecs.step_code`, which are given."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierkv_codecs import rope
from tierkv_codecs.step_floats import TURNS
from tierkv_codecs.step_sizes import all_steps

if TYPE_CHECKING:
    import torch

    from tierkv_codecs.affine import Groups
    from tierkv_codecs.step_code import Loops

__all__ = ["Numbers", "decode_keys", "decode_rows", "numbers"]

_Floats = Any  # NDArray[np.float32]
_Angles = tuple["torch.Tensor", "torch.Tensor"]


class Numbers(NamedTuple):
    """A tensor that the loops take, contiguous bfloat16; :class:`tierkv_codecs.step_floats.Floats`.

    Attributes:
        loops: The compiled loops.
        source: The tensor.
        largest: Largest magnitude of it; not finite if anything is not.
    """

    loops: Loops
    source: torch.Tensor
    largest: float

    @property
    def _dim(self) -> int:
        return self.source.shape[-1]

    @property
    def _rows(self) -> int:
        return prod(self.source.shape[:-1])

    def weigh_rows(self, factor: float) -> tuple[_Floats, _Floats]:
        """Sum of squares, and largest magnitude, of each row times ``factor``: ``[rows]``."""
        found = np.empty((2, self._rows), np.float32)
        at, skip = found.ctypes.data, 4 * self._rows
        call = self.loops["weigh_rows"]
        call(self.source.data_ptr(), factor, at, at + skip, self._rows)
        return found[0], found[1]

    def encode_rows(self, factor: float, step: _Floats, top: int, room: torch.Tensor) -> None:
        """Codes; ``room`` is int8 ``[rows, dim]``, contiguous."""
        call = self.loops["encode_rows"]
        at, to = self.source.data_ptr(), room.data_ptr()
        call(at, factor, step.ctypes.data, top, to, self._rows)

    def still(self, groups: Groups) -> Any:
        """Which channels of which groups of tokens are constant: bool, as ``groups.shape``."""
        moved = np.zeros(groups.shape, np.uint8)
        call = self.loops["find_moving"]
        call(self.source.data_ptr(), moved.ctypes.data, *_geometry(self.source, groups))
        return moved == 0

    def weigh_keys(
        self, factor: float, angles: _Angles, groups: Groups
    ) -> tuple[_Floats, _Floats, _Floats]:
        """Mean, mean square beside it, and largest distance from it, of each channel."""
        found = np.empty((3, *groups.shape), np.float32)
        room = np.empty((TURNS + 1 + groups.size) * self._dim, np.float32)
        at, skip = found.ctypes.data, 4 * groups.number
        self.loops["weigh_keys"](
            self.source.data_ptr(),
            factor,
            *(part.data_ptr() for part in angles),
            *(at, at + skip, at + 2 * skip),
            *_geometry(self.source, groups),
            room.ctypes.data,
        )
        return found[0], found[1], found[2]

    def encode_keys(
        self,
        factor: float,
        angles: _Angles,
        groups: Groups,
        inverse: _Floats,
        mean: _Floats,
        top: int,
        room: torch.Tensor,
    ) -> None:
        """Codes; ``room`` is int8, of the shape of the source, contiguous."""
        self.loops["encode_keys"](
            self.source.data_ptr(),
            factor,
            *(part.data_ptr() for part in angles),
            *(inverse.ctypes.data, mean.ctypes.data),
            top,
            room.data_ptr(),
            *_geometry(self.source, groups),
        )


def _geometry(tensor: torch.Tensor, groups: Groups) -> tuple[int, int, int, int]:
    return tensor.shape[0], tensor.shape[1], groups.size, groups.places


def numbers(loops: Loops, source: torch.Tensor) -> Numbers:
    """Look for the largest magnitude of contiguous bfloat16."""
    dim, most = source.shape[-1], np.zeros(1, np.uint32)
    loops["find_largest"](source.data_ptr(), most.ctypes.data, source.numel() // dim)
    return Numbers(loops, source, float(most.view(np.float32)[0]))


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def decode_rows(loops: Loops, data: memoryview, base: float, into: torch.Tensor) -> None:
    """What :func:`tierkv_codecs.step_loops.decode_rows` does."""
    rows, at, table = into.numel() // into.shape[-1], _address(data), all_steps(base)
    loops["decode_rows"](at, table.ctypes.data, at + rows, into.data_ptr(), rows)


def decode_keys(
    loops: Loops,
    parts: tuple[memoryview, ...],
    base: float,
    frequency: Any,
    groups: Groups,
    into: torch.Tensor,
) -> None:
    """What :func:`tierkv_codecs.step_loops.decode_keys` does."""
    half = len(frequency)
    low, high, exponents, codes = map(_address, parts)
    room = np.empty(2 * groups.number + 2 * groups.size * half, np.float32)
    table, wheel, mean = all_steps(base), rope.wheel(), room.ctypes.data
    step = mean + 4 * groups.number
    cosine = step + 4 * groups.number
    sine = cosine + 4 * groups.size * half
    if half:
        loops["find_angles"](frequency.ctypes.data, wheel.ctypes.data, groups.size, cosine, sine)
    loops["decode_channels"](low, high, exponents, table.ctypes.data, mean, step, groups.number)
    geometry = _geometry(into, groups)
    loops["decode_keys"](mean, step, cosine, sine, codes, into.data_ptr(), *geometry)
