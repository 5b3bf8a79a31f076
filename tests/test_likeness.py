"""Headers that are compared with, and copied from, one that passed every check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import kit
from tierkv.blocks import BlockKey, part_id
from tierkv.errors import IntegrityError
from tierkv.fitting import plainly_fits
from tierkv.frame import MAX_TENANT_BYTES, Header, decode_header, encode_header
from tierkv.pipeline import Like, PartLabel, Pipeline, Stamp, likeness, open_frame

SPACE = kit.space()
ROOT = SPACE.root("tenant")
KEYS = st.binary(min_size=32, max_size=32).map(BlockKey)
DIGESTS = len(Pipeline(SPACE).table(0, SPACE.block_tokens))


def header_of(
    key: BlockKey = BlockKey(b"k" * 32),  # noqa: B008 - a constant
    parent: BlockKey | None = None,
    generation: int = 1,
    tenant: str = "tenant",
    expires: float | None = None,
    fill: bytes = b"d",
) -> Header:
    label = PartLabel(
        part=part_id(key, 0),
        generation=generation,
        root=ROOT,
        parent=parent,
        fidelity="exact",
        tokens=SPACE.block_tokens,
        tenant=tenant,
        expires=expires,
    )
    return Pipeline(SPACE).header(label, [fill * 16] * DIGESTS, folded=False)


def frame_of(header: Header) -> bytearray:
    frame = bytearray(header.frame_bytes)
    encode_header(header, memoryview(frame))
    return frame


def like_of(header: Header) -> Like:
    like = likeness(header, memoryview(frame_of(header)))
    assert like is not None
    return like


@given(
    first=st.none() | KEYS,
    ours=KEYS,
    parent=st.none() | KEYS,
    generation=st.integers(1, 2**64 - 1),
    tenant=st.sampled_from(["", "tenant", "t" * 256]),
    expires=st.none() | st.floats(0, 1e12),
    fill=st.binary(min_size=1, max_size=1),
)
def test_a_stamp_writes_what_encoding_writes(
    first: BlockKey | None,
    ours: BlockKey,
    parent: BlockKey | None,
    generation: int,
    tenant: str,
    expires: float | None,
    fill: bytes,
) -> None:
    stamp = Stamp(header_of(parent=first, tenant=tenant, expires=expires))
    wanted = header_of(ours, parent, generation, tenant, expires, fill)
    out = bytearray(wanted.payload_offset)
    for _ in range(2):  # what it wrote before leaves nothing behind
        stamp.write(memoryview(out), wanted.part, parent, generation, wanted.digests)
        assert out == frame_of(wanted)[: wanted.payload_offset]
    assert decode_header(frame_of(wanted)) == wanted


@given(ours=KEYS, parent=st.none() | KEYS, generation=st.integers(1, 2**64 - 1))
def test_frames_of_one_kind_are_alike(
    ours: BlockKey, parent: BlockKey | None, generation: int
) -> None:
    like = like_of(header_of(expires=1.0))
    header = header_of(ours, parent, generation)
    frame = memoryview(frame_of(header))
    assert like.has(frame, header.part, generation)
    assert not like.has(frame, header.part, generation ^ 1)
    assert not like.has(frame, part_id(ours, 1), generation)
    assert not like.has(frame[:-1], header.part, generation), "the payload would be cut off"
    spot = like.spots[0, "k"]
    section = next(s for s in header.sections if (s.layer, s.tensor) == (0, "k"))
    assert (spot.offset, spot.shape) == (section.offset, section.shape)


def test_a_tenant_named_like_the_checksums_does_not_pass_for_them() -> None:
    fill = b"d"
    name = (fill * 16 * DIGESTS).decode()
    assert len(name) <= MAX_TENANT_BYTES
    first = header_of(tenant=name, fill=fill)
    wanted = header_of(BlockKey(b"o" * 32), None, 2, name, None, b"e")
    out = bytearray(wanted.payload_offset)
    Stamp(first).write(memoryview(out), wanted.part, None, 2, wanted.digests)
    assert out == frame_of(wanted)[: wanted.payload_offset]
    frame, like = frame_of(first), like_of(first)
    assert like.has(memoryview(frame_of(wanted)), wanted.part, 2)
    table = bytes(frame).rindex(fill * 16 * DIGESTS)
    frame[table - 1] ^= 1
    assert not like.has(memoryview(frame), first.part, 1), "the section table is not compared"


def test_every_byte_that_says_what_is_where_is_compared() -> None:
    header = header_of(parent=BlockKey(b"p" * 32))
    frame, like = frame_of(header), like_of(header)
    digests = bytes(frame).index(header.digests[0])
    parent, expiry, sum_of_it = range(162, 194), range(56, 64), range(8, 24)
    for at in range(digests):
        if at in parent or at in expiry or at in sum_of_it:
            continue
        for bit in range(8):
            if at == 26 and bit < 2:
                continue  # whether there is a parent, and an expiry
            frame[at] ^= 1 << bit
            assert not like.has(memoryview(frame), header.part, 1), f"byte {at}, bit {bit}"
            frame[at] ^= 1 << bit
    assert like.has(memoryview(frame), header.part, 1)


@pytest.mark.parametrize(
    "changed",
    [
        replace(header_of(), folded=True),
        replace(header_of(), tokens=SPACE.block_tokens - 1),
        replace(
            header_of(),
            sections=tuple(s._replace(chain="zstd") for s in header_of().sections),
        ),
    ],
    ids=["folded", "partial", "coded"],
)
def test_others_are_read_one_by_one(changed: Header) -> None:
    assert likeness(changed, memoryview(frame_of(header_of()))) is None
    assert likeness(header_of(), memoryview(bytes(frame_of(header_of())))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"part": part_id(BlockKey(b"o" * 32), 0)},
        {"generation": 2},
        {"root": BlockKey(b"r" * 32)},
        {"space": b"s" * 32},
        {"tokens": SPACE.block_tokens - 1},
        {"block_tokens": SPACE.block_tokens + 1},
        {"per_token": False},
    ],
    ids=lambda changes: str(*changes),
)
def test_one_that_was_found_to_fit_lets_no_other_through(changes: dict[str, Any]) -> None:
    due = header_of()
    who = due.part, due.generation, ROOT
    for _ in range(2):
        found = open_frame(memoryview(frame_of(due)), SPACE, *who)
        assert found == due
    assert plainly_fits(found, SPACE, *who), "the short way"
    other = decode_header(frame_of(replace(due, **changes)))
    assert other.sections is found.sections
    assert not plainly_fits(other, SPACE, *who)
    with pytest.raises(IntegrityError):
        open_frame(memoryview(frame_of(other)), SPACE, *who)
