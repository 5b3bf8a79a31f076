"""The loops of :mod:`tierkv_codecs.step_code`, tried on samples against torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv import jit
from tierkv_codecs import rope, step_calls, step_code, step_reading
from tierkv_codecs.affine import Groups
from tierkv_codecs.packing import packed_bytes
from tierkv_codecs.samples import mixed
from tierkv_codecs.step_floats import Floats

if TYPE_CHECKING:
    import torch

    from tierkv_codecs.step_code import Loops

__all__ = ["loops"]

_HEADS, _TOKENS = 2, 75  # more than a group
_FACTOR: Final = 0.25
_TOP: Final = 20
_BASE: Final = 0.0625


def _bytes(count: int, seed: int) -> Any:
    return (mixed(count, seed) >> np.uint32(24)).astype(np.uint8)


def _source(dim: int) -> torch.Tensor:
    """bfloat16 ``[heads, tokens, dim]``; some channels are constant."""
    import torch

    count = _HEADS * _TOKENS * dim
    numbers = torch.from_numpy(_bytes(count, 1).astype(np.float32) - 128)
    found = numbers.mul_(torch.from_numpy(_bytes(count, 7).astype(np.float32) + 1)).mul_(2.0**-11)
    found = found.view(_HEADS, _TOKENS, dim).bfloat16()
    found[0, :, ::5] = 1.5
    return found


def _same(one: Any, other: Any) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def _frequency(dim: int) -> Any:
    half = rope.pairs(dim)
    return _bytes(half, 3).astype(np.int64) * (rope.WHEEL // 256)


def _encodes_rows(loops: Loops, dim: int, _: bool) -> bool:
    import torch

    source = _source(dim)
    fast, plain = step_calls.numbers(loops, source), Floats(source)
    weighed = plain.weigh_rows(_FACTOR)
    if fast.largest != plain.largest or not _same(fast.weigh_rows(_FACTOR), weighed):
        return False
    step = np.sqrt(weighed[0] + np.float32(1)) * np.float32(0.03)
    rooms = [torch.empty((len(step), dim), dtype=torch.int8) for _ in range(2)]
    fast.encode_rows(_FACTOR, step, _TOP, rooms[0])
    plain.encode_rows(_FACTOR, step, _TOP, rooms[1])
    return torch.equal(*rooms)


def _encodes_keys(loops: Loops, dim: int, _: bool) -> bool:
    import torch

    source = _source(dim)
    groups = Groups.of(tuple(source.shape), "k")
    angles = rope.angles(_frequency(dim), groups.size)
    fast, plain = step_calls.numbers(loops, source), Floats(source)
    weighed = plain.weigh_keys(_FACTOR, angles, groups)
    inverse = np.float32(9) / (weighed[2] + np.float32(1))
    mean = np.rint(weighed[0] * inverse)
    if fast.largest != plain.largest or not _same(
        [fast.still(groups), *fast.weigh_keys(_FACTOR, angles, groups)],
        [Floats(source).still(groups), *weighed],
    ):
        return False
    rooms = [torch.empty(source.shape, dtype=torch.int8) for _ in range(2)]
    fast.encode_keys(_FACTOR, angles, groups, inverse, mean, _TOP, rooms[0])
    plain.encode_keys(_FACTOR, angles, groups, inverse, mean, _TOP, rooms[1])
    return torch.equal(*rooms)


def _decodes_rows(loops: Loops, dim: int, nibbles: bool) -> bool:
    fast, plain = _targets(dim)
    rows = _HEADS * _TOKENS
    exponents = (_bytes(rows, 2) % 41).astype(np.int8) - 20
    codes = _bytes(packed_bytes(rows, dim, 4) if nibbles else rows * dim, 4)
    data = memoryview(exponents.tobytes() + codes.tobytes())
    step_calls.decode_rows(loops, data, _BASE, fast)
    step_reading.scale_rows(data, _BASE, nibbles, plain)
    return _alike(fast, plain)


def _decodes_keys(loops: Loops, dim: int, nibbles: bool) -> bool:
    fast, plain = _targets(dim)
    groups, frequency = Groups.of(tuple(fast.shape), "k"), _frequency(dim)
    number, rows = groups.number, _HEADS * _TOKENS
    low, high = _bytes(number, 5), (_bytes(number, 6) % 5).astype(np.int8) - 2
    exponents = (_bytes(number, 2) % 41).astype(np.int8) - 20
    codes = _bytes(packed_bytes(rows, dim, 4) if nibbles else rows * dim, 4)
    parts = tuple(memoryview(x.view(np.uint8)) for x in (low, high, exponents, codes))
    step_calls.decode_keys(loops, parts, _BASE, frequency, groups, fast)
    step_reading.turn_keys(parts, _BASE, frequency, groups, nibbles, plain)
    return _alike(fast, plain)


def _targets(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    fast, plain = (torch.zeros(_HEADS, _TOKENS, dim, dtype=torch.bfloat16) for _ in range(2))
    return fast, plain


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _right(loops: Loops, way: str, dim: int, nibbles: bool) -> bool:
    """Whether the loops of a way do what torch does."""
    return {
        "encode rows": _encodes_rows,
        "encode keys": _encodes_keys,
        "decode rows": _decodes_rows,
        "decode keys": _decodes_keys,
    }[way](loops, dim, nibbles)


loops: Final = jit.Tried("steps", step_code.compiled, _right)
"""The loops of :func:`tierkv_codecs.step_code.compiled`; None: not here, or not yet."""
