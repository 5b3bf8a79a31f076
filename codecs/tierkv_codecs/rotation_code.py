"""Rows of the rotated codecs to bfloat16, in registers: LLVM IR for one length of row.

A row is looked up, rotated back and rounded without a word of it in memory: pieces of up to 512
numbers fit into the registers of AVX-512. Number ``d`` of a piece lies in lane ``d % 16`` of
register ``d // 16``. A step of the transform between lanes adds to a register, its sign turned in
every second lane, itself with the lanes swapped; steps between registers are sums and differences.
What is added to what is as in :mod:`tierkv_codecs.hadamard`, and a fused product with +1 or -1
rounds once, as a sum does: the results are the same to the bit.

The levels times the scale of a row are one register of 16 numbers: sixteen codes at a time are
looked up in it by one permutation, which sees no more than the lowest four bits of each. That, and
rounding in one instruction, are taken where the processor has them; LLVM finds a way elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import TYPE_CHECKING, Any, Final

from tierkv import jit
from tierkv_codecs.hadamard import pieces, sign_bits
from tierkv_codecs.levels import levels
from tierkv_codecs.packing import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["LONGEST", "ROUNDS", "Features", "decoder", "features", "module"]

LONGEST: Final = 1024
"""Longest row that there is code for: code grows with the row."""
ROUNDS: Final = "avx512bf16"
"""Feature of processors that round to bfloat16 in one instruction, but denormal numbers to 0."""
_PERMUTES: Final = "avx512f"
_FUSES: Final = "fma"
_LANES: Final = 16

Features = frozenset[str]
"""What a processor can do, by LLVM's names."""


@functools.cache
def features() -> Features | None:
    """Features of this processor that make a difference here; None where there is no compiler."""
    host = jit.host()
    return None if host is None else host.features & {ROUNDS, _PERMUTES, _FUSES}


class _Writer:
    """Lines of a function, and names for their values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def let(self, text: str) -> str:
        """Add an instruction; the name of its value."""
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Add an instruction that has no value."""
        self.lines.append(f"  {text}")


def _number(value: float) -> str:
    """A float32 number, exactly: LLVM writes it as the bits of a double."""
    return f"0x{struct.pack('>d', value).hex()}"


def _floats(values: Iterable[float]) -> str:
    return "<" + ", ".join(f"float {_number(v)}" for v in values) + ">"


def _ints(kind: str, values: Iterable[int]) -> str:
    return "<" + ", ".join(f"{kind} {v}" for v in values) + ">"


def _shuffled(w: _Writer, kind: str, one: str, other: str, lanes: list[int]) -> str:
    mask = _ints("i32", lanes)
    return w.let(f"shufflevector {kind} {one}, {kind} {other}, <{len(lanes)} x i32> {mask}")


def _codes(w: _Writer, bits: int, first: int, lanes: int) -> str:
    """Codes of some numbers of the row, with whatever stands above them: ``<16 x i32>``."""
    found = ""
    low = 0
    for field, width in enumerate(FIELDS[bits]):
        at = w.let(f"getelementptr i8, ptr %line{field}, i64 {first}")
        kind = f"<{lanes} x i32>"
        code = w.let(f"load <{lanes} x i8>, ptr {at}, align 1")
        code = w.let(f"zext <{lanes} x i8> {code} to {kind}")
        if lanes < _LANES:
            spread = [*range(lanes), *[0] * (_LANES - lanes)]
            code = _shuffled(w, kind, code, "poison", spread)
        code = w.let(f"lshr <16 x i32> {code}, %shift{field}")
        if len(FIELDS[bits]) > 1:
            mask = _ints("i32", [(1 << width) - 1] * _LANES)
            code = w.let(f"and <16 x i32> {code}, {mask}")
        if low:
            code = w.let(f"shl <16 x i32> {code}, {_ints('i32', [low] * _LANES)}")
            code = w.let(f"or <16 x i32> {found}, {code}")
        found = code
        low += width
    return found


def _looked_up(w: _Writer, table: str, code: str, lanes: int, able: Features) -> str:
    if _PERMUTES in able:
        name = "@llvm.x86.avx512.permvar.sf.512"
        got = w.let(f"call <16 x float> {name}(<16 x float> {table}, <16 x i32> {code})")
    else:
        w.do(f"store <16 x float> {table}, ptr %room, align 64")
        index = w.let(f"and <16 x i32> {code}, {_ints('i32', [15] * _LANES)}")
        at = w.let(f"getelementptr float, ptr %room, <16 x i32> {index}")
        got = w.let(
            f"call <16 x float> @llvm.masked.gather.v16f32.v16p0(<16 x ptr> {at}, i32 4, "
            f"<16 x i1> {_ints('i1', [1] * _LANES)}, <16 x float> poison)"
        )
    if lanes == _LANES:
        return got
    return _shuffled(w, "<16 x float>", got, "poison", list(range(lanes)))


def _transformed(w: _Writer, numbers: list[str], lanes: int, able: Features) -> list[str]:
    """Walsh-Hadamard transform of a piece, neighbours first."""
    kind = f"<{lanes} x float>"
    half = 1
    while half < lanes:
        sign = _floats(-1.0 if lane & half else 1.0 for lane in range(lanes))
        swap = [lane ^ half for lane in range(lanes)]
        for i, x in enumerate(numbers):
            other = _shuffled(w, kind, x, "poison", swap)
            if _FUSES in able:
                call = f"call {kind} @llvm.fma.v{lanes}f32"
                numbers[i] = w.let(f"{call}({kind} {x}, {kind} {sign}, {kind} {other})")
            else:
                turned = w.let(f"fmul {kind} {x}, {sign}")
                numbers[i] = w.let(f"fadd {kind} {turned}, {other}")
        half *= 2
    apart = 1
    while apart < len(numbers):
        for i in range(len(numbers)):
            if not i & apart:
                a, b = numbers[i], numbers[i + apart]
                numbers[i] = w.let(f"fadd {kind} {a}, {b}")
                numbers[i + apart] = w.let(f"fsub {kind} {a}, {b}")
        apart *= 2
    return numbers


def _stored(w: _Writer, at: int, words: str, lanes: int, signs: Iterable[int]) -> None:
    kind = f"<{lanes} x i16>"
    turned = w.let(f"xor {kind} {words}, {_ints('i16', [-0x8000 * s for s in signs])}")
    place = w.let(f"getelementptr i16, ptr %target, i64 {at}")
    w.do(f"store {kind} {turned}, ptr {place}, align 2")


def _rounded(w: _Writer, x: str, lanes: int) -> str:
    kind = f"<{lanes} x i32>"

    def all_(value: int) -> str:
        return _ints("i32", [value] * lanes)

    bits = w.let(f"bitcast <{lanes} x float> {x} to {kind}")
    last = w.let(f"lshr {kind} {bits}, {all_(16)}")
    last = w.let(f"and {kind} {last}, {all_(1)}")
    bits = w.let(f"add {kind} {bits}, {all_(0x7FFF)}")
    bits = w.let(f"add {kind} {bits}, {last}")
    bits = w.let(f"lshr {kind} {bits}, {all_(16)}")
    return w.let(f"trunc {kind} {bits} to <{lanes} x i16>")


def _piece(w: _Writer, bits: int, start: int, size: int, able: Features) -> None:
    """Decode a piece of the row."""
    lanes = min(_LANES, size)
    root = struct.unpack("f", struct.pack("f", size**-0.5))[0]
    factor = w.let(f"fmul float %step, {_number(root)}")
    factor = w.let(f"insertelement <16 x float> poison, float {factor}, i32 0")
    factor = _shuffled(w, "<16 x float>", factor, "poison", [0] * _LANES)
    known = levels(bits)
    table = w.let(f"fmul <16 x float> {_floats(known * (_LANES // len(known)))}, {factor}")
    places = range(start, start + size, lanes)
    signs = sign_bits(start + size)
    numbers = [_looked_up(w, table, _codes(w, bits, at, lanes), lanes, able) for at in places]
    numbers = _transformed(w, numbers, lanes, able)
    if ROUNDS in able and len(numbers) > 1:
        name = "@llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        for at, low, high in zip(places[::2], numbers[::2], numbers[1::2], strict=True):
            both = w.let(f"call <32 x bfloat> {name}(<16 x float> {high}, <16 x float> {low})")
            both = w.let(f"bitcast <32 x bfloat> {both} to <32 x i16>")
            _stored(w, at, both, 32, signs[at : at + 32])
        return
    for at, x in zip(places, numbers, strict=True):
        _stored(w, at, _rounded(w, x, lanes), lanes, signs[at : at + lanes])


_HEAD = """
declare <16 x float> @llvm.x86.avx512.permvar.sf.512(<16 x float>, <16 x i32>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
declare <16 x float> @llvm.masked.gather.v16f32.v16p0(<16 x ptr>, i32, <16 x i1>, <16 x float>)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare <4 x float> @llvm.fma.v4f32(<4 x float>, <4 x float>, <4 x float>)
declare <2 x float> @llvm.fma.v2f32(<2 x float>, <2 x float>, <2 x float>)

define void @rows(ptr noalias %data, ptr noalias %steps, ptr noalias %out, i64 %rows) {
entry:
  %room = alloca <16 x float>, align 64
"""


def _begin(w: _Writer, widths: tuple[int, ...], dim: int) -> None:
    """Areas of the fields, and the head of the loop: where a row's codes, scale and target are."""
    area = w.let("getelementptr i8, ptr %data, i64 %rows")  # an index of its scale a row is first
    for field, width in enumerate(widths):
        per = 8 // width
        more = w.let(f"add i64 %rows, {per - 1}")
        w.do(f"%lines{field} = udiv i64 {more}, {per}")
        w.do(f"%area{field} = getelementptr i8, ptr {area}, i64 0")
        size = w.let(f"mul i64 %lines{field}, {dim}")
        area = w.let(f"getelementptr i8, ptr {area}, i64 {size}")
    w.do("%none = icmp eq i64 %rows, 0")
    w.do("br i1 %none, label %done, label %loop")
    w.lines.append("loop:")
    w.do("%row = phi i64 [0, %entry], [%row.next, %loop]")
    for field in range(len(widths)):
        w.do(f"%at{field} = phi i64 [0, %entry], [%at{field}.next, %loop]")
        start = "[zeroinitializer, %entry]"
        w.do(f"%shift{field} = phi <16 x i32> {start}, [%shift{field}.next, %loop]")
    for field in range(len(widths)):
        first = w.let(f"mul i64 %at{field}, {dim}")
        w.do(f"%line{field} = getelementptr i8, ptr %area{field}, i64 {first}")
    index = w.let("getelementptr i8, ptr %data, i64 %row")
    index = w.let(f"load i8, ptr {index}")
    index = w.let(f"zext i8 {index} to i64")
    scale = w.let(f"getelementptr float, ptr %steps, i64 {index}")
    w.do(f"%step = load float, ptr {scale}, align 4")
    first = w.let(f"mul i64 %row, {dim}")
    w.do(f"%target = getelementptr i16, ptr %out, i64 {first}")


def _end(w: _Writer, widths: tuple[int, ...]) -> None:
    """On to the next row: in the next line of bytes, or further up in those of the first."""
    for field, width in enumerate(widths):
        after = w.let(f"add i64 %at{field}, 1")
        last = w.let(f"icmp eq i64 {after}, %lines{field}")
        w.do(f"%at{field}.next = select i1 {last}, i64 0, i64 {after}")
        up = w.let(f"add <16 x i32> %shift{field}, {_ints('i32', [width] * _LANES)}")
        w.do(f"%shift{field}.next = select i1 {last}, <16 x i32> {up}, <16 x i32> %shift{field}")
    w.do("%row.next = add i64 %row, 1")
    w.do("%end = icmp eq i64 %row.next, %rows")
    w.do("br i1 %end, label %done, label %loop")


def module(bits: int, dim: int, able: Features) -> str:
    """A module whose function ``rows`` decodes rows.

    Its arguments: addresses of the data (a byte for the scale of each row, then the packed codes),
    of the 256 scales and of the target; the number of rows.

    Args:
        bits: Bits of a code.
        dim: Numbers of a row.
        able: What the processor can do.
    """
    w = _Writer()
    _begin(w, FIELDS[bits], dim)
    for start, size in pieces(dim):
        _piece(w, bits, start, size, able)
    _end(w, FIELDS[bits])
    return "\n".join([_HEAD, *w.lines, "done:", "  ret void", "}"])


@functools.cache
def decoder(bits: int, dim: int, able: Features) -> Callable[..., Any]:
    """The compiled function of :func:`module`."""
    pointers = (ctypes.c_void_p,) * 3
    return jit.function(module(bits, dim, able), "rows", None, (*pointers, ctypes.c_int64))
