"""LLVM IR of loops over rows of bfloat16: what those of :mod:`tierkv_codecs.step_code` share.

Sixteen numbers are worked on at a time, what is left of a row in registers that are as much
shorter. Products, sums and quotients are rounded one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LANES",
    "Code",
    "each_group",
    "each_row",
    "ints",
    "put_codes",
    "read",
    "turned",
    "write",
]

LANES: Final = 16
"""Numbers of a register."""


class Code:
    """Lines of a function, names for their values, and loops."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counters: list[str] = []
        self._count = 0

    def name(self) -> str:
        """A name that nothing else has."""
        self._count += 1
        return f"v{self._count}"

    def let(self, text: str) -> str:
        """Add an instruction; the name of its value."""
        name = self.name()
        self.lines.append(f"  %{name} = {text}")
        return f"%{name}"

    def do(self, text: str) -> None:
        """Add an instruction that has no value."""
        self.lines.append(f"  {text}")

    def room(self, kind: str) -> str:
        """Memory of the function."""
        name = self.name()
        self.counters.append(f"  %{name} = alloca {kind}, align 64")
        return f"%{name}"

    def loop(self, count: str | int, body: Callable[[str], None]) -> None:
        """Write ``body`` for each number below ``count``."""
        at, tag = self.room("i64"), self.name()
        self.lines += [f"  store i64 0, ptr {at}", f"  br label %{tag}.head", f"{tag}.head:"]
        number = self.let(f"load i64, ptr {at}")
        more = self.let(f"icmp slt i64 {number}, {count}")
        self.lines += [f"  br i1 {more}, label %{tag}.body, label %{tag}.end", f"{tag}.body:"]
        body(number)
        after = self.let(f"add i64 {number}, 1")
        self.lines += [f"  store i64 {after}, ptr {at}", f"  br label %{tag}.head", f"{tag}.end:"]

    def at(self, kind: str, base: str, *offsets: str | int) -> str:
        """Address of ``base[sum of offsets]``."""
        for offset in offsets:
            if offset != 0:
                base = self.let(f"getelementptr {kind}, ptr {base}, i64 {offset}")
        return base

    def times(self, one: str, other: str | int) -> str:
        """Product of two 64-bit numbers."""
        return self.let(f"mul i64 {one}, {other}")

    def chunks(self, count: int, body: Callable[[str | int, int], None]) -> None:
        """``body(offset, lanes)`` for all of ``count`` numbers."""
        whole = count // LANES
        if whole:
            self.loop(whole, lambda i: body(self.times(i, LANES), LANES))
        if count % LANES:
            body(LANES * whole, count % LANES)

    def all(self, kind: str, value: str, lanes: int) -> str:
        """A register of equal numbers."""
        one = self.let(f"insertelement <{lanes} x {kind}> poison, {kind} {value}, i32 0")
        return self.let(
            f"shufflevector <{lanes} x {kind}> {one}, <{lanes} x {kind}> poison, "
            f"<{lanes} x i32> zeroinitializer"
        )

    def floats(self, base: str, *offsets: str | int, lanes: int) -> str:
        """Load float32."""
        return self.let(f"load <{lanes} x float>, ptr {self.at('float', base, *offsets)}, align 4")

    def put_floats(self, value: str, base: str, *offsets: str | int, lanes: int) -> None:
        """Store float32."""
        self.do(f"store <{lanes} x float> {value}, ptr {self.at('float', base, *offsets)}, align 4")

    def math(self, kind: str, one: str, other: str, lanes: int) -> str:
        """An instruction of two registers of float32."""
        return self.let(f"{kind} <{lanes} x float> {one}, {other}")

    def call(self, name: str, lanes: int, *values: str) -> str:
        """An intrinsic function of registers of float32."""
        given = ", ".join(f"<{lanes} x float> {value}" for value in values)
        return self.let(f"call <{lanes} x float> @llvm.{name}.v{lanes}f32({given})")


def ints(kind: str, value: int, lanes: int) -> str:
    """A constant register of equal whole numbers."""
    return "<" + ", ".join([f"{kind} {value}"] * lanes) + ">"


def read(w: Code, base: str, *offsets: str | int, lanes: int) -> str:
    """Numbers of bfloat16 as float32."""
    bits = w.let(f"load <{lanes} x i16>, ptr {w.at('i16', base, *offsets)}, align 2")
    wide = w.let(f"zext <{lanes} x i16> {bits} to <{lanes} x i32>")
    wide = w.let(f"shl <{lanes} x i32> {wide}, {ints('i32', 16, lanes)}")
    return w.let(f"bitcast <{lanes} x i32> {wide} to <{lanes} x float>")


def write(w: Code, value: str, base: str, *offsets: str | int, lanes: int) -> None:
    """Round to bfloat16."""
    kind = f"<{lanes} x i32>"
    bits = w.let(f"bitcast <{lanes} x float> {value} to {kind}")
    last = w.let(f"lshr {kind} {bits}, {ints('i32', 16, lanes)}")
    last = w.let(f"and {kind} {last}, {ints('i32', 1, lanes)}")
    bits = w.let(f"add {kind} {bits}, {ints('i32', 0x7FFF, lanes)}")
    bits = w.let(f"add {kind} {bits}, {last}")
    bits = w.let(f"lshr {kind} {bits}, {ints('i32', 16, lanes)}")
    half = w.let(f"trunc {kind} {bits} to <{lanes} x i16>")
    w.do(f"store <{lanes} x i16> {half}, ptr {w.at('i16', base, *offsets)}, align 2")


def put_codes(w: Code, value: str, top: str, base: str, *offsets: str | int, lanes: int) -> None:
    """Whole numbers as signed bytes, none beyond ``top``."""
    most = w.all("float", top, lanes)
    least = w.let(f"fneg <{lanes} x float> {most}")
    value = w.call("maxnum", lanes, value, least)
    value = w.call("minnum", lanes, value, most)
    whole = w.let(f"fptosi <{lanes} x float> {value} to <{lanes} x i32>")
    codes = w.let(f"trunc <{lanes} x i32> {whole} to <{lanes} x i8>")
    w.do(f"store <{lanes} x i8> {codes}, ptr {w.at('i8', base, *offsets)}, align 1")


def turned(w: Code, a: str, b: str, cosine: str, sine: str, lanes: int) -> tuple[str, str]:
    """Pairs of numbers, turned: see :func:`tierkv_codecs.rope.turn`."""
    ac, bs = w.math("fmul", a, cosine, lanes), w.math("fmul", b, sine, lanes)
    bc, as_ = w.math("fmul", b, cosine, lanes), w.math("fmul", a, sine, lanes)
    return w.math("fsub", ac, bs, lanes), w.math("fadd", bc, as_, lanes)


def each_group(w: Code, body: Callable[[str, str, str], None]) -> None:
    """``body(first row, group, tokens of the group)`` for each head and group."""

    def head(h: str) -> None:
        def group(g: str) -> None:
            first = w.times(g, "%size")
            left = w.let(f"sub i64 %tokens, {first}")
            count = w.let(f"call i64 @llvm.smin.i64(i64 {left}, i64 %size)")
            place = w.let(f"add i64 {w.times(h, '%places')}, {g}")
            start = w.let(f"add i64 {w.times(h, '%tokens')}, {first}")
            body(start, place, count)

        w.loop("%places", group)

    w.loop("%heads", head)


def each_row(w: Code, body: Callable[[str, str, str], None]) -> None:
    """``body(row, group, token of the group)`` for each head, group and token."""

    def group(start: str, place: str, count: str) -> None:
        w.loop(count, lambda t: body(w.let(f"add i64 {start}, {t}"), place, t))

    each_group(w, group)
