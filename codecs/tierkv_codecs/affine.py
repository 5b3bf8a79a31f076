"""Groups of numbers that share a minimum and a step: what the low-bit codecs have in common.

Method: KIVI (Liu et al., arXiv 2402.02750): keys have outlier channels, values outlier tokens, so
that ``k`` is grouped along its tokens, channel by channel, and every other tensor along its last
axis. A group has at most 64 numbers. Its minimum stands in the tensor's own dtype, exactly: a
channel far from zero loses nothing, and a constant group comes back exactly. Its step is one byte,
an index into a geometric row of 255 steps from the smallest to the largest of the section (index
0: a constant group); 1 to 3 % of precision for 8 bits a group.

A row is described by its first step and its ratio (two float32) and rebuilt by multiplication in
float64, so that every machine gets the same numbers. Arithmetic on values is float32, one multiply
and one add, rounded once to the tensor's dtype.
"""

from __future__ import annotations

import difflib
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tierkv.errors import CodecError, ConfigError
from tierkv.views import over
from tierkv_codecs import compiled

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from tierkv.abc import TensorBytesCodec

__all__ = [
    "FLOATS",
    "GROUP",
    "ROW_BYTES",
    "Groups",
    "check_finite",
    "check_grouping",
    "check_row",
    "dtype_name",
    "due_bytes",
    "grouped_as",
    "nearest",
    "read_row",
    "row_ends",
    "row_of",
    "write_row",
]

FLOATS: Final = frozenset({"bfloat16", "float16", "float32"})
"""Dtypes that the lossy codecs take: float64 is not KV, and one byte has little to give."""
GROUP: Final = 64
"""Most numbers in a group."""
ROW_BYTES: Final = 8
_SPREAD: Final = 2.0**-20  # steps below this share of the largest are rounded up to it
_STEPS: Final = 255
_HUGE: Final = 2.0**127  # no step is as large


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a dtype, as layouts have it."""
    return str(tensor.dtype).removeprefix("torch.")


def due_bytes(
    codec: TensorBytesCodec, data: memoryview, shape: tuple[int, ...], dtype: str, tensor: str
) -> int:
    """Length of the encoding of such a tensor.

    Raises:
        CodecError: if that of ``data`` is another one.
    """
    due = codec.encoded_bytes(shape, dtype, tensor)
    if len(data) != due:
        raise CodecError(
            f"{codec.name}: {len(data)} bytes are not {dtype} {shape}, which takes {due}"
        )
    return due


def check_grouping(name: str, grouping: str) -> None:
    """Refuse groupings that there are not.

    Raises:
        ConfigError: if it is none of ``"channel"``, ``"token"`` and nothing.
    """
    if grouping not in _AS:
        known = " or ".join(f"'{name}/{word}'" for word in _AS if word)
        near = difflib.get_close_matches(grouping, _AS, 1)
        hint = f"; did you mean {near[0]!r}?" if near and near[0] else "."
        raise ConfigError(f"{name}: no grouping {grouping!r}{hint} Write {known}, or '{name}'")


def grouped_as(grouping: str, tensor: str) -> str:
    """The tensor whose own way of grouping is taken: ``k`` by channel, others by token."""
    return _AS[grouping] or tensor


_AS: Final = {"": "", "channel": "k", "token": "v"}


class Groups(NamedTuple):
    """How a tensor is cut.

    Attributes:
        axis: Axis along which a group lies.
        size: Numbers in a group; the last one may have fewer.
        places: Groups along the axis.
        shape: Shape of one number per group.
    """

    axis: int
    size: int
    places: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], tensor: str, most: int = GROUP) -> Groups:
        """Groups of at most ``most`` numbers, as equal as they can be."""
        axis = 1 if tensor == "k" and len(shape) == 3 else len(shape) - 1
        length = shape[axis]
        count = max(1, -(-length // most))
        size = max(1, -(-length // count))
        count = max(1, -(-length // size))
        return cls(axis, size, count, (*shape[:axis], count, *shape[axis + 1 :]))

    @property
    def number(self) -> int:
        """Groups of the tensor."""
        return prod(self.shape)

    def cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of the tensor, one for each place along the axis."""
        return [
            tensor.narrow(self.axis, at, min(self.size, tensor.shape[self.axis] - at))
            for at in range(0, tensor.shape[self.axis], self.size)
        ]

    def extremes(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Minimum and maximum of each group, in float32 (exact), of shape :attr:`shape`."""
        import torch

        found = compiled.extremes(source, self)
        if found is not None:
            return found
        pieces = self.cut(source)
        low = torch.cat([p.amin(self.axis, keepdim=True) for p in pieces], self.axis)
        high = torch.cat([p.amax(self.axis, keepdim=True) for p in pieces], self.axis)
        # a zero has either sign in torch, whichever came first
        return low.float().add_(0.0), high.float().add_(0.0)


def check_finite(name: str, low: torch.Tensor, high: torch.Tensor, dtype: str) -> None:
    """Refuse what cannot be quantised.

    Raises:
        CodecError: if a value is NaN, infinite, or so large that float32 arithmetic could
            overflow.
    """
    limit = 65504.0 if dtype == "float16" else 2.0**120
    # written so that NaN, which fails every comparison, is refused as well
    if not bool(((low >= -limit) & (high <= limit)).all()):
        raise CodecError(f"{name}: NaN, infinite or huge values cannot be quantised")


def _row(first: float, ratio: float) -> NDArray[np.float32]:
    """The steps 0, ``first``, ``first * ratio``, ... in float32, multiplied one by one."""
    factors = np.empty(_STEPS + 1)
    factors.fill(ratio)
    factors[0] = 0.0
    factors[1] = first
    used = factors[1:]
    np.multiply.accumulate(used, out=used)  # cumprod would take twice as long
    return factors.astype(np.float32)


def row_ends(least: float, largest: float) -> tuple[float, float]:
    """First step and ratio of a row: from the least step above 0 to the largest; both 0: none."""
    first = max(least, largest * _SPREAD, 2.0**-126) if largest > 0 else 1.0
    span = max(largest, first) / first
    return first, span ** (1 / (_STEPS - 1)) * (1 + 2.0**-22) if span > 1 else 1.0


def write_row(steps: torch.Tensor, out: memoryview, *, up: bool) -> torch.Tensor:
    """Round steps to a geometric row; writes the row's description and one byte for each.

    Args:
        steps: float32, at least 0.
        out: Room for :data:`ROW_BYTES` and one byte for each step.
        up: Round up, so that a group stays covered; otherwise to the nearest.

    Returns:
        The rounded steps, float32: what :func:`read_row` will give.
    """
    import torch

    flat = steps.reshape(-1)
    least, largest = compiled.bounds(flat) or _bounds(flat)
    head = np.frombuffer(out, np.float32, 2)
    head[:] = row_ends(least, largest)
    row = _row(*head.tolist())
    limits = row[1:]
    if not up:
        wide = row.astype(np.float64)  # squares of large steps overflow in float32
        limits = np.sqrt(wide[1:-1] * wide[2:]).astype(np.float32)
    index = over(out[ROW_BYTES:], "uint8", (flat.numel(),))
    if not compiled.places(flat, limits, index):
        index.copy_(_places(flat, torch.from_numpy(limits)))
    return torch.from_numpy(row).index_select(0, index.int()).view(steps.shape)


def _bounds(steps: torch.Tensor) -> tuple[float, float]:
    used = steps[steps > 0]
    return (float(used.min()), float(used.max())) if used.numel() else (0.0, 0.0)


def _places(steps: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """One more than how many of ``limits`` are below each number, 255 at most; 0 for 0."""
    import torch

    index = torch.searchsorted(limits, steps)
    return index.clamp_(max=_STEPS - 1).add_(1).masked_fill_(steps == 0, 0)


def row_of(name: str, data: memoryview) -> NDArray[np.float32]:
    """The float32 steps that a description (:func:`write_row`) stands for, by index; the first 0.

    Raises:
        CodecError: if the description is none.
    """
    return _row(*check_row(name, data))


def check_row(name: str, data: memoryview) -> tuple[float, float]:
    """First step and ratio of a description.

    Raises:
        CodecError: if it is none.
    """
    first, ratio = np.frombuffer(data, np.float32, 2).tolist()
    if not (0 < first < _HUGE and 1 <= ratio < 2 and first * ratio ** (_STEPS - 1) < _HUGE):
        raise CodecError(f"{name}: steps from {first} by {ratio} are no scale")
    return first, ratio


def read_row(name: str, data: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
    """The float32 steps that :func:`write_row` has returned.

    Raises:
        CodecError: if the description is none.
    """
    import torch

    index = over(data[ROW_BYTES:], "uint8", (prod(shape),))
    return torch.from_numpy(row_of(name, data)).index_select(0, index.int()).view(shape)


def nearest(numbers: torch.Tensor, top: int) -> torch.Tensor:
    """Round in place to the codes 0 to ``top``."""
    return numbers.round_().clamp_(0, top)
