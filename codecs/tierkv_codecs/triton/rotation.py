"""Kernels of the rotated codecs: a row of the tensor lies whole in one program.

What is added to what, and when, is as in :mod:`tierkv_codecs.hadamard` and
:mod:`tierkv_codecs.rot`. A step of the transform takes its partners by an exchange between lanes
(``tl.gather`` of lane ``i ^ half``), in long rows by turning and splitting them. A block of lanes
takes part if all of it is in the row, which is just how a row is cut into pieces. Grid and tables
as in :mod:`tierkv_codecs.triton.groups`.
"""

from __future__ import annotations

from tierkv_codecs.triton.arithmetic import (
    beginning,
    number,
    quotient,
    reciprocal,
    square_root,
    take,
)
from tierkv_codecs.triton.language import jit, tl

__all__ = ["fit", "levels_in", "levels_out"]


def _transformed(x: tl.tensor, dim: tl.tensor, LOG: tl.constexpr) -> tl.tensor:
    """Walsh-Hadamard transform of the pieces of each row of ``x``, neighbours first."""
    lane = tl.arange(0, 1 << LOG)[None, :]
    if LOG <= 8:
        for k in range(LOG):  # not unrolled: one exchange is much code already
            half = 1 << k
            other = tl.gather(x, tl.broadcast_to(lane ^ half, x.shape), 1)
            both = tl.where((lane & half) != 0, other - x, x + other)
            x = tl.where((lane // (2 * half) + 1) * (2 * half) <= dim, both, x)
    else:  # an exchange grows with the square of the row's share of a lane
        for k in tl.static_range(LOG):
            half = 1 << k
            pair = tl.reshape(x, [x.shape[0], 1 << (LOG - 1 - k), 2, 1 << k])
            a, b = tl.split(tl.permute(pair, (0, 1, 3, 2)))
            both = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
            both = tl.reshape(both, [x.shape[0], 1 << LOG])
            x = tl.where((lane // (2 * half) + 1) * (2 * half) <= dim, both, x)
    return x


def _summed(x: tl.tensor, order: tl.tensor, LOG: tl.constexpr) -> tl.tensor:
    """Sums of rows, upper half to lower; ``order`` brings any length to halves of equal length."""
    x = tl.gather(x, tl.broadcast_to(order, x.shape), 1)
    for k in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, [x.shape[0], 2, 1 << (LOG - 1 - k)]), axis=1)
    return tl.reshape(x, [x.shape[0]])


transformed = jit(_transformed)
summed = jit(_summed)


def _turned(
    source: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    signs: tl.tensor,
    BF16: tl.constexpr,
    LOG: tl.constexpr,
) -> tl.tensor:
    """Rows as they are, and after signs and transform; the norm has grown by its root."""
    d = tl.arange(0, 1 << LOG)[None, :]
    where = (row // tokens).to(tl.int64) * s_head + (row % tokens).to(tl.int64) * s_token
    x = number(tl.load(source + where + d * s_dim, inside, 0), BF16)
    return x, transformed(x * tl.load(signs + d, d < dim, 0), dim, LOG)


turned = jit(_turned)


def _fit(
    base: tl.tensor,
    table: tl.tensor,
    step: tl.tensor,
    refused: tl.tensor,
    signs: tl.tensor,
    root: tl.tensor,
    order: tl.tensor,
    upper: tl.tensor,
    limit: tl.tensor,
    share: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    HEIGHTS: tl.constexpr,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """The scale of each row that fits its codes best: float32 ``[sections, rows]``.

    ``signs`` and ``root`` (what makes the rotation keep the norm) are float32 ``[dim]``, ``upper``
    float32 ``[2, HEIGHTS]``: from where on a level is the nearest, and the levels; ``share`` is
    ``1 / dim``. ``refused`` (int32 ``[sections]``) becomes 1 where a magnitude is not at most
    ``limit``.
    """
    section = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, 1 << LOG)[None, :]
    inside = (row < rows) & (d < dim)
    source = beginning(base, table, section, ALIGN)
    plain, x = turned(source, row, inside, tokens, dim, s_head, s_token, s_dim, signs, BF16, LOG)
    bad = inside & ((tl.abs(plain) <= limit) == 0)
    tl.store(refused + section, 1, mask=tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) > 0)
    x *= tl.load(root + d, d < dim, 0)
    lanes = tl.load(order + d)
    spread = square_root(summed(x * x, lanes, LOG) * share)
    place = tl.abs(x * reciprocal(spread)[:, None])
    level = tl.zeros(x.shape, tl.float32)
    for k in tl.static_range(HEIGHTS):
        level = tl.where(place >= tl.load(upper + k), tl.load(upper + HEIGHTS + k), level)
    level = tl.where(d < dim, level, 0.0)
    above = summed(tl.abs(x) * level, lanes, LOG)
    below = summed(level * level, lanes, LOG)
    none = spread == 0
    best = tl.where(none, 0.0, quotient(above, tl.where(none, 1.0, below)))
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(step + section.to(tl.int64) * rows + line, best, mask=line < rows)


def _levels_out(
    base: tl.tensor,
    table: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    signs: tl.tensor,
    root: tl.tensor,
    cuts: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    apart: tl.tensor,
    pitch: tl.tensor,
    CUTS: tl.constexpr,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """One area of packed codes of the nearest levels; see ``codes`` of the groups."""
    section = tl.program_id(1)
    line = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, 1 << LOG)[None, :]
    source = beginning(base, table, section, ALIGN)
    scale = tl.load(root + d, d < dim, 0)
    packed = tl.zeros([ROWS, 1 << LOG], tl.int32)
    for part in tl.static_range(8 // WIDTH):
        row = line + part * apart
        inside = (line < apart) & (row < rows) & (d < dim)
        _, x = turned(source, row, inside, tokens, dim, s_head, s_token, s_dim, signs, BF16, LOG)
        s = tl.load(inverse + section.to(tl.int64) * rows + row, (line < apart) & (row < rows), 0)
        x = (x * scale) * s
        code = tl.zeros(x.shape, tl.int32)
        for k in tl.static_range(CUTS):
            code += (x > tl.load(cuts + k)).to(tl.int32)
        field = (code >> SHIFT) & ((1 << WIDTH) - 1)
        packed |= tl.where(inside, field, 0) << (part * WIDTH)
    target = out + section.to(tl.int64) * pitch + line * dim + d
    tl.store(target, packed.to(tl.uint8), mask=(line < apart) & (d < dim))


def _levels_in(
    base: tl.tensor,
    table: tl.tensor,
    data: tl.tensor,
    step: tl.tensor,
    signs: tl.tensor,
    root: tl.tensor,
    levels: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    apart: tl.tensor,
    apart_2: tl.tensor,
    pitch: tl.tensor,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    ROWS: tl.constexpr,
    LOG: tl.constexpr,
) -> None:
    """Look codes up, scale, rotate back: every byte is read once, every number written once."""
    section = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, 1 << LOG)[None, :]
    inside = (row < rows) & (d < dim)
    codes = data + section.to(tl.int64) * pitch
    part = row // apart
    byte = tl.load(codes + (row - part * apart) * dim + d, inside, 0).to(tl.int32)
    code = (byte >> (part * WIDTH)) & ((1 << WIDTH) - 1)
    if WIDTH_2:
        part = row // apart_2
        byte = tl.load(codes + (apart + row - part * apart_2) * dim + d, inside, 0).to(tl.int32)
        code |= ((byte >> (part * WIDTH_2)) & ((1 << WIDTH_2) - 1)) << WIDTH
    s = tl.load(step + section.to(tl.int64) * rows + row, row < rows, 0)
    x = tl.load(levels + code) * (s * tl.load(root + d, d < dim, 0))
    x = transformed(x, dim, LOG) * tl.load(signs + d, d < dim, 0)
    target = beginning(base, table, section, ALIGN)
    where = (row // tokens).to(tl.int64) * s_head + (row % tokens).to(tl.int64) * s_token
    tl.store(target + where + d * s_dim, take(x, BF16, F16), mask=inside)


_VARYING = ["rows", "tokens", "apart", "apart_2"]


fit = jit(_fit, _VARYING)
levels_out = jit(_levels_out, _VARYING)
levels_in = jit(_levels_in, _VARYING)
