"""Kernels of the codecs with a minimum and a step a group (or a magnitude: ``fp8``).

They work on many sections (tensors of one shape, dtype and strides) at once: a table tells how far
each is from the first, in elements, and everything else is an array with a row for each section.
A row of a tensor is named by its number, ``head * tokens + token``. A group is ``size`` numbers
along the tokens of a head, channel by channel, or along a row; ``places`` is how many there are.

Grid: axis 0 walks through a section, axis 1 through the sections.
"""

from __future__ import annotations

from tierkv_codecs.triton.arithmetic import (
    beginning,
    e4m3,
    from_e4m3,
    nearest,
    number,
    positive_zero,
    take,
)
from tierkv_codecs.triton.language import jit, tl

__all__ = ["codes", "extremes_by_channel", "extremes_by_row", "values"]


def _extremes_by_channel(
    base: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    refused: tl.tensor,
    limit: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    size: tl.tensor,
    places: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECES: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Minimum and maximum of each group of a channel: float32 ``[sections, heads, places, dim]``.

    A group is ``PIECES`` times ``TOKENS`` long at most. ``refused`` (int32 ``[sections]``) becomes
    1 where a magnitude is not at most ``limit``.
    """
    section, blocks = tl.program_id(1), tl.cdiv(dim, DIM)
    which = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks) * DIM + tl.arange(0, DIM)
    head, place = which // places, which % places
    begin = place * size
    end = tl.minimum(begin + size, tokens)
    source = beginning(base, table, section, ALIGN) + head.to(tl.int64) * s_head
    least = tl.full([DIM], float("inf"), tl.float32)
    most = tl.full([DIM], float("-inf"), tl.float32)
    wrong = tl.zeros([DIM], tl.int32)
    for piece in range(PIECES):
        token = begin + piece * TOKENS + tl.arange(0, TOKENS)[:, None]
        inside = (token < end) & (d[None, :] < dim)
        x = number(
            tl.load(source + token.to(tl.int64) * s_token + d[None, :] * s_dim, inside, 0), BF16
        )
        # written so that NaN, which fails every comparison, is refused as well
        bad = inside & ((tl.abs(x) <= limit) == 0)
        wrong |= tl.max(bad.to(tl.int32), axis=0)
        least = tl.minimum(least, tl.min(tl.where(inside, x, float("inf")), axis=0))
        most = tl.maximum(most, tl.max(tl.where(inside, x, float("-inf")), axis=0))
    group = (section * (tl.num_programs(0) // blocks) + which) * dim + d
    tl.store(low + group, positive_zero(least), mask=d < dim)
    tl.store(high + group, positive_zero(most), mask=d < dim)
    tl.store(refused + section, 1, mask=tl.max(wrong, axis=0) > 0)


def _extremes_by_row(
    base: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    refused: tl.tensor,
    limit: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    size: tl.tensor,
    places: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """As :func:`_extremes_by_channel` for groups along rows: ``[sections, rows, places]``."""
    section = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place, j = tl.arange(0, PLACES)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    at = row[:, None, None]
    d = place * size + j
    inside = (at < rows) & (place < places) & (j < size) & (d < dim)
    source = beginning(base, table, section, ALIGN)
    where = (at // tokens).to(tl.int64) * s_head + (at % tokens).to(tl.int64) * s_token + d * s_dim
    x = number(tl.load(source + where, inside, 0), BF16)
    bad = inside & ((tl.abs(x) <= limit) == 0)
    wrong = tl.max(tl.max(tl.max(bad.to(tl.int32), axis=2), axis=1), axis=0)
    least = tl.min(tl.where(inside, x, float("inf")), axis=2)
    most = tl.max(tl.where(inside, x, float("-inf")), axis=2)
    place_ = tl.arange(0, PLACES)[None, :]
    group = (section * rows + row[:, None]) * places + place_
    there = (row[:, None] < rows) & (place_ < places)
    tl.store(low + group, positive_zero(least), mask=there)
    tl.store(high + group, positive_zero(most), mask=there)
    tl.store(refused + section, 1, mask=wrong > 0)


def _codes(
    base: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    size: tl.tensor,
    places: tl.tensor,
    groups: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    step: tl.tensor,
    pitch: tl.tensor,
    top: tl.tensor,
    BY_CHANNEL: tl.constexpr,
    FLOAT8: tl.constexpr,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """One area of packed codes (:mod:`tierkv_codecs.packing`): ``step`` rows of bytes.

    A byte holds ``8 // WIDTH`` fields, of rows that are ``step`` apart: the bits of the code from
    ``SHIFT`` on. Every byte is written once; the source is read once.
    """
    section, blocks = tl.program_id(1), tl.cdiv(dim, DIM)
    d = ((tl.program_id(0) % blocks) * DIM + tl.arange(0, DIM))[None, :]
    line = ((tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS))[:, None]
    source = beginning(base, table, section, ALIGN)
    first = section.to(tl.int64) * groups
    packed = tl.zeros([ROWS, DIM], tl.int32)
    for part in tl.static_range(8 // WIDTH):
        row = line + part * step
        inside = (line < step) & (row < rows) & (d < dim)
        head, token = row // tokens, row % tokens
        where = head.to(tl.int64) * s_head + token.to(tl.int64) * s_token + d * s_dim
        x = number(tl.load(source + where, inside, 0), BF16)
        group = (
            (head * places + token // size) * dim + d if BY_CHANNEL else row * places + d // size
        )
        s = tl.load(inverse + first + group, inside, 0)
        if FLOAT8:
            code = e4m3(x * s)
        else:
            code = nearest((x - tl.load(low + first + group, inside, 0)) * s, top)
        field = (code >> SHIFT) & ((1 << WIDTH) - 1)
        packed |= tl.where(inside, field, 0) << (part * WIDTH)
    target = out + section.to(tl.int64) * pitch + line * dim + d
    tl.store(target, packed.to(tl.uint8), mask=(line < step) & (d < dim))


def _values(
    base: tl.tensor,
    table: tl.tensor,
    data: tl.tensor,
    low: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    dim: tl.tensor,
    size: tl.tensor,
    places: tl.tensor,
    groups: tl.tensor,
    s_head: tl.tensor,
    s_token: tl.tensor,
    s_dim: tl.tensor,
    step: tl.tensor,
    step_2: tl.tensor,
    pitch: tl.tensor,
    BY_CHANNEL: tl.constexpr,
    FLOAT8: tl.constexpr,
    ALIGN: tl.constexpr,
    BF16: tl.constexpr,
    F16: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Numbers of packed codes: every byte is read once, every number written once.

    Codes of two fields (``WIDTH_2`` is not 0) have the second area behind the first.
    """
    section, blocks = tl.program_id(1), tl.cdiv(dim, DIM)
    d = ((tl.program_id(0) % blocks) * DIM + tl.arange(0, DIM))[None, :]
    row = ((tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = (row < rows) & (d < dim)
    head, token = row // tokens, row % tokens
    codes = data + section.to(tl.int64) * pitch
    part = row // step
    byte = tl.load(codes + (row - part * step) * dim + d, inside, 0).to(tl.int32)
    code = (byte >> (part * WIDTH)) & ((1 << WIDTH) - 1)
    if WIDTH_2:
        part = row // step_2
        byte = tl.load(codes + (step + row - part * step_2) * dim + d, inside, 0).to(tl.int32)
        code |= ((byte >> (part * WIDTH_2)) & ((1 << WIDTH_2) - 1)) << WIDTH
    first = section.to(tl.int64) * groups
    group = (head * places + token // size) * dim + d if BY_CHANNEL else row * places + d // size
    s = tl.load(scale + first + group, inside, 0)
    if FLOAT8:
        value = from_e4m3(code) * s
    else:
        value = code.to(tl.float32) * s + tl.load(low + first + group, inside, 0)
    target = beginning(base, table, section, ALIGN)
    where = head.to(tl.int64) * s_head + token.to(tl.int64) * s_token + d * s_dim
    tl.store(target + where, take(value, BF16, F16), mask=inside)


_VARYING = ["rows", "tokens", "places", "step", "step_2", "top"]


extremes_by_channel = jit(_extremes_by_channel, _VARYING)
extremes_by_row = jit(_extremes_by_row, _VARYING)
codes = jit(_codes, _VARYING)
values = jit(_values, _VARYING)
