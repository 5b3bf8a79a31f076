"""Decoding loops of :mod:`tierkv_codecs.ecq`: codes to numbers, in one pass."""

from __future__ import annotations

from tierkv_codecs.rope import WHEEL, pairs
from tierkv_codecs.step_ir import Code, each_row, ints, turned, write
from tierkv_codecs.step_sizes import NIBBLE, STILL

__all__ = ["decode_channels", "decode_keys", "decode_rows", "find_angles"]


class _Line:
    """Where the codes of a row are: a byte each, or half a byte, :mod:`tierkv_codecs.packing`."""

    def __init__(self, w: Code, codes: str, row: str, rows: str, dim: int, nibbles: bool) -> None:
        self.nibbles, self.shift = nibbles, ""
        if nibbles:
            lines = w.let(f"add i64 {rows}, 1")
            lines = w.let(f"lshr i64 {lines}, 1")
            second = w.let(f"icmp sge i64 {row}, {lines}")
            before = w.let(f"sub i64 {row}, {lines}")
            row = w.let(f"select i1 {second}, i64 {before}, i64 {row}")
            self.shift = w.let(f"select i1 {second}, i8 4, i8 0")
        self.base = w.at("i8", codes, w.times(row, dim))

    def read(self, w: Code, *offsets: str | int, lanes: int) -> str:
        """Codes as float32."""
        kind = f"<{lanes} x i8>"
        code = w.let(f"load {kind}, ptr {w.at('i8', self.base, *offsets)}, align 1")
        if self.nibbles:
            code = w.let(f"lshr {kind} {code}, {w.all('i8', self.shift, lanes)}")
            code = w.let(f"and {kind} {code}, {ints('i8', 15, lanes)}")
            code = w.let(f"sub {kind} {code}, {ints('i8', NIBBLE, lanes)}")
        code = w.let(f"sext {kind} {code} to <{lanes} x i32>")
        return w.let(f"sitofp <{lanes} x i32> {code} to <{lanes} x float>")


def _looked_up(w: Code, table: str, exponents: str, i: str) -> str:
    """The step of an exponent, from the table of all."""
    index = w.let(f"load i8, ptr {w.at('i8', exponents, i)}")
    index = w.let(f"sext i8 {index} to i64")
    return w.let(f"load float, ptr {w.at('float', table, -STILL, index)}")


def decode_rows(w: Code, dim: int, nibbles: bool) -> None:
    """``decode_rows(exponents, table, codes, out, rows)``."""

    def row(r: str) -> None:
        step = _looked_up(w, "%table", "%exponents", r)
        line = _Line(w, "%codes", r, "%rows", dim, nibbles)
        target = w.at("i16", "%out", w.times(r, dim))

        def chunk(at: str | int, lanes: int) -> None:
            code = line.read(w, at, lanes=lanes)
            number = w.math("fmul", code, w.all("float", step, lanes), lanes)
            write(w, number, target, at, lanes=lanes)

        w.chunks(dim, chunk)

    w.loop("%rows", row)


def find_angles(w: Code, dim: int) -> None:
    """``find_angles(frequency, wheel, size, cosine, sine)``; frequencies are int64."""
    half = pairs(dim)

    def token(t: str) -> None:
        def pair(i: str) -> None:
            turn = w.let(f"load i64, ptr {w.at('i64', '%frequency', i)}")
            place = w.let(f"and i64 {w.times(turn, t)}, {WHEEL - 1}")
            to = w.let(f"add i64 {w.times(t, half)}, {i}")
            for table, skip in (("%cosine", 0), ("%sine", WHEEL)):
                value = w.let(f"load float, ptr {w.at('float', '%wheel', place, skip)}")
                w.do(f"store float {value}, ptr {w.at('float', table, to)}")

        w.loop(half, pair)

    w.loop("%size", token)


def decode_channels(w: Code) -> None:
    """``decode_channels(low, high, exponents, table, mean, step, count)``: of means and steps."""

    def channel(i: str) -> None:
        parts = []
        for plane in ("%low", "%high"):
            byte = w.let(f"load i8, ptr {w.at('i8', plane, i)}")
            parts.append(w.let(f"sext i8 {byte} to i32"))
        high = w.let(f"shl i32 {parts[1]}, 8")
        whole = w.let(f"add i32 {high}, {parts[0]}")
        number = w.let(f"sitofp i32 {whole} to float")
        w.do(f"store float {number}, ptr {w.at('float', '%mean', i)}")
        step = _looked_up(w, "%table", "%exponents", i)
        w.do(f"store float {step}, ptr {w.at('float', '%step', i)}")

    w.loop("%count", channel)


def decode_keys(w: Code, dim: int, nibbles: bool) -> None:
    """``decode_keys(mean, step, cosine, sine, codes, out, heads, tokens, size, places)``."""
    half = pairs(dim)
    rows = w.times("%heads", "%tokens")

    def row(r: str, g: str, t: str) -> None:
        line = _Line(w, "%codes", r, rows, dim, nibbles)
        target = w.at("i16", "%out", w.times(r, dim))
        channel = w.times(g, dim)
        mean, step = (w.at("float", table, channel) for table in ("%mean", "%step"))
        angle = w.times(t, half)

        def number(at: str | int, skip: int, lanes: int) -> str:
            code = line.read(w, at, skip, lanes=lanes)
            found = w.math("fadd", code, w.floats(mean, at, skip, lanes=lanes), lanes)
            return w.math("fmul", found, w.floats(step, at, skip, lanes=lanes), lanes)

        def pair(at: str | int, lanes: int) -> None:
            cosine, sine = (w.floats(x, angle, at, lanes=lanes) for x in ("%cosine", "%sine"))
            both = number(at, 0, lanes), number(at, half, lanes)
            first, second = turned(w, *both, cosine, sine, lanes)
            write(w, first, target, at, lanes=lanes)
            write(w, second, target, at, half, lanes=lanes)

        def single(at: str | int, lanes: int) -> None:
            write(w, number(at, 0, lanes), target, at, lanes=lanes)

        w.chunks(half or dim, pair if half else single)

    each_row(w, row)
