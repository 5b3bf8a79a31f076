"""The encoding loop of :mod:`tierkv_codecs.rans` for processors with AVX-512 VBMI2, as LLVM IR."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np

from tierkv import jit
from tierkv_codecs.rans_format import LANES, STATES, encode_steps
from tierkv_codecs.rans_ir import COMPRESS64, DECLARED, STORE64, able, every, lookup, table, weave
from tierkv_codecs.rans_tables import counted, lookups, shared_out
from tierkv_codecs.samples import rare_ones

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["encoder"]


def _emit(s: int) -> str:
    """Emit the low byte of every state that would grow too large."""
    return f"""
%a{s}.top = lshr <32 x i16> %a{s}, {every(8, 32)}
%b{s}.top = lshr <32 x i16> %b{s}, {every(8, 32)}
{weave(f"%upper{s}", f"%a{s}.top", f"%b{s}")}
%full{s} = icmp uge <64 x i8> %upper{s}, %f{s}
%full{s}.mask = bitcast <64 x i1> %full{s} to i64
%b{s}.lower = shl <32 x i16> %b{s}, {every(8, 32)}
{weave(f"%lower{s}", f"%a{s}", f"%b{s}.lower")}
%dense{s} = call <64 x i8> {COMPRESS64}(<64 x i8> %lower{s}, <64 x i8> zeroinitializer,
    <64 x i1> %full{s})
%used{s} = call i64 @llvm.ctpop.i64(i64 %full{s}.mask)
%at{s}.next = sub i64 %at{s}, %used{s}
%to{s} = getelementptr i8, ptr %out, i64 %at{s}.next
%used{s}.none = icmp eq i64 %used{s}, 0
%used{s}.unused = sub i64 64, %used{s}
%used{s}.some = lshr i64 -1, %used{s}.unused
%used{s}.ones = select i1 %used{s}.none, i64 0, i64 %used{s}.some
%used{s}.where = bitcast i64 %used{s}.ones to <64 x i1>
call void {STORE64}(<64 x i8> %dense{s}, ptr %to{s}, i32 1, <64 x i1> %used{s}.where)
"""


def _push(s: int, half: str) -> str:
    """Divide the states of ``half`` by the shares of their symbols."""
    x = f"%{half}{s}"
    return f"""
{x}.full = icmp uge <32 x i16> {x}.top, {x}.f
{x}.small = select <32 x i1> {x}.full, <32 x i16> {x}.top, <32 x i16> {x}
{x}.wide = zext <32 x i16> {x}.small to <32 x i32>
{x}.inv = zext <32 x i16> {x}.i to <32 x i32>
{x}.product = mul <32 x i32> {x}.wide, {x}.inv
{x}.high = lshr <32 x i32> {x}.product, {"<" + ", ".join(["i32 16"] * 32) + ">"}
{x}.q = trunc <32 x i32> {x}.high to <32 x i16>
{x}.qf = mul <32 x i16> {x}.q, {x}.f
{x}.rest = sub <32 x i16> {x}.small, {x}.qf
{x}.short = icmp uge <32 x i16> {x}.rest, {x}.f
{x}.q1 = add <32 x i16> {x}.q, {every(1, 32)}
{x}.rest1 = sub <32 x i16> {x}.rest, {x}.f
{x}.quotient = select <32 x i1> {x}.short, <32 x i16> {x}.q1, <32 x i16> {x}.q
{x}.r = select <32 x i1> {x}.short, <32 x i16> {x}.rest1, <32 x i16> {x}.rest
{x}.base = shl <32 x i16> {x}.quotient, {every(8, 32)}
"""


def _halves(name: str, s: int) -> str:
    """Bytes of even and odd lanes as words."""
    return f"""
%{name}w{s} = bitcast <64 x i8> %{name}{s} to <32 x i16>
%a{s}.{name} = and <32 x i16> %{name}w{s}, {every(255, 32)}
%b{s}.{name} = lshr <32 x i16> %{name}w{s}, {every(8, 32)}
"""


def _encode_step(s: int, streams: int, lit: str) -> str:
    return f"""
%n{s} = mul i64 %n, {64 * streams}
%n{s}.at = add i64 %n{s}, {64 * s}
%from{s} = getelementptr i8, ptr %data, i64 %n{s}.at
%y{s} = load <64 x i8>, ptr %from{s}, align 1
%u{s} = icmp slt <64 x i8> %y{s}, zeroinitializer
{lookup(f"%f{s}", "f", f"%y{s}", f"%u{s}")}
{lookup(f"%c{s}", "c", f"%y{s}", f"%u{s}")}
{lookup(f"%il{s}", "il", f"%y{s}", f"%u{s}")}
{lookup(f"%ih{s}", "ih", f"%y{s}", f"%u{s}")}
{lookup(f"%k{s}", "k", f"%y{s}", f"%u{s}")}
{_halves("f", s)}
{_halves("c", s)}
{_halves("il", s)}
%ihw{s} = bitcast <64 x i8> %ih{s} to <32 x i16>
%a{s}.ih = shl <32 x i16> %ihw{s}, {every(8, 32)}
%b{s}.ih = and <32 x i16> %ihw{s}, {every(-256, 32)}
%a{s}.i = or <32 x i16> %a{s}.il, %a{s}.ih
%b{s}.i = or <32 x i16> %b{s}.il, %b{s}.ih
{_emit(s)}
{_push(s, "a")}
{_push(s, "b")}
%a{s}.t = add <32 x i16> %a{s}.c, %a{s}.r
%b{s}.t = add <32 x i16> %b{s}.c, %b{s}.r
%b{s}.th = shl <32 x i16> %b{s}.t, {every(8, 32)}
{weave(f"%t{s}", f"%a{s}.t", f"%b{s}.th")}
%tu{s} = icmp slt <64 x i8> %t{s}, zeroinitializer
{lookup(f"%g{s}", "g", f"%t{s}", f"%tu{s}")}
{_halves("g", s)}
%a{s}.next = or <32 x i16> %a{s}.base, %a{s}.g
%b{s}.next = or <32 x i16> %b{s}.base, %b{s}.g
%e{s} = icmp ne <64 x i8> %k{s}, zeroinitializer
%e{s}.mask = bitcast <64 x i1> %e{s} to i64
%e{s}.used = call i64 @llvm.ctpop.i64(i64 %e{s}.mask)
%lit{s} = sub i64 {lit}, %e{s}.used
%e{s}.some = icmp ne i64 %e{s}.mask, 0
br i1 %e{s}.some, label %escaped{s}, label %after{s}
escaped{s}:
%e{s}.dense = call <64 x i8> {COMPRESS64}(<64 x i8> %y{s}, <64 x i8> zeroinitializer,
    <64 x i1> %e{s})
%e{s}.to = getelementptr i8, ptr %out, i64 %lit{s}
%e{s}.unused = sub i64 64, %e{s}.used
%e{s}.ones = lshr i64 -1, %e{s}.unused
%e{s}.where = bitcast i64 %e{s}.ones to <64 x i1>
call void {STORE64}(<64 x i8> %e{s}.dense, ptr %e{s}.to, i32 1, <64 x i1> %e{s}.where)
br label %after{s}
after{s}:
"""


def _encode_text(streams: int) -> str:
    each = range(streams)
    last = f"%after{0}"
    marks = "\n".join(
        f"%at{s}.p = getelementptr i64, ptr %marks, i64 {s}\n%at{s}.0 = load i64, ptr %at{s}.p"
        for s in each
    )
    phis = "\n".join(
        f"""
%a{s} = phi <32 x i16> [ {every(256, 32)}, %entry ], [ %a{s}.next, {last} ]
%b{s} = phi <32 x i16> [ {every(256, 32)}, %entry ], [ %b{s}.next, {last} ]
%at{s} = phi i64 [ %at{s}.0, %entry ], [ %at{s}.next, {last} ]"""
        for s in each
    )
    steps, lit = "", "%lit"
    for s in reversed(each):
        steps, lit = steps + _encode_step(s, streams, lit), f"%lit{s}"
    woven = "<" + ", ".join(f"i32 {i}, i32 {32 + i}" for i in range(32)) + ">"
    done = "\n".join(
        f"""
%at{s}.end = sub i64 %at{s}, 128
store i64 %at{s}.end, ptr %at{s}.p
%to{s}.end = getelementptr i8, ptr %out, i64 %at{s}.end
%both{s} = shufflevector <32 x i16> %a{s}, <32 x i16> %b{s}, <64 x i32> {woven}
store <64 x i16> %both{s}, ptr %to{s}.end, align 1"""
        for s in each
    )
    tables = "\n".join(table(n, 256 * i) for i, n in enumerate(("f", "c", "il", "ih", "k", "g")))
    return f"""{DECLARED}
define void @encode(ptr %data, i64 %steps, ptr %tables, ptr %marks, ptr %out) {{
entry:
{tables}
{marks}
%lit.p = getelementptr i64, ptr %marks, i64 {streams}
%lit.0 = load i64, ptr %lit.p
br label %loop
loop:
%todo = phi i64 [ %steps, %entry ], [ %n, {last} ]
%lit = phi i64 [ %lit.0, %entry ], [ %lit0, {last} ]
{phis}
%n = sub i64 %todo, 1
%go = icmp ne i64 %todo, 0
br i1 %go, label %step, label %done
step:
{steps}
br label %loop
done:
store i64 %lit, ptr %lit.p
{done}
ret void
}}
"""


def _made(streams: int) -> Callable[..., None] | None:
    kinds = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    return jit.function(_encode_text(streams), "encode", None, kinds) if able() else None


def _right(loop: Callable[..., None], streams: int) -> bool:
    """Whether a loop writes what numpy writes."""
    plane = rare_ones(streams)
    tables = lookups(*shared_out(counted(plane)))
    steps = plane.size // (streams * LANES)
    each = LANES * steps + STATES
    ends = [each * (s + 1) for s in range(streams)] + [each * streams + plane.size]
    found = []
    for fast in (False, True):
        marks, room = np.array(ends, np.int64), np.zeros(ends[-1], np.uint8)
        if fast:
            addresses = (tables.ctypes.data, marks.ctypes.data, room.ctypes.data)
            loop(plane.ctypes.data, steps, *addresses)
        else:
            encode_steps(plane, steps, tables, marks, room)
        written = [room[a:b] for a, b in zip(marks.tolist(), ends, strict=True)]
        found.append((marks.tolist(), np.concatenate(written).tobytes()))
    return found[0] == found[1]


encoder: Final = jit.Tried("lanes", _made, _right)
"""The loop that encodes a piece of so many streams (1 or 2), backwards; None: not here, or not yet.

Its arguments: data (address; ``64 * streams`` bytes a step), steps, tables (address; by symbol:
share, first place, reciprocal of the share as low and high byte, not 0 if it is escaped; by place:
slot), marks (address; int64: ends of the streams and of the literals as offsets into the target,
replaced by their beginnings), target (address).
"""
