"""How wide the words of bytes are, which nobody says to a codec of bytes.

The width (1, 2, 4 or 8 bytes) is the one for which the order-0 entropy of a sample is least. A
wrong width costs ratio and nothing else. Where whole words come again (values of a first layer
depend on the token alone), frequencies are not all there is to gain: planes of 8-byte words are
short enough for zstd to see one row beside its equal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv_codecs.kernels import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["REPEATED", "SAMPLE", "WIDTHS", "choose", "entropy", "rotated"]

WIDTHS: Final = (1, 2, 4, 8)
"""Bytes of a word; format."""
REPEATED: Final = 2
"""Up to this width, data in which words repeat is taken for words of 8 bytes."""
SAMPLE: Final = 4096
"""Bytes that :func:`entropy` takes at most."""
_SAMPLE: Final = SAMPLE // 8  # groups of 8 bytes looked at to find the width
_WORTH: Final = 0.1  # bits a byte by which a wider word must win
_ALIKE: Final = (0.5, 1.0)  # bits a byte by which lower and upper planes of words may differ
_NOISE: Final = 7.85  # bits a byte from which on a plane is left alone
_UNIT: Final = 1 << 20  # of terms, which are integers
_LOOKED_AT: Final = 8192  # words in which repeats are looked for
_UNIQUE: Final = 0.9
_MIXER: Final = np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing (Knuth, volume 3, 6.4)

_Bytes = Any  # NDArray[np.uint8]; numpy's stubs make arithmetic on it unreadable


def _entropy_terms() -> NDArray[np.int64]:
    """``n log2 n``, in integers: their sums are the same in any order."""
    counts = np.arange(SAMPLE + 1, dtype=np.float64)
    counts[0] = 1.0
    return np.rint(counts * np.log2(counts) * _UNIT).astype(np.int64)


_TERMS = _entropy_terms()


def _plane_numbers() -> NDArray[np.intp]:
    """For each byte of the sample, once for each width: 256 times the number of its plane."""
    numbers, first = [], 0
    for width in WIDTHS:
        numbers.append(np.tile(first + np.arange(width), SAMPLE // width))
        first += width
    return 256 * np.concatenate(numbers).astype(np.intp)


_PLANES = sum(WIDTHS)
_NUMBERS = _plane_numbers()


def rotated(data: _Bytes, width: int) -> _Bytes:
    """Words rotated left by one bit, as bytes; bytes stay as they are."""
    if width == 1:
        return data
    words = data.view(f"<u{width}")
    return ((words << 1) | (words >> (8 * width - 1))).view(np.uint8)


def choose(data: _Bytes) -> tuple[int, list[bool]]:
    """Width of a word, and which planes are worth coding.

    Args:
        data: uint8, contiguous, at least one.
    """
    groups = data.size // 8
    if groups < _SAMPLE:  # too little to tell: the commonest width, and the coders decide
        return (2, [True, True]) if data.size > 1 else (1, [True])
    words = data[: groups * 8].view("<u8")
    # an odd step: an even one would meet the same columns in every row
    bits = _plane_bits(words, (groups // _SAMPLE - 1) | 1)
    best, least, coded, first = 1, float("inf"), [True], 0
    two = bits[1:3]
    for width in WIDTHS:
        mine = bits[first : first + width]
        first += width
        if width > 2 and _side_by_side(mine, two):
            continue
        if (mean := sum(mine) / width) < least - _WORTH:
            best, least, coded = width, mean, [b < _NOISE for b in mine]
    if best <= REPEATED and _repeats(words[:_LOOKED_AT]):
        return 8, [True] * 8
    return best, coded


def _plane_bits(words: Any, step: int) -> list[float]:
    """Order-0 entropy of each plane of each width in bits a byte, of every ``step``-th word.

    Corrected for the size of the sample (Miller and Madow).
    """
    sample = words[: step * _SAMPLE]
    sums, kinds = np.empty(_PLANES, np.int64), np.empty(_PLANES, np.int64)
    loop = kernel("count_planes")
    if loop is not None:
        loop(sample, step, _TERMS, sums, kinds)
    else:
        bytes_ = np.ascontiguousarray(sample[::step]).view(np.uint8)
        keys = np.concatenate([rotated(bytes_, width) for width in WIDTHS]) + _NUMBERS
        counts = np.bincount(keys, minlength=256 * _PLANES).reshape(_PLANES, 256)
        sums[:], kinds[:] = _TERMS[counts].sum(1), np.count_nonzero(counts, axis=1)
    totals = [SAMPLE // width for width in WIDTHS for _ in range(width)]
    return [
        math.log2(total) - terms / _UNIT / total + (used - 1) / (2 * math.log(2) * total)
        for total, terms, used in zip(totals, sums.tolist(), kinds.tolist(), strict=True)
    ]


def _side_by_side(wide: list[float], two: list[float]) -> bool:
    """Whether planes are those of several words of 2 bytes, of channels that differ in size.

    Centring does more for such, in planes that are not cut into pieces.
    """
    apart = [abs(bits - two[i % 2]) - _ALIKE[i % 2] for i, bits in enumerate(wide)]
    return max(apart) < 0


def _repeats(words: Any) -> bool:
    """Whether whole words come again: rows that depend on nothing but a token, for instance.

    One word in 64 is looked at, chosen by its value, so that equal words are chosen together.
    """
    chosen = words[(words * _MIXER) >> np.uint64(58) == 0]
    return bool(chosen.size >= 16 and np.unique(chosen).size < _UNIQUE * chosen.size)


def entropy(sample: _Bytes) -> float:
    """Order-0 entropy of at most :data:`SAMPLE` bytes, in bits a byte."""
    loop = kernel("sum_of_terms")
    if loop is not None:
        terms = int(loop(sample, _TERMS))
    else:
        terms = int(_TERMS[np.bincount(sample, minlength=256)].sum())
    return float(math.log2(sample.size) - terms / _UNIT / sample.size)
