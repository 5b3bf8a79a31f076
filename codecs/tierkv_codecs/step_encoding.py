"""Encoding loops of :mod:`tierkv_codecs.ecq`: what decides a step, and codes.

Sums are made in the order of :mod:`tierkv_codecs.step_floats`. Keys are turned back as they are
read, by a table of the cosine and sine of each token of a group and each pair of channels, once to
be weighed and once to be coded: no turned tensor stands in memory.
"""

from __future__ import annotations

from tierkv_codecs.rope import pairs
from tierkv_codecs.step_floats import TURNS
from tierkv_codecs.step_ir import LANES, Code, each_group, each_row, ints, put_codes, read, turned

__all__ = ["encode_keys", "encode_rows", "find_largest", "find_moving", "weigh_keys", "weigh_rows"]


def find_largest(w: Code, dim: int) -> None:
    """``find_largest(source, most, rows)``: the bits of the largest magnitude, as float32."""
    most = w.room("<16 x i16>")
    w.do(f"store <16 x i16> zeroinitializer, ptr {most}")

    def row(r: str) -> None:
        source = w.at("i16", "%source", w.times(r, dim))

        def chunk(at: str | int, lanes: int) -> None:
            kind = f"<{lanes} x i16>"
            bits = w.let(f"load {kind}, ptr {w.at('i16', source, at)}, align 2")
            bits = w.let(f"and {kind} {bits}, {ints('i16', 0x7FFF, lanes)}")
            old = w.let(f"load {kind}, ptr {most}")
            more = w.let(f"icmp ugt {kind} {bits}, {old}")
            w.do(
                f"store {kind} "
                f"{w.let(f'select <{lanes} x i1> {more}, {kind} {bits}, {kind} {old}')}, ptr {most}"
            )

        w.chunks(dim, chunk)

    w.loop("%rows", row)
    found = w.let(f"load <16 x i16>, ptr {most}")
    found = w.let(f"call i16 @llvm.vector.reduce.umax.v16i16(<16 x i16> {found})")
    wide = w.let(f"zext i16 {found} to i32")
    w.do(f"store i32 {w.let(f'shl i32 {wide}, 16')}, ptr %most")


def find_moving(w: Code, dim: int) -> None:
    """Which channels change: ``find_moving(source, moved, heads, tokens, size, places)``.

    ``moved`` is uint8 ``[heads * places, dim]`` of zeros, and is not 0 then where a number of a
    group differs from the first.
    """

    def row(r: str, g: str, t: str) -> None:
        first = w.let(f"sub i64 {r}, {t}")
        base = w.at("i16", "%source", w.times(first, dim))
        source = w.at("i16", "%source", w.times(r, dim))
        moved = w.at("i8", "%moved", w.times(g, dim))

        def chunk(at: str | int, lanes: int) -> None:
            one, other = read(w, base, at, lanes=lanes), read(w, source, at, lanes=lanes)
            apart = w.let(f"fcmp une <{lanes} x float> {one}, {other}")
            apart = w.let(f"zext <{lanes} x i1> {apart} to <{lanes} x i8>")
            place = w.at("i8", moved, at)
            old = w.let(f"load <{lanes} x i8>, ptr {place}, align 1")
            w.do(
                f"store <{lanes} x i8> {w.let(f'or <{lanes} x i8> {old}, {apart}')}, ptr {place}, "
                "align 1"
            )

        w.chunks(dim, chunk)

    each_row(w, row)


def _halved(w: Code, value: str, lanes: int) -> str:
    """The sum of all lanes: the upper half is added to the lower, until one is left."""
    while lanes > 1:
        lanes //= 2
        low, high = (
            w.let(
                f"shufflevector <{2 * lanes} x float> {value}, <{2 * lanes} x float> poison, "
                f"<{lanes} x i32> <{', '.join(f'i32 {i + skip}' for i in range(lanes))}>"
            )
            for skip in (0, lanes)
        )
        value = w.math("fadd", low, high, lanes)
    return w.let(f"extractelement <1 x float> {value}, i32 0")


def weigh_rows(w: Code, dim: int) -> None:
    """``weigh_rows(source, factor, squares, reach, rows)``: of numbers times the factor."""

    def row(r: str) -> None:
        source = w.at("i16", "%source", w.times(r, dim))
        sums, most = w.room("<16 x float>"), w.room("<16 x float>")
        for room in (sums, most):
            w.do(f"store <16 x float> zeroinitializer, ptr {room}")

        def chunk(at: str | int, lanes: int) -> None:
            number = read(w, source, at, lanes=lanes)
            number = w.math("fmul", number, w.all("float", "%factor", lanes), lanes)
            square = w.math("fmul", number, number, lanes)
            total = w.math("fadd", w.floats(sums, lanes=lanes), square, lanes)
            w.put_floats(total, sums, lanes=lanes)
            size = w.call(
                "maxnum", lanes, w.floats(most, lanes=lanes), w.call("fabs", lanes, number)
            )
            w.put_floats(size, most, lanes=lanes)

        w.chunks(dim, chunk)
        total = _halved(w, w.floats(sums, lanes=LANES), LANES)
        w.do(f"store float {total}, ptr {w.at('float', '%squares', r)}")
        size = w.let(
            f"call float @llvm.vector.reduce.fmax.v16f32(<16 x float> "
            f"{w.floats(most, lanes=LANES)})"
        )
        w.do(f"store float {size}, ptr {w.at('float', '%reach', r)}")

    w.loop("%rows", row)


def encode_rows(w: Code, dim: int) -> None:
    """``encode_rows(source, factor, step, top, codes, rows)``."""

    def row(r: str) -> None:
        first = w.times(r, dim)
        source, codes = w.at("i16", "%source", first), w.at("i8", "%codes", first)
        step = w.let(f"load float, ptr {w.at('float', '%step', r)}")

        def chunk(at: str | int, lanes: int) -> None:
            number = read(w, source, at, lanes=lanes)
            number = w.math("fmul", number, w.all("float", "%factor", lanes), lanes)
            number = w.math("fdiv", number, w.all("float", step, lanes), lanes)
            number = w.call("rint", lanes, number)
            put_codes(w, number, "%top", codes, at, lanes=lanes)

        w.chunks(dim, chunk)

    w.loop("%rows", row)


class _Keys:
    """Numbers of a row of keys, turned back."""

    def __init__(self, w: Code, dim: int, row: str, token: str) -> None:
        self.half = pairs(dim)
        self.source = w.at("i16", "%source", w.times(row, dim))
        self.angle = w.times(token, self.half)

    def read(self, w: Code, at: str | int, lanes: int) -> list[tuple[str, int]]:
        """Pairs of numbers and the offset that they have beside ``at``."""
        found = []
        for skip in (0, self.half) if self.half else (0,):
            number = read(w, self.source, at, skip, lanes=lanes)
            found.append(w.math("fmul", number, w.all("float", "%factor", lanes), lanes))
        if not self.half:
            return [(found[0], 0)]
        cosine, sine = (w.floats(x, self.angle, at, lanes=lanes) for x in ("%cosine", "%sine"))
        first, second = turned(w, found[0], found[1], cosine, sine, lanes)
        return [(first, 0), (second, self.half)]


class _Weighing:
    """Sums, largest distances and turned numbers of one group of tokens, in the room."""

    def __init__(self, w: Code, dim: int) -> None:
        self.w, self.dim, self.sums = w, dim, "%room"
        self.most = w.at("float", "%room", TURNS * dim)
        self.numbers = w.at("float", "%room", (TURNS + 1) * dim)

    def clear(self) -> None:
        """Begin sums and distances anew."""
        w = self.w

        def chunk(at: str | int, lanes: int) -> None:
            w.put_floats("zeroinitializer", "%room", at, lanes=lanes)

        w.chunks((TURNS + 1) * self.dim, chunk)

    def add(self, t: str, value: str, at: str | int, skip: int, lanes: int) -> None:
        """Add a number of token ``t`` to the sum whose turn it is."""
        w = self.w
        turn = w.let(f"and i64 {t}, {TURNS - 1}")
        place = (w.times(turn, self.dim), at, skip)
        total = w.math("fadd", w.floats(self.sums, *place, lanes=lanes), value, lanes)
        w.put_floats(total, self.sums, *place, lanes=lanes)

    def store(self, target: str, channel: str, share: str) -> None:
        """Write the sums times ``share``."""
        w = self.w

        def chunk(at: str | int, lanes: int) -> None:
            parts = [w.floats(self.sums, at, self.dim * i, lanes=lanes) for i in range(TURNS)]
            while len(parts) > 1:
                left = len(parts) // 2
                parts = [w.math("fadd", parts[i], parts[i + left], lanes) for i in range(left)]
            found = w.math("fmul", parts[0], w.all("float", share, lanes), lanes)
            w.put_floats(found, target, channel, at, lanes=lanes)

        w.chunks(self.dim, chunk)

    def turned(self, start: str, t: str) -> None:
        """Keep a token turned back, and add it up."""
        w = self.w
        keys = _Keys(w, self.dim, w.let(f"add i64 {start}, {t}"), t)
        row = w.times(t, self.dim)

        def chunk(at: str | int, lanes: int) -> None:
            for number, skip in keys.read(w, at, lanes):
                w.put_floats(number, self.numbers, row, at, skip, lanes=lanes)
                self.add(t, number, at, skip, lanes)

        w.chunks(keys.half or self.dim, chunk)

    def apart(self, channel: str, t: str) -> None:
        """Add up the squares of a token's distances from the means, and keep the largest."""
        w = self.w
        row = w.times(t, self.dim)

        def chunk(at: str | int, lanes: int) -> None:
            number = w.floats(self.numbers, row, at, lanes=lanes)
            mean = w.floats("%mean", channel, at, lanes=lanes)
            number = w.math("fsub", number, mean, lanes)
            self.add(t, w.math("fmul", number, number, lanes), at, 0, lanes)
            size = w.call("fabs", lanes, number)
            size = w.call("maxnum", lanes, w.floats(self.most, at, lanes=lanes), size)
            w.put_floats(size, self.most, at, lanes=lanes)

        w.chunks(self.dim, chunk)


def weigh_keys(w: Code, dim: int) -> None:
    """The means of channels, and what is left beside them.

    ``weigh_keys(source, factor, cosine, sine, mean, squares, reach, heads, tokens, size, places,
    room)``; the room is float32 ``[TURNS + 1 + size, dim]``.
    """
    weighing = _Weighing(w, dim)

    def group(start: str, place: str, count: str) -> None:
        channel = w.times(place, dim)
        share = w.let(f"fdiv float 1.0, {w.let(f'sitofp i64 {count} to float')}")

        def reached(at: str | int, lanes: int) -> None:
            most = w.floats(weighing.most, at, lanes=lanes)
            w.put_floats(most, "%reach", channel, at, lanes=lanes)

        weighing.clear()
        w.loop(count, lambda t: weighing.turned(start, t))
        weighing.store("%mean", channel, share)
        weighing.clear()
        w.loop(count, lambda t: weighing.apart(channel, t))
        weighing.store("%squares", channel, share)
        w.chunks(dim, reached)

    each_group(w, group)


def encode_keys(w: Code, dim: int) -> None:
    """Codes of keys, turned back.

    ``encode_keys(source, factor, cosine, sine, inverse, mean, top, codes, heads, tokens, size,
    places)``.
    """

    def row(r: str, g: str, t: str) -> None:
        keys = _Keys(w, dim, r, t)
        channel = w.times(g, dim)
        codes = w.at("i8", "%codes", w.times(r, dim))

        def chunk(at: str | int, lanes: int) -> None:
            for number, skip in keys.read(w, at, lanes):
                inverse = w.floats("%inverse", channel, at, skip, lanes=lanes)
                mean = w.floats("%mean", channel, at, skip, lanes=lanes)
                number = w.call("rint", lanes, w.math("fmul", number, inverse, lanes))
                number = w.math("fsub", number, mean, lanes)
                put_codes(w, number, "%top", codes, at, skip, lanes=lanes)

        w.chunks(keys.half or dim, chunk)

    each_row(w, row)
