"""Loops of :mod:`tierkv_codecs.rans` for processors without AVX-512, its tables, and statistics.

The rules of :mod:`tierkv_codecs.loops` hold here too: no allocation, no exceptions, one result by
whatever way. Addresses that come out of data are compared with the ends before they are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "count_bytes",
    "count_planes",
    "decode_lanes",
    "encode_lanes",
    "encoding_tables",
    "share_slots",
    "slots_of_shares",
    "spread_places",
    "sum_of_terms",
]

_Array = Any
_LOW = np.uint32(255)
_BYTE = np.uint32(8)


def count_bytes(data: _Array, step: int, run: int, counts: _Array) -> None:
    """Add up how often each byte occurs in the first ``run`` of every ``step`` bytes.

    Args:
        data: uint8.
        step: Bytes from the begin of a run to the next.
        run: Bytes of a run; a multiple of 4, as ``step`` is.
        counts: uint32 ``[4, 256]`` of zeros; the sum over the first axis is the result. Equal
            bytes in a row do not wait for each other's increment.
    """
    one = np.uint32(1)
    end = data.size // 4 * 4
    for start in range(0, end, step):
        for i in range(start, min(start + run, end), 4):
            counts[0, data[i]] += one
            counts[1, data[i + 1]] += one
            counts[2, data[i + 2]] += one
            counts[3, data[i + 3]] += one


def count_planes(words: _Array, step: int, terms: _Array, sums: _Array, kinds: _Array) -> None:
    """How bytes are distributed over planes, for words of 1, 2, 4 and 8 bytes.

    Args:
        words: uint64, looked at from the first on at every ``step``-th.
        step: At least 1.
        terms: int64; of every number that can be counted.
        sums: int64 ``[15]``; the sum of the terms of a plane's counts. The plane of bytes comes
            first, then the two of 2-byte words, least significant first, and so on.
        kinds: int64 ``[15]``; how many bytes occur in the plane.
    """
    counts = np.zeros((15, 256), np.int64)
    one, top = np.uint64(1), np.uint64(63)
    for i in range(0, words.size, step):
        word = words[i]
        half = (word << one) & np.uint64(0xFFFFFFFEFFFFFFFE)
        half |= (word >> np.uint64(31)) & np.uint64(0x100000001)
        quarter = (word << one) & np.uint64(0xFFFEFFFEFFFEFFFE)
        quarter |= (word >> np.uint64(15)) & np.uint64(0x1000100010001)
        whole = (word << one) | (word >> top)
        for j in range(8):
            shift = np.uint64(8 * j)
            counts[0, (word >> shift) & np.uint64(255)] += 1
            counts[1 + j % 2, (quarter >> shift) & np.uint64(255)] += 1
            counts[3 + j % 4, (half >> shift) & np.uint64(255)] += 1
            counts[7 + j, (whole >> shift) & np.uint64(255)] += 1
    for plane in range(15):
        total, used = 0, 0
        for byte in range(256):
            total += terms[counts[plane, byte]]
            used += counts[plane, byte] > 0
        sums[plane] = total
        kinds[plane] = used


def sum_of_terms(data: _Array, terms: _Array) -> int:
    """The sum of the terms (int64) of how often each byte of ``data`` (uint8) occurs."""
    counts = np.zeros(256, np.int64)
    for i in range(data.size):
        counts[data[i]] += 1
    total = 0
    for byte in range(256):
        total += terms[counts[byte]]
    return total


def share_slots(counts: _Array, shares: _Array) -> int:
    """Share 256 slots out in proportion to counts; what is rare shares those of an escape.

    Rounding is Webster's (highest averages), with at least one slot for each symbol that has any.

    Args:
        counts: int64 ``[256]``; at least one is not 0.
        shares: int64 ``[256]`` of zeros; the escape's are at its place.

    Returns:
        The escape, a symbol that is rare, or does not occur.
    """
    total, kept, escape = 0, 0, -1
    for symbol in range(256):
        total += counts[symbol]
    rare, left = 0, 0
    for symbol in range(256):
        # a slot for what needs less than a fourth of one is dearer than escapes
        if counts[symbol] * 1024 < total or kept == 255:
            if escape < 0:
                escape = symbol
            rare += counts[symbol]
        else:
            kept += 1
            shares[symbol] = max(1, (counts[symbol] * 512 + total) // (2 * total))
            left += shares[symbol]
    shares[escape] = max(1, (rare * 512 + total) // (2 * total))
    left = 256 - left - shares[escape]
    while left != 0:
        best, count, share = -1, 0, 0
        for symbol in range(256):
            mine = shares[symbol]
            if mine == 0 or (left < 0 and mine == 1):
                continue
            one = rare if symbol == escape else counts[symbol]
            # the average with half a slot more, or less: the highest gains most, the lowest loses
            # least; compared as fractions
            here, there = one * (2 * share), count * (2 * mine)
            if left > 0:
                here, there = here + one, there + count
            else:
                here, there = here - one, there - count
            if best < 0 or (here > there if left > 0 else here < there):
                best, count, share = symbol, one, mine
        shares[best] += 1 if left > 0 else -1
        left += -1 if left > 0 else 1
    return escape


def encoding_tables(shares: _Array, escape: int, tables: _Array) -> None:
    """What :func:`encode_lanes` looks up.

    Args:
        shares: int64 ``[256]``.
        escape: The escape.
        tables: uint8 ``[6, 256]``.
    """
    by_slot = np.empty((3, 256), np.uint8)
    spread_places(shares, by_slot, tables[5])
    first, place = 0, 0
    for symbol in range(256):
        if symbol == escape:
            first = place
        place += shares[symbol]
    place = 0
    for symbol in range(256):
        escaped = shares[symbol] == 0 or symbol == escape
        share = shares[escape] if escaped else shares[symbol]
        inverse = min(65536 // share, 65535)
        tables[0, symbol] = share
        tables[1, symbol] = first if escaped else place
        tables[2, symbol] = inverse & 255
        tables[3, symbol] = inverse >> 8
        tables[4, symbol] = escaped
        place += shares[symbol]


def slots_of_shares(
    given: _Array, first: int, escape: int, share: int, by_slot: _Array, slots: _Array
) -> bool:
    """Undo the header of a piece; False if its shares are not 256 in all, or the escape has two.

    Args:
        given: uint8, the shares of the symbols from ``first`` on; 0 comes after 255.
        first: A symbol.
        escape: The escape.
        share: Its share.
        by_slot: As for :func:`spread_places`.
        slots: As for :func:`spread_places`.
    """
    shares = np.zeros(256, np.int64)
    total = share
    for i in range(given.size):
        symbol = (first + i) & 255
        shares[symbol] = given[i]
        total += shares[symbol]
    if total != 256 or share == 0 or shares[escape] != 0:
        return False
    shares[escape] = share
    spread_places(shares, by_slot, slots)
    return True


def spread_places(shares: _Array, by_slot: _Array, slots: _Array) -> None:
    """Deal the 256 slots out, each symbol's as evenly as can be.

    Args:
        shares: int64 ``[256]``, how many slots each symbol gets; 256 in all.
        by_slot: uint8 ``[3, 256]``: symbol, share and rank of each slot.
        slots: uint8 ``[256]``: the slot of each place, places being ordered by symbol and rank.
    """
    keys = np.empty(256, np.int64)
    starts = np.zeros(257, np.int64)
    place = 0
    for symbol in range(256):
        share = shares[symbol]
        for rank in range(share):
            keys[place] = ((2 * rank + 1) << 16) // share
            starts[(keys[place] >> 9) + 1] += 1
            place += 1
    for bucket in range(256):
        starts[bucket + 1] += starts[bucket]
    # sorted by keys, and where they are equal, by symbols: into buckets, each by insertion
    order = np.empty(256, np.int64)
    ends = starts.copy()
    for place in range(256):
        bucket = keys[place] >> 9
        at = ends[bucket]
        ends[bucket] += 1
        while at > starts[bucket] and keys[order[at - 1]] > keys[place]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = place
    for slot in range(256):
        slots[order[slot]] = slot
    place = 0
    for symbol in range(256):
        for rank in range(shares[symbol]):
            slot = slots[place]
            by_slot[0, slot] = symbol
            by_slot[1, slot] = shares[symbol]
            by_slot[2, slot] = rank
            place += 1


def decode_lanes(
    data: _Array, marks: _Array, by_slot: _Array, escape: int, steps: int, out: _Array
) -> bool:
    """Decode a piece; False if it is damaged.

    Args:
        data: uint8.
        marks: int64: begin and end of each stream and of the literals, in ``data``.
        by_slot: uint8 ``[3, 256]``.
        escape: The symbol that stands for the next literal.
        steps: Of 64 symbols a stream.
        out: uint8, ``steps * streams * 64``.
    """
    streams = (marks.size - 2) // 2
    states = np.empty((streams, 64), np.uint32)
    at = np.empty(streams, np.int64)
    for s in range(streams):
        begin = marks[2 * s]
        for i in range(64):
            low, high = data[begin + 2 * i], data[begin + 2 * i + 1]
            states[s, i] = np.uint32(low) | np.uint32(high) << _BYTE
        at[s] = begin + 128
    table = np.empty(256, np.uint32)
    for slot in range(256):
        wide = np.uint32(by_slot[1, slot]) << _BYTE | np.uint32(by_slot[0, slot])
        table[slot] = wide | np.uint32(by_slot[2, slot]) << np.uint32(16)
    literal, last = marks[2 * streams], marks[2 * streams + 1]
    place, top = 0, data.size - 1
    for _ in range(steps):
        for s in range(streams):
            now, lanes = at[s], states[s]
            for lane in range(64):
                x = lanes[lane]
                entry = table[x & _LOW]
                out[place + lane] = np.uint8(entry & _LOW)
                x = (entry >> _BYTE & _LOW) * (x >> _BYTE) + (entry >> np.uint32(16))
                low = x < np.uint32(256)
                filled = x << _BYTE | np.uint32(data[min(now, top)])
                now += low
                lanes[lane] = filled if low else x
            if now > marks[2 * s + 1]:
                return False
            at[s] = now
            place += 64
    for i in range(place):
        if out[i] == escape:
            if literal >= last:
                return False
            out[i] = data[literal]
            literal += 1
    whole = literal == last
    for s in range(streams):
        whole &= at[s] == marks[2 * s + 1]
        for lane in range(64):
            whole &= states[s, lane] == np.uint32(256)
    return bool(whole)


def encode_lanes(data: _Array, steps: int, tables: _Array, marks: _Array, out: _Array) -> None:
    """Encode a piece, backwards.

    Args:
        data: uint8, ``steps * streams * 64``.
        steps: Of 64 symbols a stream.
        tables: uint8 ``[6, 256]``; by symbol: share, first place, reciprocal of the share (low and
            high byte; not read here), not 0 if it is escaped; by place: slot.
        marks: int64: ends of the streams and of the literals in ``out``, replaced by their
            beginnings.
        out: uint8.
    """
    streams = marks.size - 1
    states = np.empty((streams, 64), np.uint32)
    states[:] = 256
    literal = marks[streams]
    for step in range(steps * streams - 1, -1, -1):
        s = step % streams
        at, lanes = marks[s], states[s]
        for lane in range(63, -1, -1):
            symbol = data[64 * step + lane]
            share = np.uint32(tables[0, symbol])
            x = lanes[lane]
            if x >> _BYTE >= share:
                at -= 1
                out[at] = np.uint8(x & _LOW)
                x = x >> _BYTE
            quotient = x // share
            place = np.uint32(tables[1, symbol]) + (x - quotient * share)
            lanes[lane] = quotient << _BYTE | np.uint32(tables[5, place])
        marks[s] = at
        for lane in range(63, -1, -1):
            symbol = data[64 * step + lane]
            if tables[4, symbol] != 0:
                literal -= 1
                out[literal] = symbol
    marks[streams] = literal
    for s in range(streams):
        at = marks[s] - 128
        for lane in range(64):
            out[at + 2 * lane] = np.uint8(states[s, lane] & _LOW)
            out[at + 2 * lane + 1] = np.uint8(states[s, lane] >> _BYTE)
        marks[s] = at
