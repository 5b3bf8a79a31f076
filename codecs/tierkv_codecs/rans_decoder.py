"""The decoding loops of :mod:`tierkv_codecs.rans` for processors with AVX-512 VBMI2, as LLVM IR.

What comes out of 64 slots at a time is stored as it is (``bytes``), becomes the upper bytes of
words whose lower bytes stand elsewhere (``words``), or is added to the means of its columns first
(``rows``): the target is written once, and no plane is read again.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from tierkv import jit
from tierkv_codecs.rans_ir import (
    DECLARED,
    EXPAND64,
    PERMUTE,
    able,
    every,
    lanes,
    lookup,
    table,
    weave,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SLACK", "loop"]

SLACK: Final = 128
"""Bytes that the loop may read behind the end of what it is given."""


def _refill(s: int) -> str:
    """Shift the next byte into every state that is under 256: bytes whose upper half is 0."""
    states = "".join(
        f"""
%{half}{s}.low = icmp ult <32 x i16> %{half}{s}.new, {every(256, 32)}
%{half}{s}.up = shl <32 x i16> %{half}{s}.new, {every(8, 32)}
%{half}{s}.kept = select <32 x i1> %{half}{s}.low, <32 x i16> %{half}{s}.up,
    <32 x i16> %{half}{s}.new
%{half}{s}.next = or <32 x i16> %{half}{s}.kept, %{half}{s}.fill"""
        for half in "ab"
    )
    return f"""
%a{s}.upper = lshr <32 x i16> %a{s}.new, {every(8, 32)}
{weave(f"%upper{s}", f"%a{s}.upper", f"%b{s}.new")}
%low{s} = icmp eq <64 x i8> %upper{s}, zeroinitializer
%low{s}.mask = bitcast <64 x i1> %low{s} to i64
%fill{s}.from = getelementptr i8, ptr %data, i64 %at{s}
%fill{s}.bytes = load <64 x i8>, ptr %fill{s}.from, align 1
%fill{s} = call <64 x i8> {EXPAND64}(<64 x i8> %fill{s}.bytes, <64 x i8> zeroinitializer,
    <64 x i1> %low{s})
%fill{s}.words = bitcast <64 x i8> %fill{s} to <32 x i16>
%a{s}.fill = and <32 x i16> %fill{s}.words, {every(255, 32)}
%b{s}.fill = lshr <32 x i16> %fill{s}.words, {every(8, 32)}
%used{s} = call i64 @llvm.ctpop.i64(i64 %low{s}.mask)
%at{s}.next = add i64 %at{s}, %used{s}{states}
"""


def _stored(s: int, streams: int, sink: str) -> str:
    """What becomes of the symbols."""
    if sink == "bytes":
        return f"""
%to{s} = getelementptr i8, ptr %out, i64 %place{s}
store <64 x i8> %y{s}.all, ptr %to{s}, align 1"""
    upper, means = f"%y{s}.all", ""
    if sink == "rows":
        upper = f"%y{s}.full"
        means = f"""
%mean{s}.at = add i64 %row{s}, %column{s}
%mean{s}.from = getelementptr i8, ptr %means, i64 %mean{s}.at
%mean{s} = load <64 x i8>, ptr %mean{s}.from, align 1
{upper} = add <64 x i8> %y{s}.all, %mean{s}
%column{s}.on = add i64 %column{s}, %ahead
%column{s}.back = sub i64 %column{s}.on, %columns
%column{s}.over = icmp sge i64 %column{s}.back, 0
%column{s}.next = select i1 %column{s}.over, i64 %column{s}.back, i64 %column{s}.on
%block{s}.on = add i64 %block{s}, {streams}
%block{s}.back = sub i64 %block{s}.on, %columns
%block{s}.over = icmp sge i64 %block{s}.back, 0
%block{s}.next = select i1 %block{s}.over, i64 %block{s}.back, i64 %block{s}.on
%row{s}.down = add i64 %row{s}, %stride
%row{s}.next = select i1 %block{s}.over, i64 %row{s}.down, i64 %row{s}"""
    words = "\n".join(
        f"""
%o{s}.{half}.bytes = call <64 x i8> {PERMUTE}(<64 x i8> %o{s}.low, <64 x i8> {_woven(half)},
    <64 x i8> {upper})
%o{s}.{half}.words = bitcast <64 x i8> %o{s}.{half}.bytes to <32 x i16>
%o{s}.{half} = call <32 x i16> @llvm.fshr.v32i16(<32 x i16> %o{s}.{half}.words,
    <32 x i16> %o{s}.{half}.words, <32 x i16> {every(1, 32)})
%o{s}.{half}.at = getelementptr i16, ptr %out, i64 %place{s}
%o{s}.{half}.to = getelementptr i16, ptr %o{s}.{half}.at, i64 {32 * half}
store <32 x i16> %o{s}.{half}, ptr %o{s}.{half}.to, align 1"""
        for half in (0, 1)
    )
    return f"""{means}
%o{s}.from = getelementptr i8, ptr %lower, i64 %place{s}
%o{s}.low = load <64 x i8>, ptr %o{s}.from, align 1
{words}"""


def _woven(half: int) -> str:
    """The permutation that puts 32 bytes of one register beside those of another."""
    pairs = (f"i8 {i}, i8 {64 + i}" for i in range(32 * half, 32 * half + 32))
    return "<" + ", ".join(pairs) + ">"


def _decode_step(s: int, streams: int, sink: str) -> str:
    """64 symbols of stream ``s``."""
    low, high = every(255, 32), every(8, 32)
    lit = "%lit0" if s else "%lit"
    return f"""
%b{s}.slot = shl <32 x i16> %b{s}, {high}
{weave(f"%i{s}", f"%a{s}", f"%b{s}.slot")}
%u{s} = icmp slt <64 x i8> %i{s}, zeroinitializer
{lookup(f"%f{s}", "f", f"%i{s}", f"%u{s}")}
{lookup(f"%r{s}", "r", f"%i{s}", f"%u{s}")}
{lookup(f"%y{s}", "y", f"%i{s}", f"%u{s}")}
%fw{s} = bitcast <64 x i8> %f{s} to <32 x i16>
%rw{s} = bitcast <64 x i8> %r{s} to <32 x i16>
%a{s}.f = and <32 x i16> %fw{s}, {low}
%b{s}.f = lshr <32 x i16> %fw{s}, {high}
%a{s}.r = and <32 x i16> %rw{s}, {low}
%b{s}.r = lshr <32 x i16> %rw{s}, {high}
%a{s}.x = lshr <32 x i16> %a{s}, {high}
%b{s}.x = lshr <32 x i16> %b{s}, {high}
%a{s}.m = mul <32 x i16> %a{s}.x, %a{s}.f
%b{s}.m = mul <32 x i16> %b{s}.x, %b{s}.f
%a{s}.new = add <32 x i16> %a{s}.m, %a{s}.r
%b{s}.new = add <32 x i16> %b{s}.m, %b{s}.r
{_refill(s)}
%e{s} = icmp eq <64 x i8> %y{s}, %escapes
%e{s}.mask = bitcast <64 x i1> %e{s} to i64
%e{s}.from = getelementptr i8, ptr %data, i64 {lit}
%e{s}.bytes = load volatile <64 x i8>, ptr %e{s}.from, align 1
%y{s}.all = call <64 x i8> {EXPAND64}(<64 x i8> %e{s}.bytes, <64 x i8> %y{s}, <64 x i1> %e{s})
%e{s}.used = call i64 @llvm.ctpop.i64(i64 %e{s}.mask)
%lit{s} = add i64 {lit}, %e{s}.used
{_stored(s, streams, sink)}
%place{s}.next = add i64 %place{s}, {64 * streams}
"""


_ROWS: Final = """
%columns = load i64, ptr %rows
%stride.p = getelementptr i64, ptr %rows, i64 1
%stride = load i64, ptr %stride.p
%ahead.p = getelementptr i64, ptr %rows, i64 2
%ahead = load i64, ptr %ahead.p"""


def _row_start(s: int) -> str:
    """Where the first block of stream ``s`` is: column, block of its 64 rows, their means."""
    return "".join(
        f"""
%{name}{s}.p = getelementptr i64, ptr %rows, i64 {3 + 3 * s + i}
%{name}{s}.0 = load i64, ptr %{name}{s}.p"""
        for i, name in enumerate(("column", "block", "row"))
    )


def _row_phis(s: int) -> str:
    return "".join(
        f"\n%{name}{s} = phi i64 [ %{name}{s}.0, %entry ], [ %{name}{s}.next, %step ]"
        for name in ("column", "block", "row")
    )


def _stream_start(s: int) -> str:
    """A stream's states and bounds."""
    return f"""
%begin{s}.p = getelementptr i64, ptr %marks, i64 {2 * s}
%begin{s} = load i64, ptr %begin{s}.p
%end{s}.p = getelementptr i64, ptr %marks, i64 {2 * s + 1}
%end{s} = load i64, ptr %end{s}.p
%both{s}.p = getelementptr i8, ptr %data, i64 %begin{s}
%both{s} = load <64 x i16>, ptr %both{s}.p, align 1
%a{s}.0 = shufflevector <64 x i16> %both{s}, <64 x i16> poison, <32 x i32> {lanes(0)}
%b{s}.0 = shufflevector <64 x i16> %both{s}, <64 x i16> poison, <32 x i32> {lanes(1)}
%at{s}.0 = add i64 %begin{s}, 128"""


def _stream_phis(s: int) -> str:
    return f"""
%a{s} = phi <32 x i16> [ %a{s}.0, %entry ], [ %a{s}.next, %step ]
%b{s} = phi <32 x i16> [ %b{s}.0, %entry ], [ %b{s}.next, %step ]
%at{s} = phi i64 [ %at{s}.0, %entry ], [ %at{s}.next, %step ]
%place{s} = phi i64 [ {64 * s}, %entry ], [ %place{s}.next, %step ]"""


def _stream_end(s: int) -> str:
    """Not 0 in ``bad`` unless every state is 256 and nothing is left."""
    return f"""
%a{s}.odd = xor <32 x i16> %a{s}, {every(256, 32)}
%b{s}.odd = xor <32 x i16> %b{s}, {every(256, 32)}
%odd{s} = or <32 x i16> %a{s}.odd, %b{s}.odd
%is{s} = icmp ne <32 x i16> %odd{s}, zeroinitializer
%bits{s} = bitcast <32 x i1> %is{s} to i32
%wide{s} = zext i32 %bits{s} to i64
%bad{s} = or i64 %wide{s}, %left{s}"""


def _decode_text(streams: int, sink: str) -> str:
    each = range(streams)
    entry, phis = "".join(map(_stream_start, each)), "".join(map(_stream_phis, each))
    if sink == "rows":
        entry += _ROWS + "".join(map(_row_start, each))
        phis += "".join(map(_row_phis, each))
    lefts = "\n".join(f"%left{s} = sub i64 %end{s}, %at{s}" for s in each)
    # a sum of differences is no test: each has to be 0 or more, that is, no sign bit in their or
    second = ("%left1", "%bad1") if streams == 2 else ("0", "0")
    signs = f"%some = or i64 %left.lit, %left0\n%any = or i64 %some, {second[0]}"
    steps = "".join(_decode_step(s, streams, sink) for s in each)
    done = "".join(map(_stream_end, each)) + f"\n%bad = or i64 %bad0, {second[1]}"
    return f"""{DECLARED}
define i32 @decode(ptr %data, ptr %marks, ptr %tables, i64 %escape, i64 %steps, ptr %out,
                   ptr %lower, ptr %means, ptr %rows) {{
entry:
{table("y", 0)}
{table("f", 256)}
{table("r", 512)}
%escape.byte = trunc i64 %escape to i8
%escape.one = insertelement <64 x i8> poison, i8 %escape.byte, i32 0
%escapes = shufflevector <64 x i8> %escape.one, <64 x i8> poison, <64 x i32> zeroinitializer
{entry}
%lit.p = getelementptr i64, ptr %marks, i64 {2 * streams}
%lit.0 = load i64, ptr %lit.p
%end.lit.p = getelementptr i64, ptr %marks, i64 {2 * streams + 1}
%end.lit = load i64, ptr %end.lit.p
br label %loop
loop:
%n = phi i64 [ 0, %entry ], [ %n.next, %step ]
%lit = phi i64 [ %lit.0, %entry ], [ %lit{streams - 1}, %step ]
{phis}
{lefts}
%left.lit = sub i64 %end.lit, %lit
{signs}
%over = icmp slt i64 %any, 0
br i1 %over, label %damaged, label %more
more:
%go = icmp ult i64 %n, %steps
br i1 %go, label %step, label %done
step:
{steps}
%n.next = add i64 %n, 1
br label %loop
done:
{done}
%worse = or i64 %bad, %left.lit
%well = icmp eq i64 %worse, 0
%result = zext i1 %well to i32
ret i32 %result
damaged:
ret i32 0
}}
"""


def loop(streams: int, sink: str) -> Callable[..., int] | None:
    """Compile the loop that decodes a piece of so many streams (1 or 2); None: not here.

    Its arguments are addresses but for the escape and the steps: data, marks (int64: begin and end
    of each stream and of the literals, as offsets into the data), tables (symbols, shares, ranks;
    256 bytes each), escape, steps, target (``64 * streams`` bytes or words a step). With the sinks
    ``words`` and ``rows``, the lower bytes of the words are next; with ``rows`` then the means
    (:func:`tierkv_codecs.centering.wrapped`) and, int64, columns, stride of the means, the columns
    that a step goes ahead, and for each stream the column, the block in its 64 rows and the place
    of their means that it begins with; columns are no fewer than streams. The result is 1, or 0 for
    damaged data. Whatever the data, it reads at most :data:`SLACK` bytes behind the ends.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kinds = (pointer, pointer, pointer, number, number, pointer, pointer, pointer, pointer)
    if not able():
        return None
    return jit.function(_decode_text(streams, sink), "decode", ctypes.c_int, kinds)
