"""Headers that are compared with, and copied from, one that passed every check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import kit
from tierkv.blocks import BlockKey, part_id
from tierkv.frame import Header, decode_header, encode_header
from tierkv.pipeline import Like, PartLabel, Pipeline, Stamp, likeness

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
