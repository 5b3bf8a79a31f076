"""The frame: its bytes are fixed for ever, and nothing damaged or foreign is ever accepted."""

from __future__ import annotations

import resource
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tierkv.blocks import BlockKey, Identity, PartId, part_id
from tierkv.device import fold
from tierkv.errors import ConfigError, IntegrityError
from tierkv.fitting import check_identity, check_layout
from tierkv.frame import (
    ALIGN,
    MAX_CHAIN_BYTES,
    MAX_FIDELITY_BYTES,
    MAX_TENANT_BYTES,
    PAGE,
    Header,
    Section,
    checksum,
    decode_header,
    encode_header,
    header_bytes,
    padded_bytes,
    page_round,
)
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec

SPACE = Space(Identity("model", "rev1"), Layout.uniform(3, 2, 8, "bfloat16"), block_tokens=16)
GOLDEN = Path(__file__).parent / "golden"


def make_header(
    space: Space = SPACE, tokens: int = 16, group: int = 0, chain: str = "raw", **changes: Any
) -> Header:
    """A consistent header; every section is stored with its raw length."""
    spec = space.layout.groups[group]
    offset = start = header_bytes(spec)
    sections, digests = [], []
    for layer in spec.layers:
        for t in layer.tensors:
            raw = spec.section_bytes(t, tokens)
            shape = spec.stored_shape(t, tokens)
            body = bytes(i * 37 % 251 for i in range(raw)).ljust(padded_bytes(raw), b"\0")
            sections.append(Section(layer.index, t.name, t.dtype, shape, chain, offset, raw, raw))
            digests.append(checksum(body))
            offset += padded_bytes(raw)
    fields: dict[str, Any] = {
        "part": part_id(BlockKey(bytes(range(32))), group),
        "space": space.fingerprint,
        "root": space.root("acme"),
        "parent": BlockKey(bytes(range(32, 64))),
        "generation": 7,
        "fidelity": "exact",
        "tokens": tokens,
        "block_tokens": space.block_tokens,
        "tenant": "acme",
        "expires": 1234.5,
        "frame_bytes": offset,
        "payload_offset": start,
        "sections": tuple(sections),
        "digests": tuple(digests),
        "per_token": spec.per_token,
    }
    return Header(**{**fields, **changes})


def make_frame(header: Header) -> bytearray:
    frame = bytearray(header.frame_bytes)
    encode_header(header, memoryview(frame))
    for s in header.sections:
        body = bytes(i * 37 % 251 for i in range(s.nbytes))
        frame[s.offset : s.offset + s.nbytes] = body
    return frame


def reseal(frame: bytearray) -> bytearray:
    """Give a changed header a checksum that matches, as a hostile writer would."""
    length = struct.unpack_from("<I", frame, 28)[0]
    end = length if PAGE <= length <= len(frame) else len(frame)
    frame[8:24] = checksum(memoryview(frame)[24:end])
    return frame


def test_golden_frame_stays_readable() -> None:
    frame = bytearray(zlib.decompress(bytes.fromhex((GOLDEN / "frame_v1.hex").read_text())))
    header = decode_header(frame)
    assert header == make_header(tokens=5)
    assert frame == make_frame(header), "the same header no longer gives the same bytes"
    for s, digest in zip(header.sections, header.digests, strict=True):
        assert checksum(frame[s.offset : s.end]) == digest


def test_golden_folded_frame_stays_readable() -> None:
    golden = (GOLDEN / "frame_v1_folded.hex").read_text()
    frame = bytearray(zlib.decompress(bytes.fromhex(golden)))
    header = decode_header(frame)
    assert header.folded
    assert frame == make_frame(header), "the same header no longer gives the same bytes"
    for s, digest in zip(header.sections, header.digests, strict=True):
        assert fold(memoryview(frame)[s.offset : s.end]) == digest
    plain = make_header(tokens=5)
    assert not plain.folded
    assert replace(header, folded=False, digests=plain.digests) == plain


def test_checksum_is_xxh3_128() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(memoryview(b"tierkv")) == checksum(b"tierkv")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parent": None},
        {"expires": None},
        {"expires": 0.0},
        {"fidelity": "derived:int8"},
        {"tenant": "Zoë \udc80 / 漢字"},
        {"generation": 2**64 - 1},
        {"folded": True},
    ],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    header = make_header(**changes)
    assert decode_header(make_frame(header)) == header


def test_states_and_odd_shapes_round_trip() -> None:
    state = Layer(
        0, (TensorSpec("conv", "float32", (3,)), TensorSpec("ssm", "bfloat16", (2, 3, 4, 5)))
    )
    scalar = Layer(1, (TensorSpec("step", "int64", ()),))
    empty = Layer(2, (TensorSpec("none", "uint8", (0, 4)),))
    space = Space(Identity("m", "r"), Layout((Group(GroupKind.STATE, (state, scalar, empty)),)), 8)
    header = make_header(space, tokens=8)
    found = decode_header(make_frame(header))
    assert found == header
    assert not found.per_token
    check_layout(found, space)


def test_sections_are_aligned_and_layer_by_layer() -> None:
    header = make_header()
    assert header.payload_offset % PAGE == 0
    assert all(s.offset % ALIGN == 0 for s in header.sections)
    assert [s.layer for s in header.sections] == [0, 0, 1, 1, 2, 2]


def test_header_room_does_not_depend_on_values() -> None:
    # the longest tenant, fidelity and as many different chains as there are sections must fit
    header = make_header(tenant="t" * MAX_TENANT_BYTES, fidelity="derived:" + "x" * 56)
    chains = [f"{i:x}" * MAX_CHAIN_BYTES for i in range(len(header.sections))]
    sections = tuple(s._replace(chain=c) for s, c in zip(header.sections, chains, strict=True))
    header = replace(header, sections=sections)
    assert decode_header(make_frame(header)) == header


def test_large_groups_have_room() -> None:
    layers = tuple(Layer.kv(i, 8, 128, "bfloat16") for i in range(128))
    group = Group(GroupKind.FULL, layers)
    space = Space(Identity("m", "r"), Layout((group,)), 1)
    header = make_header(space, tokens=1, tenant="t" * MAX_TENANT_BYTES)
    assert header.payload_offset == page_round(header_bytes(group)) > 4 * PAGE
    assert decode_header(make_frame(header)) == header


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tenant": "é" * MAX_TENANT_BYTES}, "tenant"),
        ({"fidelity": "derived:" + "x" * MAX_FIDELITY_BYTES}, "fidelity"),
    ],
)
def test_names_that_do_not_fit_are_named(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        make_frame(make_header(**changes))


def test_every_flipped_bit_of_the_header_is_seen() -> None:
    frame = make_frame(make_header())
    assert decode_header(frame) is decode_header(frame)  # remembered, and no less checked
    for at in range(4096):
        frame[at] ^= 1 << at % 8
        with pytest.raises(IntegrityError):
            decode_header(frame)
        frame[at] ^= 1 << at % 8
    decode_header(frame)


def test_i4_what_is_remembered_of_a_header_is_told_of_no_other() -> None:
    """Equal section tables, another identity: each frame says its own, however often."""
    key = BlockKey(bytes(range(1, 33)))
    headers = [
        make_header(),
        make_header(generation=9_999),
        make_header(part=part_id(key, 0)),
        make_header(root=SPACE.root("globex")),
        make_header(tenant="globex"),
        make_header(fidelity="derived:int8"),
        make_header(tokens=15),
        make_header(digests=(bytes(16), *make_header().digests[1:])),
    ]
    frames = [make_frame(header) for header in headers]
    for _ in range(2):
        assert [decode_header(frame) for frame in frames] == headers
    assert all(a != b for at, a in enumerate(headers) for b in headers[:at])


def test_every_cut_header_is_seen() -> None:
    header = make_header()
    frame = make_frame(header)
    for end in [*range(300), *range(300, header.payload_offset, 61), header.payload_offset - 1]:
        with pytest.raises(IntegrityError):
            decode_header(frame[:end])
    assert decode_header(frame[: header.payload_offset]) == header


# where a field stands in the prefix, and what a hostile writer could put there
FIELDS: dict[str, tuple[int, str, list[Any]]] = {
    "version": (24, "<H", [0, 2, 65535]),
    "flags": (26, "<H", [16, 0x8000]),
    "header length": (28, "<I", [0, 1, 4095, 8192, 2**31, 2**32 - 1]),
    "frame length": (32, "<Q", [0, 4095, 5000, 2**63, 2**64 - 1]),
    "tokens": (48, "<I", [17, 2**32 - 1]),
    "expiry": (56, "<d", [float("nan"), float("inf")]),
    "tenant length": (194, "<H", [65535, 4000]),
    "fidelity length": (196, "<H", [0, 65535]),
    "names": (198, "<H", [0, 1, 65535]),
    "name bytes": (200, "<H", [0, 1, 65535]),
    "sections": (202, "<I", [0, 1, 5, 7, 2**31, 2**32 - 1]),
    "dimensions": (206, "<I", [0, 17, 19, 2**31, 2**32 - 1]),
}


@pytest.mark.parametrize("name", FIELDS)
def test_d7_no_length_is_trusted(name: str) -> None:
    offset, code, values = FIELDS[name]
    for value in values:
        frame = make_frame(make_header())
        struct.pack_into(code, frame, offset, value)
        with pytest.raises(IntegrityError):
            decode_header(reseal(frame))


def _section_changes() -> dict[str, dict[str, Any]]:
    return {
        "offset in the header": {"offset": 0},
        "offset past the end": {"offset": 2**40},
        "unaligned": {"offset": header_bytes(SPACE.layout.groups[0]) + 1},
        "stored more than raw": {"nbytes": 2**62},
        "raw of another shape": {"raw_bytes": 1},
        "huge shape": {"shape": (2**32, 2**32, 2**32)},
        "unknown dtype": {"dtype": "complex64"},
        "raw but shorter": {"nbytes": 64},
    }


@pytest.mark.parametrize("what", _section_changes())
def test_d7_no_section_is_trusted(what: str) -> None:
    header = make_header()
    wrong = header.sections[0]._replace(**_section_changes()[what])
    frame = bytearray(header.frame_bytes)
    encode_header(replace(header, sections=(wrong, *header.sections[1:])), memoryview(frame))
    with pytest.raises(IntegrityError):
        decode_header(frame)


def test_d7_a_section_longer_than_its_tensor_is_refused() -> None:
    # everything else about it is consistent, so that only this rule can tell
    header = make_header()
    *rest, last = header.sections
    for more in (0, 1, ALIGN):
        longer = last._replace(chain="zstd", nbytes=last.raw_bytes + more)
        changed = replace(header, sections=(*rest, longer), frame_bytes=longer.end)
        frame = bytearray(changed.frame_bytes)
        encode_header(changed, memoryview(frame))
        if more == 0:
            assert decode_header(frame) == changed
        else:
            with pytest.raises(IntegrityError, match="raw"):
                decode_header(frame)


def test_overlaps_and_gaps_are_refused() -> None:
    header = make_header()
    first, second, *rest = header.sections
    for moved in (first.offset, second.offset + ALIGN, second.offset - ALIGN):
        frame = bytearray(header.frame_bytes)
        changed = (first, second._replace(offset=moved), *rest)
        encode_header(replace(header, sections=changed), memoryview(frame))
        with pytest.raises(IntegrityError):
            decode_header(frame)


def test_a_seal_in_the_room_for_encryption_is_refused() -> None:
    header = make_header()
    frame = make_frame(header)
    used = max(i for i in range(header.payload_offset) if frame[i])
    frame[used + 5] = 1
    with pytest.raises(IntegrityError, match="encrypted"):
        decode_header(reseal(frame))


@hypothesis.given(st.data())
def test_fuzzed_headers_are_refused_or_consistent(data: st.DataObject) -> None:
    frame = make_frame(make_header(tokens=3))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 700))
        piece = data.draw(st.binary(min_size=1, max_size=9))
        frame[at : at + len(piece)] = piece
    if data.draw(st.booleans()):
        reseal(frame)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        header = decode_header(frame)
    except IntegrityError:
        pass
    else:  # whatever was accepted describes exactly the bytes it came with
        assert header.sections[-1].end == header.frame_bytes
        assert all(s.nbytes <= s.raw_bytes for s in header.sections)
        again = bytearray(max(len(frame), header.payload_offset))
        encode_header(header, memoryview(again))
        assert decode_header(again) == header
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@hypothesis.given(st.binary(max_size=600))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode_header(data)
    with pytest.raises(IntegrityError):
        decode_header(reseal(bytearray(b"TIERKV\r\n" + data.ljust(PAGE, b"\1"))))


@pytest.mark.parametrize("field", ["part", "generation", "space", "root"])
def test_another_identity_is_named(field: str) -> None:
    header = make_header()
    wanted: dict[str, Any] = {
        "part": header.part,
        "generation": header.generation,
        "space": header.space,
        "root": header.root,
    }
    check_identity(header, **wanted)
    check_identity(header, **{**wanted, "generation": None})
    other: dict[str, Any] = {
        "part": PartId(bytes(34)),
        "generation": 8,
        "space": bytes(32),
        "root": BlockKey(bytes(32)),
    }
    with pytest.raises(IntegrityError, match=field):
        check_identity(header, **{**wanted, field: other[field]})


@pytest.mark.parametrize(
    "layout",
    [
        Layout.uniform(3, 2, 8, "float16"),
        Layout.uniform(3, 4, 4, "bfloat16"),
        Layout.uniform(2, 2, 8, "bfloat16"),
        Layout((Group(GroupKind.FULL, tuple(Layer.kv(i, 2, 8, "bfloat16") for i in (0, 2, 1))),)),
    ],
)
def test_another_layout_is_refused(layout: Layout) -> None:
    header = make_header()
    check_layout(header, SPACE)
    with pytest.raises(IntegrityError):
        check_layout(header, Space(SPACE.identity, layout, SPACE.block_tokens))


def test_another_block_size_group_or_header_length_is_refused() -> None:
    header = make_header()
    with pytest.raises(IntegrityError):
        check_layout(header, Space(SPACE.identity, SPACE.layout, 32))
    with pytest.raises(IntegrityError):
        check_layout(replace(header, part=part_id(BlockKey(bytes(32)), 1)), SPACE)
    with pytest.raises(IntegrityError):
        check_layout(replace(header, payload_offset=2 * PAGE), SPACE)


def test_this_module_needs_no_torch() -> None:
    import subprocess

    code = "import sys, tierkv.frame; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
