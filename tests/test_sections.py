"""Sections: what comes back from a frame is what went in, or nothing comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tierkv.blocks import BlockKey, Identity, part_id
from tierkv.errors import CodecError, IntegrityError, LayoutError
from tierkv.frame import Header, checksum, encode_header, padded_bytes
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.pipeline import PartLabel, Pipeline
from tierkv.sections import deliver, digests, layer_range, open_frame, verify
from tierkv.testing.parts import (
    BLOCK,
    MIXED,
    label_for,
    memory_for,
    mixed_space,
    new_frame,
    one_layer,
    opened,
    read,
)

CHAINS = ["raw", "lz4", "zstd", "int8", "int8+lz4", "int8+zstd"]
LOSSLESS = ["raw", "lz4", "zstd"]


# ------------------------------------------------------------------------- damage


@pytest.mark.parametrize("chain", CHAINS)
def test_f037_every_997th_bit(chain: str) -> None:
    space = one_layer("bfloat16")
    frame, _, label = new_frame(Pipeline(space, chain), memory_for(space.layout, BLOCK, 1))
    for bit in range(0, 8 * len(frame), 997):
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            opened(frame, space, label)
        frame[bit // 8] ^= 1 << bit % 8
    opened(frame, space, label)


def folded(frame: memoryview, header: Header) -> Header:
    """Give the frame the checksums of a device."""
    pieces = [frame[s.offset : s.end] for s in header.sections]
    changed = replace(header, digests=tuple(digests(pieces, folded=True)), folded=True)
    encode_header(changed, memoryview(frame))
    return changed


@pytest.mark.parametrize("chain", ["raw", "zstd"])
def test_folded_frames_are_verified_as_well(chain: str) -> None:
    space = one_layer("bfloat16")
    frame, _, label = new_frame(Pipeline(space, chain), memory_for(space.layout, BLOCK, 1))
    plain = opened(frame, space, label)
    header = folded(frame, plain)
    assert opened(frame, space, label) == header
    for section in header.sections:
        for at in (section.offset, section.end - 1):
            frame[at] ^= 1
            with pytest.raises(IntegrityError, match=f"layer {section.layer}"):
                verify(header, memoryview(frame))
            low = section.offset
            with pytest.raises(IntegrityError):  # a range of the frame alone
                verify(header, memoryview(frame)[low:], {section.layer}, base=low)
            frame[at] ^= 1
    # the kind is part of the header: sums of one kind are no sums of the other
    for wrong in (replace(header, folded=False), replace(plain, folded=True)):
        with pytest.raises(IntegrityError):
            verify(wrong, memoryview(frame))


def test_padding_between_sections_is_checked_too() -> None:
    space = one_layer("float32", heads=1, dim=1)
    frame, _, label = new_frame(Pipeline(space), memory_for(space.layout, 3, 1), tokens=3)
    header = opened(frame, space, label)
    first = header.sections[0]
    frame[first.offset + first.nbytes] ^= 1
    with pytest.raises(IntegrityError, match="layer 0"):
        verify(header, frame)


def test_a_cut_frame_is_seen() -> None:
    space = one_layer("bfloat16")
    frame, _, label = new_frame(Pipeline(space), memory_for(space.layout, BLOCK, 1))
    header = opened(frame, space, label)
    for end in (len(frame) - 1, header.sections[1].offset, header.payload_offset):
        with pytest.raises(IntegrityError):
            verify(header, frame[:end])
    target = memory_for(space.layout, BLOCK, None)
    with pytest.raises(IntegrityError):
        deliver(header, frame[: header.sections[1].offset], target, 0)
    assert not any(bool(t.any()) for t in read(target, space.layout, 0, 0, BLOCK).values())


def test_f013_a_frame_of_another_space_is_refused() -> None:
    space = one_layer("bfloat16", heads=2, dim=32)
    frame, _, label = new_frame(Pipeline(space), memory_for(space.layout, BLOCK, 1))
    packed = (TensorSpec("k", "bfloat16", (2, 32), "packed"), TensorSpec("v", "bfloat16", (2, 32)))
    twin = Layout((Group(GroupKind.FULL, (Layer(0, packed),)),))
    spaces = (Space(space.identity, twin, BLOCK), Space(Identity("m", "r2"), space.layout, BLOCK))
    for other in spaces:
        with pytest.raises(IntegrityError, match="space"):
            open_frame(frame, other, label.part, label.generation, label.root)
    with pytest.raises(IntegrityError, match="generation"):
        open_frame(frame, space, label.part, label.generation + 1, label.root)
    with pytest.raises(IntegrityError, match="root"):
        open_frame(frame, space, label.part, None, space.root("other tenant"))


def _with_payload(space: Space, label: PartLabel, payload: bytes, chain: str) -> memoryview:
    """A frame whose header and checksums are right and whose first section is ``payload``."""
    frame, _, _ = new_frame(Pipeline(space), memory_for(space.layout, BLOCK, 1))
    header = opened(frame, space, label)
    first, second = header.sections
    end = first.offset + padded_bytes(len(payload))
    out = memoryview(bytearray(end + padded_bytes(second.nbytes)))
    out[first.offset : first.offset + len(payload)] = payload
    out[end : end + second.nbytes] = frame[second.offset : second.offset + second.nbytes]
    one = first._replace(chain=chain, nbytes=len(payload))
    two = second._replace(offset=end)
    sums = (checksum(out[first.offset : end]), header.digests[1])
    encode_header(replace(header, frame_bytes=len(out), sections=(one, two), digests=sums), out)
    return out


@pytest.mark.parametrize(
    ("chain", "payload"),
    [
        ("zstd", bytes.fromhex("28b52ffde06c06060663636363")),
        ("zstd", b""),
        ("zstd", b"\0" * 40),
        ("lz4", b"\xff" * 40),
        ("int8", b"\0" * 40),
        ("int8+zstd", bytes.fromhex("28b52ffde06c06060663636363")),
        ("snappy", b"\0" * 40),
        ("zstd+int8", b"\0" * 40),
        ("", b"\0" * 40),
    ],
)
def test_f035_f036_sections_that_cannot_be_decoded_leave_the_view_alone(
    chain: str, payload: bytes
) -> None:
    space = one_layer("bfloat16")
    label = label_for(space)
    frame = _with_payload(space, label, payload, chain)
    header = opened(frame, space, label)
    target = memory_for(space.layout, BLOCK, None)
    with pytest.raises(CodecError):
        deliver(header, frame, target, 0)
    found = read(target, space.layout, 0, 0, BLOCK)
    assert not any(bool(t.any()) for t in found.values()), "the good section was written"
    other = Pipeline(space, "raw" if chain == "lz4" else "lz4")
    with pytest.raises(CodecError):
        other.transcode(header, frame, memoryview(bytearray(1 << 16)))


# ------------------------------------------------------------------------- layers and ranges


@pytest.mark.parametrize("chain", CHAINS)
def test_layers_can_be_read_by_range(chain: str) -> None:
    space = mixed_space()
    source, target = memory_for(MIXED, BLOCK, 1), memory_for(MIXED, BLOCK, None)
    frame, _, label = new_frame(Pipeline(space, chain), source)
    header = open_frame(frame[: 4096 * 2], space, label.part, label.generation, label.root)
    low, high = layer_range(header, 3)
    piece = memoryview(bytearray(frame[low:high]))
    verify(header, piece, {3}, low)
    deliver(header, piece, target, 0, {3}, low)
    found = read(target, MIXED, 0, 0, BLOCK)
    assert bool(found[3, "k"].any())
    assert not bool(found[0, "k"].any()), "another layer was written"
    with pytest.raises(IntegrityError):
        verify(header, piece, {0}, low)
    piece[-1] ^= 1
    with pytest.raises(IntegrityError, match="layer 3"):
        verify(header, piece, {3}, low)
    with pytest.raises(LayoutError):
        layer_range(header, 99)


def test_ranges_of_layers_cover_the_payload() -> None:
    space = mixed_space()
    frame, _, label = new_frame(Pipeline(space, "zstd"), memory_for(MIXED, BLOCK, 1))
    header = opened(frame, space, label)
    ranges = [layer_range(header, layer.index) for layer in MIXED.groups[0].layers]
    assert ranges[0][0] == header.payload_offset
    assert ranges[0][1] == ranges[1][0]
    assert ranges[1][1] == header.frame_bytes == len(frame)


# ------------------------------------------------------------------------- threads, processes


def test_f053_threads_share_pipelines() -> None:
    space = mixed_space()
    pipelines = [Pipeline(space, chain) for chain in CHAINS]
    memory = [memory_for(MIXED, BLOCK, seed) for seed in range(4)]
    expected = [[new_frame(p, m)[0] for m in memory] for p in pipelines]

    def work(index: int) -> bool:
        chain, seed = index % len(CHAINS), index % 4
        frame, _, label = new_frame(pipelines[chain], memory[seed])
        target = memory_for(MIXED, BLOCK, None)
        deliver(opened(frame, space, label), frame, target, 0)
        return frame == expected[chain][seed]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(240)))


def test_f034_a_fresh_process_reads_what_was_written(tmp_path: Any) -> None:
    space = mixed_space()
    for chain in CHAINS:
        for group in range(4):
            view = memory_for(MIXED, BLOCK, 6)
            frame, _, _ = new_frame(Pipeline(space, chain), view, group=group)
            (tmp_path / f"{chain}-{group}").write_bytes(frame)
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('writer', {__file__!r})\n"
        "w = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(w)\n"
        "space = w.mixed_space()\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    group = int(path.name[-1])\n"
        "    frame = memoryview(path.read_bytes())\n"
        "    header = w.opened(frame, space, w.label_for(space, group=group))\n"
        "    w.deliver(header, frame, w.memory_for(w.MIXED, w.BLOCK, None), 0)\n"
        "    print(path.name)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == len(CHAINS) * 4


def test_keys_of_other_blocks_are_refused() -> None:
    space = one_layer("bfloat16")
    frame, _, label = new_frame(Pipeline(space), memory_for(space.layout, BLOCK, 1))
    with pytest.raises(IntegrityError, match="part"):
        open_frame(frame, space, part_id(BlockKey(bytes(32)), 0), None, label.root)
