"""LLVM IR that both directions share: the loops over frames, sections and rows, and the copy.

See :mod:`tierkv.jit.copying` for what it is made into. A *job* is an array of 64-bit numbers: where
the arrays of a run are, then counts.
"""

from __future__ import annotations

from typing import Final

from tierkv.jit.xxh3 import BLOCK, STRIPE, loop

__all__ = [
    "AT",
    "COPY",
    "COUNT",
    "DIGESTS",
    "FENCE",
    "FIELDS",
    "FRAMES",
    "PAST",
    "PLACES",
    "SHIFTS",
    "SPENT",
    "STEP",
    "SUMS",
    "UNITS",
    "ahead",
    "get",
    "job",
    "pointer",
    "put",
    "walk",
]

PAST, SUMS, SPENT = 1, 2, 4
"""Flags of a call: write past the caches; sum what is gathered; what is copied is not needed again,
so that caches need not keep it."""
AT, SHIFTS, PLACES, DIGESTS, COUNT, UNITS, FRAMES = range(7)
"""What is where in a job, an array of 64-bit numbers: addresses of arrays, then counts."""
FIELDS: Final = 9
"""Numbers of a place, in the order of :class:`tierkv.jit.copying.Place`."""
STEP: Final = BLOCK // STRIPE
"""Stripes of a block."""


def get(name: str, array: str, index: int | str) -> str:
    """``%name = array[index]``."""
    return f"""
  %{name}.in = getelementptr i64, ptr {array}, i64 {index}
  %{name} = load i64, ptr %{name}.in, align 8"""


def put(name: str, array: str, index: int, value: str) -> str:
    """``array[index] = value``; ``name`` is free."""
    return f"""
  %{name}.in = getelementptr i64, ptr {array}, i64 {index}
  store i64 {value}, ptr %{name}.in, align 8"""


def pointer(name: str, number: str) -> str:
    """``%name``: the address that a number is."""
    return f"\n  %{name} = inttoptr i64 {number} to ptr"


def _lines(name: str, align: int, hint: str) -> str:
    """Copy ``%count`` lines."""
    body = f"""
  %{name}.skip = shl i64 %{name}, 6
  %{name}.from = getelementptr i8, ptr %from, i64 %{name}.skip
  %{name}.to = getelementptr i8, ptr %to, i64 %{name}.skip
  %{name}.data = load <8 x i64>, ptr %{name}.from, align 1
  store <8 x i64> %{name}.data, ptr %{name}.to, align {align}{hint}"""
    return loop(name, "0", "%count", body)


COPY: Final = f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
!0 = !{{i32 1}}

define internal void @copy(ptr noalias %to, ptr noalias %from, i64 %size, i1 %past) {{
  %i.at = alloca i64
  %j.at = alloca i64
  %count = lshr i64 %size, 6
  %odd = and i64 %size, {STRIPE - 1}
  %whole = icmp eq i64 %odd, 0
  br i1 %whole, label %lines, label %bytes
bytes:
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %size, i1 false)
  ret void
lines:
  %address = ptrtoint ptr %to to i64
  %beyond = and i64 %address, {STRIPE - 1}
  %aligned = icmp eq i64 %beyond, 0
  %around = and i1 %aligned, %past
  br i1 %around, label %past.caches, label %through.caches
past.caches:
{_lines("i", STRIPE, ", !nontemporal !0")}
  ret void
through.caches:
{_lines("j", 1, "")}
  ret void
}}
"""


def ahead(what: str, distance: int, *, keep: bool = True) -> str:
    """``@ahead.what(data)``: ask memory for the block that is so many bytes behind ``data``.

    With ``keep`` false it goes to the nearest cache alone, and from there nowhere.

    The processor's own prefetching ends at every page: without this a gather took a fifth longer.
    Asking for the next page to be *written* made no difference that could be told from noise.
    """
    text = ""
    for number in range(STEP):
        text += f"""
  %line.{number} = getelementptr i8, ptr %data, i64 {distance + STRIPE * number}
  call void @llvm.prefetch.p0(ptr %line.{number}, i32 0, i32 {3 * keep}, i32 1)"""
    return f"""
define internal void @ahead.{what}(ptr %data) {{{text}
  ret void
}}
"""


def walk(section: str, row: str, after: str = "", frame: str = "") -> str:
    """Loop over frames, sections, heads, units and rows.

    Args:
        section: What comes before the rows of a section; knows ``%frame.at`` and the fields.
        row: What is done with each row, which is at ``%near``.
        after: What comes behind the rows of a section.
        frame: What comes before frame ``%f``; it may leave for ``%f.end``.
    """
    fields = ("offset", "address", "kind", "heads", "head", "rows", "row", "width", "stripes")
    places = "".join(get(name, "%place", number) for number, name in enumerate(fields))
    rows = f"""
  %r.skip = mul i64 %r, %row
  %r.near = add i64 %u.near, %r.skip{pointer("near", "%r.near")}{row}"""
    units = f"""
  %u.number = add i64 %k.shifts, %u{get("shift", "%shifts", "%u.number")}
  %u.near = add i64 %h.near, %shift{loop("r", "0", "%rows", rows)}"""
    heads = f"""
  %h.skip = mul i64 %h, %head
  %h.near = add i64 %address, %h.skip{loop("u", "0", "%units", units)}"""
    sections = f"""
  %k.skip = mul i64 %k, {FIELDS}
  %place = getelementptr i64, ptr %places, i64 %k.skip{places}
  %k.frames = mul i64 %kind, %frames
  %k.frame = add i64 %k.frames, %f
  %k.shifts = mul i64 %k.frame, %units{section}{loop("h", "0", "%heads", heads)}{after}"""
    frames = f"""{frame}{get("frame.at", "%at", "%f")}{loop("k", "0", "%sections", sections)}"""
    return loop("f", "%low", "%high", frames)


def job() -> str:
    """What :func:`walk` needs: its counters, and the job's arrays and counts by name."""
    names = ("at", "shifts", "places", "digests")
    return (
        "".join(f"\n  %{name}.at = alloca i64" for name in "fkhurp")
        + "".join(
            get(f"{n}.number", "%job", i) + pointer(n, f"%{n}.number") for i, n in enumerate(names)
        )
        + "".join(
            get(name, "%job", number)
            for name, number in (("sections", COUNT), ("units", UNITS), ("frames", FRAMES))
        )
        + f"""
  %past.bit = and i64 %flags, {PAST}
  %past = icmp ne i64 %past.bit, 0"""
    )


FENCE: Final = """
  br i1 %past, label %fence, label %done
fence:
  fence seq_cst
  br label %done
done:"""
"""Stores past the caches are in no order with others: whoever is told of the end must see them."""
