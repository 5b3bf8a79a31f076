"""What each loop is tried on before it is used: small, and with an end that fills no register.

A loop is compiled for the kinds of arguments that its sample has, and for no others: inputs are
read-only here, since who may be read only may be written, too, but not the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierkv_codecs.levels import cuts, upper

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SAMPLES", "arguments", "mixed", "rare_ones"]

_Array = Any
_HEADS, _TOKENS, _DIM, _SIZE = 2, 5, 301, 3  # rows longer than four registers of bytes
_ROWS: Final = _HEADS * _TOKENS
_GROUPS: Final = _HEADS * -(-_TOKENS // _SIZE)  # of tokens
_WIDE: Final = 160  # numbers of a group of a row
_BY_ROW: Final = -(-_DIM // _WIDE)


def mixed(count: int, seed: int = 1) -> _Array:
    """Numbers that look like chance, and are always the same; uint32."""
    found = (np.arange(count, dtype=np.uint32) + np.uint32(seed)) * np.uint32(2654435761)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        found = (found ^ found >> np.uint32(15)) * np.uint32(factor)
    return found ^ found >> np.uint32(16)


def rare_ones(streams: int) -> _Array:
    """A plane of bytes that makes one piece of lanes with so many streams, of whole blocks.

    A few bytes are common, and any other one occurs.
    """
    found = mixed({1: 64 * 70, 2: 1 << 15}[streams])
    ones = sum((found >> np.uint32(bit)) & np.uint32(1) for bit in range(10, 18))
    return np.where(found % np.uint32(41) == 0, found >> np.uint32(24), ones + 118).astype(np.uint8)


def _bytes(*shape: int, seed: int = 1, below: int = 256) -> _Array:
    found = mixed(int(np.prod(shape)), seed) % np.uint32(below)
    return found.astype(np.uint8).reshape(shape)


def _halves(*shape: int, seed: int = 1) -> _Array:
    """bfloat16 as its bits, finite, of many sizes and both signs; uint16."""
    found = mixed(int(np.prod(shape)), seed)
    exponents = 118 + (found >> np.uint32(8)) % np.uint32(14)
    bits = exponents << np.uint32(7) | (found & np.uint32(127)) | (found & np.uint32(128)) << 8
    return np.where(found % 61 == 0, 0, bits).astype(np.uint16).reshape(shape)


def _floats(*shape: int, seed: int = 1) -> _Array:
    """Positive, up to 2; float32."""
    found = mixed(int(np.prod(shape)), seed).astype(np.float32) * np.float32(2.0**-31)
    return (found + np.float32(1e-3)).reshape(shape)


def _room(kind: str, *shape: int) -> _Array:
    return np.zeros(shape, kind)


def _read(array: _Array) -> _Array:
    array.flags.writeable = False
    return array


def _steps() -> _Array:
    return np.sort(_floats(256, seed=3))


def _shares() -> _Array:
    """256 slots: of 30 symbols, and of the escape, 200."""
    shares = np.zeros(256, np.int64)
    shares[100:130] = 1 + np.arange(30) % 9
    shares[200] = 256 - shares.sum()
    return shares


def _lanes(streams: int = 2, steps: int = 3) -> tuple[_Array, int, _Array, _Array, _Array]:
    """What :func:`tierkv_codecs.rans_loops.encode_lanes` takes."""
    from tierkv_codecs.rans_loops import encoding_tables

    shares, count = _shares(), 64 * streams * steps
    tables = np.empty((6, 256), np.uint8)
    encoding_tables(shares, 200, tables)
    usual = 100 + _bytes(count, below=30)
    plane = np.where(mixed(count, 5) % 31 == 0, _bytes(count, seed=9), usual).astype(np.uint8)
    each = 64 * steps + 128
    marks = np.array([each * (s + 1) for s in range(streams)] + [each * streams + count], np.int64)
    return _read(plane), steps, _read(tables), marks, _room("u1", int(marks[-1]))


def _coded() -> tuple[_Array, _Array, _Array, int, int, _Array]:
    """What :func:`tierkv_codecs.rans_loops.decode_lanes` takes."""
    from tierkv_codecs.rans_loops import encode_lanes, spread_places

    plane, steps, tables, ends, data = _lanes()
    begins = ends.copy()
    encode_lanes(plane, steps, tables, begins, data)
    by_slot, slots = np.empty((3, 256), np.uint8), np.empty(256, np.uint8)
    spread_places(_shares(), by_slot, slots)
    marks = np.stack([begins, ends], 1).reshape(-1)
    return _read(data), marks, by_slot, 200, steps, _room("u1", plane.size)


def _rotated(dim: int = 70) -> _Array:
    """Two tiles of rotated rows."""
    return (_floats(2, 16 * dim, seed=4) - np.float32(1)) * np.float32(3)


def _pieces() -> tuple[_Array, ...]:
    """Rows that are rotated in pieces of every kind of length."""
    sizes = np.array([512, 64, 32, 8, 2, 1])
    starts, dim = np.cumsum(sizes) - sizes, int(sizes.sum())
    sign = np.where(_bytes(dim, below=2) > 0, 1, -1).astype(np.float32).repeat(16)
    scale = np.repeat(sizes.astype(np.float32) ** np.float32(-0.5), sizes)
    work, found = _room("f4", 2, dim * 16), _room("f4", 1, dim * 16)
    return _read(_halves(5, dim)), scale, sign, starts, sizes, work, found


def _fields(bits: tuple[int, ...]) -> list[_Array]:
    """Areas of packed codes."""
    return [_read(_bytes(-(-_ROWS // (8 // width)), _DIM, seed=width)) for width in bits]


def _decoding(*areas: _Array, widths: Any, by_channel: bool) -> tuple[Any, ...]:
    shape = (_GROUPS, _DIM) if by_channel else (_ROWS, _BY_ROW)
    index, lows = _read(_bytes(*shape, seed=6)), _read(_halves(*shape, seed=7))
    size = (_TOKENS, _SIZE) if by_channel else (_WIDE,)
    return (*areas, widths, _steps(), index, lows, *size, _room("u2", _ROWS, _DIM))


def _finding(by_channel: bool) -> tuple[Any, ...]:
    shape = (_GROUPS, _DIM) if by_channel else (_ROWS, _BY_ROW)
    size = (_TOKENS, _SIZE) if by_channel else (_WIDE,)
    source, low = _read(_halves(_ROWS, _DIM)), _floats(*shape, seed=2) * np.float32(-30)
    inverse, top = _floats(*shape, seed=3) * np.float32(0.2), np.float32(15)
    return source, low, inverse, top, *size, _room("u1", _ROWS, _DIM)


def _extremes(by_channel: bool) -> tuple[Any, ...]:
    shape = (_GROUPS, _DIM) if by_channel else (_ROWS, _BY_ROW)
    size = (_TOKENS, _SIZE) if by_channel else (_WIDE,)
    source = _read(_halves(_ROWS, _DIM).view(np.int16))
    return source, *size, np.full(shape, 0x7FFF, "i2"), np.full(shape, -0x8000, "i2")


def _whole(by_channel: bool, codes: bool) -> tuple[Any, ...]:
    """What the loops of ``int8`` take, to encode or to decode."""
    groups, tokens = (_HEADS * _DIM, (_TOKENS,)) if by_channel else (_ROWS, ())
    limit = np.float32(1e38)
    if not codes:
        room = _room("u1", 4 * groups + _ROWS * _DIM)
        return _read(_halves(_ROWS, _DIM).view(np.int16)), *tokens, limit, room
    low, high = np.sort(_halves(2, groups) & 0x7FFF, 0)
    parts = [low.view(np.uint8), high.view(np.uint8), _bytes(_ROWS * _DIM)]
    return _read(np.concatenate(parts)), *tokens, _room("u2", _ROWS, _DIM)


def _eights(by_channel: bool) -> tuple[Any, ...]:
    codes = _bytes(_ROWS, _DIM)
    codes[codes & 127 == 127] = 3  # no NaN
    scale = _floats(_HEADS, _DIM) if by_channel else _floats(_ROWS)
    return _read(codes), scale, *((_TOKENS,) if by_channel else ()), _room("u2", _ROWS, _DIM)


def _centering(plane: _Array) -> tuple[Any, ...]:
    return _read(plane), 4, 24, _room("u1", -(-len(plane) // 4), plane.shape[1]), plane * 0


def _restoring() -> tuple[Any, ...]:
    rest, _, _, base, _ = _centering(_bytes(10, 301))
    return rest, 4, 24, _read(_bytes(*base.shape, seed=2)), _room("u1", 10, 301)


def _terms() -> _Array:
    return np.arange(4097, dtype=np.int64) ** 2


SAMPLES: Final[dict[str, Callable[..., tuple[Any, ...]]]] = {
    "bounds": lambda: (_floats(301) * (_bytes(301, below=3) > 0),),
    "bytes_by_channel": lambda: _whole(by_channel=True, codes=True),
    "bytes_by_row": lambda: _whole(by_channel=False, codes=True),
    "centered": lambda: _centering(_bytes(10, 301)),
    "codes_by_channel": lambda: _finding(by_channel=True),
    "codes_by_row": lambda: _finding(by_channel=False),
    "count_bytes": lambda: (_read(_bytes(1030)), 512, 256, _room("u4", 4, 256)),
    "count_planes": lambda: (
        _read(_bytes(8 * 70, below=40).view(np.uint64)),
        *(3, _terms(), _room("i8", 15), _room("i8", 15)),
    ),
    "decode_lanes": _coded,
    "distances": lambda: (_read(_bytes(700)), np.array([24, 32, 96]), _room("i8", 3)),
    "encode_lanes": _lanes,
    "encoding_tables": lambda: (_shares(), 200, _room("u1", 6, 256)),
    "extremes_by_channel": lambda: _extremes(by_channel=True),
    "extremes_by_row": lambda: _extremes(by_channel=False),
    "field_by_channel": lambda: _decoding(*_fields((2,)), widths=2, by_channel=True),
    "field_by_row": lambda: _decoding(*_fields((4,)), widths=4, by_channel=False),
    "fit_rows": lambda bits: (_rotated(), np.float32(1 / 70), *upper(bits), _room("f4", 32)),
    "floats8_by_channel": lambda: _eights(by_channel=True),
    "floats8_by_row": lambda: _eights(by_channel=False),
    "merge2": lambda: (_read(_bytes(301)), _read(_bytes(301, seed=2)), _room("u2", 301)),
    "nearest_levels": lambda bits: (*(_rotated(), _floats(27), cuts(bits), _room("u1", 27, 70)),),
    "pack_field": lambda: (_read(_bytes(_ROWS, _DIM)), 2, 2, _room("u1", 4, _DIM)),
    "places": lambda: (
        _floats(301, seed=8) * (_bytes(301, below=9) > 0),
        *(np.sort(_floats(255)), _room("u1", 301)),
    ),
    "restored": _restoring,
    "rotate_rows": _pieces,
    "share_slots": lambda: (np.bincount(_lanes()[0], minlength=256), _room("i8", 256)),
    "slots_of_shares": lambda: (
        *(_read(_shares()[100:130].astype(np.uint8)), 100, 200, int(_shares()[200])),
        *(_room("u1", 3, 256), _room("u1", 256)),
    ),
    "split2": lambda: (_read(_halves(301)), _room("u1", 301), _room("u1", 301)),
    "spread_places": lambda: (_shares(), _room("u1", 3, 256), _room("u1", 256)),
    "sum_of_terms": lambda: (_read(_bytes(1030)), _terms()),
    "to_bytes_by_channel": lambda: _whole(by_channel=True, codes=False),
    "to_bytes_by_row": lambda: _whole(by_channel=False, codes=False),
    "two_fields_by_channel": lambda: _decoding(*_fields((4, 2)), widths=(4, 2), by_channel=True),
    "two_fields_by_row": lambda: _decoding(*_fields((2, 1)), widths=(2, 1), by_channel=False),
}
"""What makes the arguments of each loop, new ones every time. Of loops that are compiled for a
number of levels, it takes the bits."""


def arguments(name: str, *variant: int) -> tuple[Any, ...]:
    """Arguments of the loop called ``name``, to write to at will."""
    return SAMPLES[name](*variant)
