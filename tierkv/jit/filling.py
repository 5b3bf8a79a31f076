"""LLVM IR that fills frames from a view; see :mod:`tierkv.jit.copying`.

A section goes by the block of 1 KiB: copied, and summed from where it came from, since what is
written past the caches is in none. A row that is long enough is read where it is. Shorter rows,
and what is left of longer ones, are collected in a block of their own on the stack first, which is
in the L1 cache; so rows may have any length, and the padding is part of the last block.
"""

from __future__ import annotations

from typing import Final

from tierkv.jit.walking import FENCE, STEP, SUMS, ahead, job, pointer, walk
from tierkv.jit.xxh3 import BLOCK

__all__ = ["TEXT"]

_AHEAD: Final = 4096
"""Bytes from what is read to what is asked of memory meanwhile; 2 and 8 KiB were alike."""

_EMIT: Final = f"""
define internal i64 @emit(ptr %data, ptr %far, i64 %left, i64 %length, ptr %state, ptr %out,
                          i1 %sums, i1 %past) noinline {{
  %count = call i64 @llvm.umin.i64(i64 %left, i64 {STEP})
  %size = shl i64 %count, 6
  call void @copy(ptr %far, ptr %data, i64 %size, i1 %past)
  %rest = sub i64 %left, %count
  br i1 %sums, label %sum, label %done
sum:
  %more = icmp ne i64 %rest, 0
  br i1 %more, label %block, label %last
block:
  call void @xxh3_block(ptr %data, ptr %state)
  br label %done
last:
  call void @xxh3_last(ptr %data, i64 %left, i64 %length, ptr %state, ptr %out)
  br label %done
done:
  ret i64 %rest
}}
"""
_GATHER_SECTION: Final = """
  %k.first = mul i64 %f, %sections
  %k.number = add i64 %k.first, %k
  %k.digest = shl i64 %k.number, 4
  %out = getelementptr i8, ptr %digests, i64 %k.digest
  %k.far = add i64 %frame.at, %offset
  %length = shl i64 %stripes, 6
  store i64 %k.far, ptr %far.at
  store i64 %stripes, ptr %left.at
  store i64 0, ptr %held.at
  call void @xxh3_begin(ptr %state)"""


def _emit(name: str, data: str) -> str:
    """The next 1 KiB of the section, or what is left of it."""
    return f"""
  %far.{name} = load i64, ptr %far.at{pointer("to." + name, "%far." + name)}
  %left.{name} = load i64, ptr %left.at
  %rest.{name} = call i64 @emit(ptr {data}, ptr %to.{name}, i64 %left.{name}, i64 %length,
    ptr %state, ptr %out, i1 %sums, i1 %past)
  store i64 %rest.{name}, ptr %left.at
  %further.{name} = add i64 %far.{name}, {BLOCK}
  store i64 %further.{name}, ptr %far.at"""


_GATHER_ROW: Final = f"""
  store i64 0, ptr %p.at
  br label %piece
piece:
  %p = load i64, ptr %p.at
  %from = getelementptr i8, ptr %near, i64 %p
  %p.left = sub i64 %width, %p
  %held = load i64, ptr %held.at
  %empty = icmp eq i64 %held, 0
  %long = icmp uge i64 %p.left, {BLOCK}
  %direct = and i1 %empty, %long
  br i1 %direct, label %straight, label %collect
straight:
  %soon = icmp uge i64 %p.left, {_AHEAD + BLOCK}
  br i1 %soon, label %prefetch, label %take
prefetch:
  call void @ahead.row(ptr %from)
  br label %take
take:
{_emit("s", "%from")}
  %p.straight = add i64 %p, {BLOCK}
  store i64 %p.straight, ptr %p.at
  br label %row.next
collect:
  %free = sub i64 {BLOCK}, %held
  %some = call i64 @llvm.umin.i64(i64 %free, i64 %p.left)
  %spot = getelementptr i8, ptr %room, i64 %held
  call void @copy(ptr %spot, ptr %from, i64 %some, i1 false)
  %p.collected = add i64 %p, %some
  store i64 %p.collected, ptr %p.at
  %held.more = add i64 %held, %some
  store i64 %held.more, ptr %held.at
  %full = icmp eq i64 %held.more, {BLOCK}
  br i1 %full, label %flush, label %row.next
flush:
{_emit("f", "%room")}
  store i64 0, ptr %held.at
  br label %row.next
row.next:
  %p.now = load i64, ptr %p.at
  %p.go = icmp slt i64 %p.now, %width
  br i1 %p.go, label %piece, label %row.end
row.end:"""
_GATHER_REST: Final = f"""
  %held.rest = load i64, ptr %held.at
  %pad = icmp ne i64 %held.rest, 0
  br i1 %pad, label %k.rest, label %k.done
k.rest:
  %spot.rest = getelementptr i8, ptr %room, i64 %held.rest
  %free.rest = sub i64 {BLOCK}, %held.rest
  call void @llvm.memset.p0.i64(ptr %spot.rest, i8 0, i64 %free.rest, i1 false)
{_emit("r", "%room")}
  br label %k.done
k.done:"""

TEXT: Final = f"""{ahead("row", _AHEAD)}{_EMIT}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define void @gather(ptr %job, i64 %low, i64 %high, i64 %flags) {{
  %state = alloca <8 x i64>, align 64
  %room = alloca [{BLOCK} x i8], align 64
  %far.at = alloca i64
  %left.at = alloca i64
  %held.at = alloca i64{job()}
  %sums.bit = and i64 %flags, {SUMS}
  %sums = icmp ne i64 %sums.bit, 0
{walk(_GATHER_SECTION, _GATHER_ROW, _GATHER_REST)}
{FENCE}
  ret void
}}
"""
"""``@gather(job, low, high, flags)`` fills frames ``low`` to ``high``; sums go to the digests."""
