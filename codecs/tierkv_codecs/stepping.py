"""Numbers as multiples of steps: how large the steps of :mod:`tierkv_codecs.ecq` are, and of what.

All steps of a tensor are a base times powers of ``sqrt(2)``: exponents are small numbers, which
cost an entropy coder little. A step is larger where the largest code would not reach otherwise.

What is decided here is decided for rows and channels; passes over all numbers are in
:mod:`tierkv_codecs.step_loops` and :mod:`tierkv_codecs.step_floats`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tierkv.errors import CodecError
from tierkv_codecs import rope, step_loops
from tierkv_codecs.affine import Groups, dtype_name
from tierkv_codecs.step_floats import Floats
from tierkv_codecs.step_sizes import STILL, steps

if TYPE_CHECKING:
    import torch

__all__ = ["Keys", "Rows", "keys_of", "rows_of"]

_SPECTRA: Final = 4  # of heads and groups of tokens: more do not tell a frequency much better
_POWER: Final = 0.25  # of a channel's spread in its step
_MEAN: Final = 32_000  # largest mean, in steps: two bytes
_LEAST: Final = np.float32(2.0**-60)  # least mean square, where numbers are below 2
_SMALLEST: Final = -90  # power of two that the largest number counts as at least: steps are normal

_Floats = Any  # NDArray[np.float32]


class Keys(NamedTuple):
    """A coded ``k``; each channel of each group of tokens has a step and a mean.

    Attributes:
        base: The step of exponent 0.
        frequency: Of each pair of channels, int64 ``[pairs]``.
        exponent: int8 ``[heads, places, dim]``.
        step: float32, the same shape; 0 where a channel is constant.
        mean: In steps; float32, the same shape.
    """

    base: float
    frequency: Any
    exponent: Any
    step: _Floats
    mean: _Floats


class Rows(NamedTuple):
    """Another coded tensor; each row has a step.

    Attributes:
        base: The step of exponent 0.
        exponent: int8 ``[rows]``.
        step: float32, the same shape.
    """

    base: float
    exponent: Any
    step: _Floats


def _shift(name: str, largest: float, dtype: str) -> int:
    """Exponent of the power of two by which numbers are divided: they are below 2 then.

    Raises:
        CodecError: if the largest magnitude cannot be quantised.
    """
    # written so that NaN, which fails every comparison, is refused as well
    if not largest <= (65504.0 if dtype == "float16" else 2.0**120):
        raise CodecError(f"{name}: NaN, infinite or huge values cannot be quantised")
    return max(math.frexp(largest)[1] - 1, _SMALLEST) if largest else 0


def _spread(squares: _Floats) -> _Floats:
    """Logarithm of the root of mean squares, to base 2."""
    found = np.log2(np.maximum(squares, _LEAST))
    found *= np.float32(0.5)
    return found


def _grown(step: _Floats, reach: _Floats, most: float) -> _Floats:
    """By how many half octaves steps must grow for ``most`` of them to reach that far."""
    found = np.log2(np.maximum(reach / (step * np.float32(most)), np.float32(1)))
    found *= np.float32(2)
    return np.ceil(found, out=found)


def rows_of(name: str, source: torch.Tensor, share: float, top: int, room: torch.Tensor) -> Rows:
    """Code rows of the last axis.

    Args:
        name: Of the codec, for messages.
        source: Any shape but none, any strides.
        share: Step of a row, in units of its root mean square.
        top: Largest code.
        room: Gets the codes; int8 ``[rows, dim]``, contiguous.

    Raises:
        CodecError: if a value is NaN, infinite, or too large for the arithmetic.
    """
    rows = step_loops.numbers(source, "rows") or Floats(source)
    shift = _shift(name, rows.largest, dtype_name(source))
    factor = 2.0**-shift
    squares, reach = rows.weigh_rows(factor)
    spread = _spread(squares * np.float32(1 / source.shape[-1]))
    middle = np.float32(spread.mean(dtype=np.float64))
    base = float(np.float32(share * 2.0 ** float(middle)))
    spread -= middle
    exponent = np.rint(np.float32(2) * spread)
    exponent += _grown(steps(base, exponent), reach, top + 0.5 - 2.0**-10)
    step = steps(base, exponent)
    rows.encode_rows(factor, step, top, room)
    unit = 2.0**shift
    return Rows(base * unit, exponent.astype(np.int8), step * np.float32(unit))


def keys_of(name: str, source: torch.Tensor, share: float, top: int, room: torch.Tensor) -> Keys:
    """Turn pairs of channels back and code differences from the channels' means.

    Args:
        name: Of the codec, for messages.
        source: ``[heads, tokens, dim]``, none of them zero, any strides.
        share: Step of a channel of middle spread, in units of that spread.
        top: Largest code.
        room: Gets the codes; int8, of the shape of the source, contiguous.

    Raises:
        CodecError: if a value is NaN, infinite, or too large for the arithmetic.
    """
    groups = Groups.of(tuple(source.shape), "k")
    keys = step_loops.numbers(source, "keys") or Floats(source)
    shift = _shift(name, keys.largest, dtype_name(source))
    factor = 2.0**-shift
    still = keys.still(groups)
    channels = still.any((0, 1))  # a constant comes back exactly: no pair with one turns
    half = rope.pairs(source.shape[2])
    pieces, times = _looked_at(source, factor, groups)
    frequency = rope.frequencies(pieces, channels[:half] | channels[half : 2 * half], times)
    cosine, sine = rope.angles(frequency, groups.size)
    angles = cosine, -sine
    mean, squares, reach = keys.weigh_keys(factor, angles, groups)
    spread = _spread(squares)
    moving = ~still
    middle = np.float32(spread.sum(dtype=np.float64, where=moving) / max(int(moving.sum()), 1))
    base = float(np.float32(share * 2.0 ** float(middle)))
    exponent = np.rint(np.float32(2 * _POWER) * (spread - middle))
    step = steps(base, exponent)
    # both the number and the mean are rounded: half a step each
    exponent += np.maximum(_grown(step, reach, top - 0.5), _grown(step, np.abs(mean), _MEAN))
    exponent[still] = STILL
    step = steps(base, exponent)
    inverse = np.zeros_like(step)
    np.divide(np.float32(1), step, out=inverse, where=moving)
    mean = np.rint(mean * inverse)
    keys.encode_keys(factor, angles, groups, inverse, mean, top, room)
    unit = 2.0**shift
    step *= np.float32(unit)
    return Keys(base * unit, frequency, exponent.astype(np.int8), step, mean)


def _looked_at(
    source: torch.Tensor, factor: float, groups: Groups
) -> tuple[list[torch.Tensor], float]:
    """Groups of tokens that tell the frequencies, and how many times as many numbers there are."""
    pieces = groups.cut(source)
    few = pieces[:: -(-len(pieces) * source.shape[0] // _SPECTRA)]
    seen = sum(piece.shape[1] for piece in few)
    return [piece.float().contiguous() * factor for piece in few], source.shape[1] / seen
