"""Steps through machine code, where the extra ``fast`` is installed.

Contiguous bfloat16 goes through :mod:`tierkv_codecs.step_code`. Callers go on in torch where a
function here says that it has none, with the same result to the bit.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierkv_codecs import rope, step_code
from tierkv_codecs.step_floats import TURNS
from tierkv_codecs.step_sizes import all_steps

if TYPE_CHECKING:
    import torch

    from tierkv_codecs.affine import Groups

__all__ = ["Numbers", "decode_keys", "decode_rows", "numbers"]

_Floats = Any  # NDArray[np.float32]
_Angles = tuple["torch.Tensor", "torch.Tensor"]


class Numbers(NamedTuple):
    """A tensor that the loops take, contiguous bfloat16; :class:`tierkv_codecs.step_floats.Floats`.

    Attributes:
        source: The tensor.
        largest: Largest magnitude of it; not finite if anything is not.
    """

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
        call = step_code.function("weigh_rows", self._dim)
        call(self.source.data_ptr(), factor, at, at + skip, self._rows)
        return found[0], found[1]

    def encode_rows(self, factor: float, step: _Floats, top: int, room: torch.Tensor) -> None:
        """Codes; ``room`` is int8 ``[rows, dim]``, contiguous."""
        call = step_code.function("encode_rows", self._dim)
        at, to = self.source.data_ptr(), room.data_ptr()
        call(at, factor, step.ctypes.data, top, to, self._rows)

    def still(self, groups: Groups) -> Any:
        """Which channels of which groups of tokens are constant: bool, as ``groups.shape``."""
        moved = np.zeros(groups.shape, np.uint8)
        call = step_code.function("find_moving", self._dim)
        call(self.source.data_ptr(), moved.ctypes.data, *_geometry(self.source, groups))
        return moved == 0

    def weigh_keys(
        self, factor: float, angles: _Angles, groups: Groups
    ) -> tuple[_Floats, _Floats, _Floats]:
        """Mean, mean square beside it, and largest distance from it, of each channel."""
        found = np.empty((3, *groups.shape), np.float32)
        room = np.empty((TURNS + 1 + groups.size) * self._dim, np.float32)
        at, skip = found.ctypes.data, 4 * groups.number
        step_code.function("weigh_keys", self._dim)(
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
        step_code.function("encode_keys", self._dim)(
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


def _ready(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.dtype is torch.bfloat16 and tensor.is_contiguous() and step_code.able()


def numbers(source: torch.Tensor) -> Numbers | None:
    """Look for the largest magnitude, in one pass; None if there are no loops for this tensor."""
    if not _ready(source):
        return None
    dim, most = source.shape[-1], np.zeros(1, np.uint32)
    call = step_code.function("find_largest", dim)
    call(source.data_ptr(), most.ctypes.data, source.numel() // dim)
    return Numbers(source, float(most.view(np.float32)[0]))


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def decode_rows(data: memoryview, base: float, nibbles: bool, into: torch.Tensor) -> bool:
    """Decode in one pass; False if there is none for this tensor.

    Args:
        data: The exponents of the rows, and the codes.
        base: The step of exponent 0.
        nibbles: Whether codes are half bytes.
        into: The target.
    """
    if not _ready(into):
        return False
    dim = into.shape[-1]
    rows, at, table = into.numel() // dim, _address(data), all_steps(base)
    call = step_code.function("decode_rows", dim, nibbles)
    call(at, table.ctypes.data, at + rows, into.data_ptr(), rows)
    return True


def decode_keys(
    parts: tuple[memoryview, ...],
    base: float,
    frequency: Any,
    groups: Groups,
    nibbles: bool,
    into: torch.Tensor,
) -> bool:
    """Decode all but constant channels in one pass; False if there is none for this tensor.

    Args:
        parts: Low bytes of the means, high ones, exponents, codes.
        base: The step of exponent 0.
        frequency: Of each pair, int64.
        groups: How the target is cut.
        nibbles: Whether codes are half bytes.
        into: The target.
    """
    if not _ready(into):
        return False
    dim, half = into.shape[2], len(frequency)
    low, high, exponents, codes = map(_address, parts)
    room = np.empty(2 * groups.number + 2 * groups.size * half, np.float32)
    table, wheel, mean = all_steps(base), rope.wheel(), room.ctypes.data
    step = mean + 4 * groups.number
    cosine = step + 4 * groups.number
    sine = cosine + 4 * groups.size * half
    if half:
        call = step_code.function("find_angles", dim)
        call(frequency.ctypes.data, wheel.ctypes.data, groups.size, cosine, sine)
    call = step_code.function("decode_channels", dim)
    call(low, high, exponents, table.ctypes.data, mean, step, groups.number)
    call = step_code.function("decode_keys", dim, nibbles)
    call(mean, step, cosine, sine, codes, into.data_ptr(), *_geometry(into, groups))
    return True
