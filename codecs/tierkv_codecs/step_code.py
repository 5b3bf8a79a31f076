"""The loops of :mod:`tierkv_codecs.ecq` over bfloat16 as functions: compiled for a length of row.

Their results are those of :mod:`tierkv_codecs.step_floats` and of decoding in torch, to the bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

from tierkv import jit
from tierkv_codecs.rope import pairs
from tierkv_codecs.step_decoding import decode_channels, decode_keys, decode_rows, find_angles
from tierkv_codecs.step_encoding import (
    encode_keys,
    encode_rows,
    find_largest,
    find_moving,
    weigh_keys,
    weigh_rows,
)
from tierkv_codecs.step_floats import TURNS
from tierkv_codecs.step_ir import LANES, Code

__all__ = ["WAYS", "Loop", "Loops", "compiled"]

Loop = Callable[..., None]
Loops = dict[str, Loop]
"""Loops by their names; what each takes is told where it is written."""

_GEOMETRY: Final = ("i heads", "i tokens", "i size", "i places")
_FUNCTIONS: Final[dict[str, tuple[Callable[..., None], tuple[str, ...]]]] = {
    "decode_rows": (decode_rows, ("p exponents", "p table", "p codes", "p out", "i rows")),
    "find_angles": (find_angles, ("p frequency", "p wheel", "i size", "p cosine", "p sine")),
    "decode_channels": (
        lambda w, dim: decode_channels(w),
        ("p low", "p high", "p exponents", "p table", "p mean", "p step", "i count"),
    ),
    "decode_keys": (
        decode_keys,
        ("p mean", "p step", "p cosine", "p sine", "p codes", "p out", *_GEOMETRY),
    ),
    "find_largest": (find_largest, ("p source", "p most", "i rows")),
    "find_moving": (find_moving, ("p source", "p moved", *_GEOMETRY)),
    "weigh_rows": (weigh_rows, ("p source", "f factor", "p squares", "p reach", "i rows")),
    "encode_rows": (
        encode_rows,
        ("p source", "f factor", "p step", "f top", "p codes", "i rows"),
    ),
    "weigh_keys": (
        weigh_keys,
        (
            *("p source", "f factor", "p cosine", "p sine", "p mean", "p squares", "p reach"),
            *(*_GEOMETRY, "p room"),
        ),
    ),
    "encode_keys": (
        encode_keys,
        (
            *("p source", "f factor", "p cosine", "p sine", "p inverse", "p mean", "f top"),
            *("p codes", *_GEOMETRY),
        ),
    ),
}
_KINDS: Final[dict[str, tuple[str, Any]]] = {
    "p": ("ptr noalias", ctypes.c_void_p),
    "i": ("i64", ctypes.c_int64),
    "f": ("float", ctypes.c_float),
}


def _text(name: str, dim: int, nibbles: bool) -> str:
    write, arguments = _FUNCTIONS[name]
    w = Code()
    options = (nibbles,) if name in ("decode_rows", "decode_keys") else ()
    write(w, dim, *options)
    lanes = sorted({LANES, dim % LANES or LANES, pairs(dim) % LANES or LANES})
    lanes = sorted({*lanes, (TURNS + 1) * dim % LANES or LANES})
    declared = [
        f"declare <{n} x float> @llvm.{call}.v{n}f32({', '.join([f'<{n} x float>'] * takes)})"
        for n in lanes
        for call, takes in (("maxnum", 2), ("minnum", 2), ("fabs", 1), ("rint", 1))
    ]
    given = ", ".join(f"{_KINDS[kind][0]} %{x}" for kind, x in (a.split() for a in arguments))
    return "\n".join(
        [
            *declared,
            "declare i64 @llvm.smin.i64(i64, i64)",
            "declare i16 @llvm.vector.reduce.umax.v16i16(<16 x i16>)",
            "declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)",
            f"define void @{name}({given}) {{",
            "entry:",
            *w.counters,
            *w.lines,
            "  ret void",
            "}",
        ]
    )


WAYS: Final = {
    "encode rows": ("find_largest", "weigh_rows", "encode_rows"),
    "encode keys": ("find_largest", "find_moving", "weigh_keys", "encode_keys"),
    "decode rows": ("decode_rows",),
    "decode keys": ("find_angles", "decode_channels", "decode_keys"),
}
"""What is needed together, to be tried together."""


@functools.cache
def _function(name: str, dim: int, nibbles: bool) -> Loop:
    kinds = tuple(_KINDS[argument[0]][1] for argument in _FUNCTIONS[name][1])
    return jit.function(_text(name, dim, nibbles), name, None, kinds)


def compiled(way: str, dim: int, nibbles: bool) -> Loops | None:
    """The loops of a way, for rows of so many numbers; None where there is no compiler.

    Args:
        way: One of :data:`WAYS`.
        dim: Numbers of a row.
        nibbles: Of decoding: codes are half bytes.
    """
    if jit.host() is None:
        return None
    return {name: _function(name, dim, nibbles) for name in WAYS[way]}
