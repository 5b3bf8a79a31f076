"""LLVM IR that empties frames into a view, and sums frames; see :mod:`tierkv.jit.copying`.

Two places move through the frames in step: what is copied, row by row, and what is summed, one
block of 1 KiB for each that is copied. Whoever calls says which frames each of them goes through:
the same ones, where a view may hold wrong bytes, or the next ones, where it may not. Where the sum
is, a *mark* tells.
"""

from __future__ import annotations

from typing import Final

from tierkv.jit.walking import (
    AT,
    COUNT,
    DIGESTS,
    FENCE,
    FIELDS,
    PLACES,
    SPENT,
    STEP,
    ahead,
    get,
    job,
    pointer,
    put,
    walk,
)
from tierkv.jit.xxh3 import BLOCK, STRIPE, block, loop

__all__ = ["TEXT"]

_FRAME, _STOP, _SECTION, _POINTER, _LEFT, _WRONG, _ACTIVE = range(7)  # of a mark
_OFFSET, _STRIPES = 0, 8  # of a place
_AHEAD: Final = 8192
"""Bytes from what is summed to what is asked of memory meanwhile; 4 and 16 KiB were alike."""
_COPY_AHEAD: Final = 4096
"""The same for what is copied, where it is not needed again."""

_STEPS: Final = f"""
define internal void @open(ptr %job, ptr %mark, ptr %state) {{{get("at.number", "%job", AT)}
{pointer("at", "%at.number")}{get("places.number", "%job", PLACES)}
{pointer("places", "%places.number")}{get("f", "%mark", _FRAME)}{get("k", "%mark", _SECTION)}
{get("frame.at", "%at", "%f")}
  %k.skip = mul i64 %k, {FIELDS}
  %place = getelementptr i64, ptr %places, i64 %k.skip{get("offset", "%place", _OFFSET)}
{get("stripes", "%place", _STRIPES)}
  %begin = add i64 %frame.at, %offset{put("p", "%mark", _POINTER, "%begin")}
{put("left", "%mark", _LEFT, "%stripes")}
  call void @xxh3_begin(ptr %state)
  ret void
}}

define internal void @step(ptr %job, ptr %mark, ptr %state) noinline {{
  %found = alloca [2 x i64]{get("active", "%mark", _ACTIVE)}
  %on = icmp ne i64 %active, 0
  br i1 %on, label %sum, label %done
sum:
{get("p", "%mark", _POINTER)}{pointer("data", "%p")}{get("left", "%mark", _LEFT)}
  %more = icmp ugt i64 %left, {STEP}
  br i1 %more, label %block, label %last
block:
  call void @ahead.frame(ptr %data)
  call void @xxh3_block(ptr %data, ptr %state)
  %p.next = add i64 %p, {BLOCK}
  %left.next = sub i64 %left, {STEP}{put("p.set", "%mark", _POINTER, "%p.next")}
{put("left.set", "%mark", _LEFT, "%left.next")}
  ret void
last:
{get("f", "%mark", _FRAME)}{get("k", "%mark", _SECTION)}{get("sections", "%job", COUNT)}
{get("places.number", "%job", PLACES)}{pointer("places", "%places.number")}
  %k.skip = mul i64 %k, {FIELDS}
  %place = getelementptr i64, ptr %places, i64 %k.skip{get("stripes", "%place", _STRIPES)}
  %length = shl i64 %stripes, 6
  call void @xxh3_last(ptr %data, i64 %left, i64 %length, ptr %state, ptr %found)
{get("digests.number", "%job", DIGESTS)}{pointer("digests", "%digests.number")}
  %first = mul i64 %f, %sections
  %number = add i64 %first, %k
  %twice = shl i64 %number, 1
  %twice.1 = add i64 %twice, 1{get("due.a", "%digests", "%twice")}
{get("due.b", "%digests", "%twice.1")}{get("found.a", "%found", 0)}{get("found.b", "%found", 1)}
  %same.a = icmp eq i64 %due.a, %found.a
  %same.b = icmp eq i64 %due.b, %found.b
  %same = and i1 %same.a, %same.b
  br i1 %same, label %right, label %wrong
wrong:
{put("wrong.set", "%mark", _WRONG, "%f")}
  br label %end
right:
  %k.next = add i64 %k, 1
  %inside = icmp ult i64 %k.next, %sections
  br i1 %inside, label %next.section, label %next.frame
next.section:
{put("k.set", "%mark", _SECTION, "%k.next")}
  br label %next
next.frame:
  %f.next = add i64 %f, 1{put("k.zero", "%mark", _SECTION, "0")}
{put("f.set", "%mark", _FRAME, "%f.next")}{get("stop", "%mark", _STOP)}
  %over = icmp sge i64 %f.next, %stop
  br i1 %over, label %end, label %next
next:
  call void @open(ptr %job, ptr %mark, ptr %state)
  ret void
end:
{put("active.set", "%mark", _ACTIVE, "0")}
  br label %done
done:
  ret void
}}
"""


def _beside(number: int) -> str:
    at = STRIPE * number
    return f"""
  %from.{number} = getelementptr i8, ptr %from, i64 {at}
  %to.{number} = getelementptr i8, ptr %to, i64 {at}
  %moved.{number} = load <8 x i64>, ptr %from.{number}, align 1
  store <8 x i64> %moved.{number}, ptr %to.{number}, align {STRIPE}, !nontemporal !0"""


_BOTH: Final = block("both", ", ptr noalias %to, ptr noalias %from", _beside)
"""A block summed and another one copied, line by line. In turns of 1 KiB it took a tenth longer; of
the same block, though, which is in the L1 cache the second time, a twentieth less."""
_SCATTER_ROW: Final = loop(
    "p",
    "0",
    "%pieces",
    f"""
  %p.done = mul i64 %p, {BLOCK}
  %p.left = sub i64 %width, %p.done
  %size = call i64 @llvm.umin.i64(i64 %p.left, i64 {BLOCK})
  %far = load i64, ptr %far.at{pointer("from", "%far")}
  %to = getelementptr i8, ptr %near, i64 %p.done
  br i1 %spent, label %spend, label %begun
spend:
  call void @ahead.spent(ptr %from)
  br label %begun
begun:
  %behind = load i64, ptr %behind.at
  %behind.more = add i64 %behind, %size
  store i64 %behind.more, ptr %behind.at
  %due = icmp uge i64 %behind.more, {BLOCK}
  br i1 %due, label %check, label %piece
check:
  %behind.less = sub i64 %behind.more, {BLOCK}
  store i64 %behind.less, ptr %behind.at
{get("b.active", "%mark", _ACTIVE)}{get("b.left", "%mark", _LEFT)}{get("b.p", "%mark", _POINTER)}
  %b.on = icmp ne i64 %b.active, 0
  %b.more = icmp ugt i64 %b.left, {STEP}
  %b.whole = icmp eq i64 %size, {BLOCK}
  %b.to = ptrtoint ptr %to to i64
  %b.beyond = and i64 %b.to, {STRIPE - 1}
  %b.aligned = icmp eq i64 %b.beyond, 0
  %b.1 = and i1 %b.on, %b.more
  %b.2 = and i1 %b.whole, %b.aligned
  %b.3 = and i1 %b.1, %past
  %b.4 = and i1 %b.2, %b.3
  %b.both = and i1 %b.4, %apart
  br i1 %b.both, label %both, label %sum
both:{pointer("b.data", "%b.p")}
  call void @ahead.frame(ptr %b.data)
  call void @both(ptr %b.data, ptr %state, ptr %to, ptr %from)
  %b.next = add i64 %b.p, {BLOCK}
  %b.rest = sub i64 %b.left, {STEP}{put("b.p.set", "%mark", _POINTER, "%b.next")}
{put("b.left.set", "%mark", _LEFT, "%b.rest")}
  br label %piece.end
sum:
  call void @step(ptr %job, ptr %mark, ptr %state)
  br label %piece
piece:
  call void @copy(ptr %to, ptr %from, i64 %size, i1 %past)
  br label %piece.end
piece.end:
  %far.next = add i64 %far, %size
  store i64 %far.next, ptr %far.at""",
)
_SCATTER_SECTION: Final = f"""
  %k.far = add i64 %frame.at, %offset
  store i64 %k.far, ptr %far.at
  %pieces.up = add i64 %width, {BLOCK - 1}
  %pieces = udiv i64 %pieces.up, {BLOCK}"""

_SCATTER_FRAME: Final = f"""
  br i1 %tied, label %settle, label %frame.go
settle:
{get("settle.f", "%mark", _FRAME)}{get("settle.active", "%mark", _ACTIVE)}
  %settle.on = icmp ne i64 %settle.active, 0
  %settle.behind = icmp slt i64 %settle.f, %f
  %settle.more = and i1 %settle.on, %settle.behind
  br i1 %settle.more, label %settle.step, label %settled
settle.step:
  call void @step(ptr %job, ptr %mark, ptr %state)
  br label %settle
settled:
{get("settled.wrong", "%mark", _WRONG)}
  %settled.bad = icmp sge i64 %settled.wrong, 0
  br i1 %settled.bad, label %f.end, label %frame.go
frame.go:"""
"""Where the same frames are copied and summed, those behind a wrong one are left alone."""

TEXT: Final = f"""{ahead("frame", _AHEAD)}{ahead("spent", _COPY_AHEAD, keep=False)}{_STEPS}{_BOTH}
define i64 @scatter(ptr %job, i64 %low, i64 %high, i64 %first, i64 %stop, i64 %flags) {{
  %state = alloca <8 x i64>, align 64
  %mark = alloca [7 x i64], align 8
  %far.at = alloca i64
  %behind.at = alloca i64{job()}
  store i64 0, ptr %behind.at{put("m.f", "%mark", _FRAME, "%first")}
{put("m.stop", "%mark", _STOP, "%stop")}{put("m.k", "%mark", _SECTION, "0")}
{put("m.wrong", "%mark", _WRONG, "-1")}
  %spent.bit = and i64 %flags, {SPENT}
  %spent = icmp ne i64 %spent.bit, 0
  %same.low = icmp eq i64 %low, %first
  %same.high = icmp eq i64 %high, %stop
  %tied = and i1 %same.low, %same.high
  %apart = xor i1 %tied, true
  %some = icmp slt i64 %first, %stop
  %some.number = zext i1 %some to i64{put("m.active", "%mark", _ACTIVE, "%some.number")}
  br i1 %some, label %begin, label %go
begin:
  call void @open(ptr %job, ptr %mark, ptr %state)
  br label %go
go:
{walk(_SCATTER_SECTION, _SCATTER_ROW, frame=_SCATTER_FRAME)}
  br label %rest
rest:
{get("rest.active", "%mark", _ACTIVE)}
  %rest.on = icmp ne i64 %rest.active, 0
  br i1 %rest.on, label %rest.step, label %rest.end
rest.step:
  call void @step(ptr %job, ptr %mark, ptr %state)
  br label %rest
rest.end:
{FENCE}
{get("wrong", "%mark", _WRONG)}
  ret i64 %wrong
}}
"""
"""``@scatter(job, low, high, first, stop, flags)`` copies frames ``low`` to ``high`` and, in step
with that, sums frames ``first`` to ``stop``.

Its result is the first of those that does not have the job's digests, or -1. If they are the same
frames, those behind a wrong one are not copied."""
