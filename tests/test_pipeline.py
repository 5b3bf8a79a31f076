"""The pipeline: what is stored for a view, and what for another frame."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierkv import views
from tierkv.abc import View
from tierkv.blocks import Identity
from tierkv.chains import parse_chain
from tierkv.device.bits import copy_move
from tierkv.errors import CapacityError, ConfigError, LayoutError
from tierkv.layout import Layout, Space
from tierkv.pipeline import Encoded, Pipeline
from tierkv.sections import deliver, digests
from tierkv.testing.codecs import same_bits, sample
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

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAINS = ["raw", "lz4", "zstd", "int8", "int8+lz4", "int8+zstd"]
LOSSLESS = ["raw", "lz4", "zstd"]


# ------------------------------------------------------------------------- what is stored


def test_label_travels() -> None:
    space = one_layer("float32")
    label: dict[str, Any] = {
        "fidelity": "derived:int8",
        "expires": 5.5,
        "parent": None,
        "generation": 2**40,
    }
    view = memory_for(space.layout, BLOCK, 1)
    frame, _, named = new_frame(Pipeline(space), view, tokens=3, **label)
    header = opened(frame, space, named)
    for field in (
        "part",
        "generation",
        "root",
        "parent",
        "fidelity",
        "tokens",
        "tenant",
        "expires",
    ):
        assert getattr(header, field) == getattr(named, field)
    assert header.space == space.fingerprint
    assert header.block_tokens == BLOCK


def test_raw_frames_have_a_fixed_size_and_nothing_pays_less() -> None:
    space = mixed_space()
    view = memory_for(MIXED, BLOCK, 1)
    for chain in CHAINS:
        pipeline = Pipeline(space, chain)
        for group in range(4):
            for tokens in (0, 1, 7, BLOCK):
                encoded = new_frame(pipeline, view, group=group, tokens=tokens)[1]
                bound = pipeline.max_bytes(group, tokens)
                assert encoded.nbytes <= bound == Pipeline(space).fixed_bytes(group, tokens)
                if chain == "raw":
                    assert encoded.nbytes == bound
                else:
                    assert pipeline.fixed_bytes(group, tokens) is None


def test_stored_raw_when_it_does_not_pay() -> None:
    space = one_layer("bfloat16")
    noise = torch.randint(0, 256, (2, BLOCK, 64), dtype=torch.uint8).view(torch.bfloat16)
    frame, encoded, label = new_frame(Pipeline(space, "lz4"), views.dense([(noise, noise)]))
    assert {s.chain for s in opened(frame, space, label).sections} == {"raw"}
    assert encoded.nbytes == Pipeline(space).max_bytes(0)
    assert encoded.fallbacks == 0
    zeros = torch.zeros_like(noise)
    frame, encoded, label = new_frame(Pipeline(space, "lz4"), views.dense([(zeros, zeros)]))
    assert {s.chain for s in opened(frame, space, label).sections} == {"lz4"}
    assert encoded.nbytes < Pipeline(space).max_bytes(0) / 1.2


@pytest.mark.parametrize("chain", ["int8", "int8+zstd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_i4_values_that_int8_refuses_are_kept_exactly(chain: str, bad: float) -> None:
    space = one_layer("bfloat16")
    k, v = (
        sample("bfloat16", (2, BLOCK, 32), 1),
        sample("bfloat16", (2, BLOCK, 32), 2),
    )
    v[1, 3, 5] = bad
    frame, encoded, label = new_frame(Pipeline(space, chain), views.dense([(k, v)]))
    assert encoded.fallbacks == 1
    assert not encoded.lossless
    stored = {s.tensor: s.chain for s in opened(frame, space, label).sections}
    assert stored["k"].startswith("int8")
    assert stored["v"] in ("raw", "zstd")
    into = (torch.zeros_like(k), torch.zeros_like(v))
    deliver(opened(frame, space, label), frame, views.dense([into]), 0)
    assert same_bits(into[1], v)


def test_lossless_says_what_happened_not_what_was_asked() -> None:
    whole = mixed_space()
    state = new_frame(Pipeline(whole, "int8"), memory_for(MIXED, BLOCK, 1), group=3)[1]
    assert state.lossless, "recurrent states stay lossless"
    integers = one_layer("int8")
    assert new_frame(Pipeline(integers, "int8"), memory_for(integers.layout, BLOCK, 1))[1].lossless
    floats = one_layer("bfloat16")
    pipeline = Pipeline(floats, "int8")
    assert not pipeline.lossless
    assert not new_frame(pipeline, memory_for(floats.layout, BLOCK, 1))[1].lossless


@pytest.mark.parametrize("chain", ["int8", "int8+zstd", "zstd"])
def test_compressed_frames_are_smaller(chain: str) -> None:
    space = Space(Identity("m", "r"), Layout.uniform(2, 4, 128, "bfloat16"), 64)
    view = memory_for(space.layout, 64, 3)
    encoded = new_frame(Pipeline(space, chain), view)[1]
    assert encoded.raw_bytes / encoded.nbytes > (1.2 if chain == "zstd" else 1.7)


def test_nothing_of_a_recycled_buffer_stays_in_a_frame() -> None:
    # what was there may be another tenant's; headers, paddings and payloads must all be written
    space = mixed_space()
    for chain in CHAINS:
        pipeline = Pipeline(space, chain)
        for group in range(4):
            label = label_for(space, group=group, tokens=3)
            frames = []
            for fill in (b"\0", b"\xdb"):
                out = memoryview(bytearray(fill * pipeline.max_bytes(group, 3)))
                done = pipeline.encode(label, memory_for(MIXED, BLOCK, 4), 0, out)
                frames.append(bytes(out[: done.nbytes]))
            assert frames[0] == frames[1], (chain, group)


def test_frames_are_deterministic() -> None:
    space = mixed_space()
    for chain in CHAINS:
        one, two = (new_frame(Pipeline(space, chain), memory_for(MIXED, BLOCK, 4))[0] for _ in "ab")
        assert one == two


# ------------------------------------------------------------------------- transcoding


@pytest.mark.parametrize("source", CHAINS)
@pytest.mark.parametrize("target", CHAINS)
def test_transcoding_equals_encoding_or_keeps_the_loss(source: str, target: str) -> None:
    space = mixed_space()
    view = memory_for(MIXED, BLOCK, 1)
    frame, first, label = new_frame(Pipeline(space, source), view)
    header = opened(frame, space, label)
    pipeline = Pipeline(space, target)
    out = memoryview(bytearray(b"\xdb" * pipeline.max_bytes(0)))
    second = pipeline.transcode(header, frame, out)
    found = opened(out[: second.nbytes], space, label)
    assert found.generation == label.generation
    if source in LOSSLESS:
        straight = new_frame(pipeline, view)
        assert out[: second.nbytes] == straight[0]
        assert second == straight[1]
        return
    assert not first.lossless
    assert not second.lossless, "a lossy section passes for lossless"
    assert all(s.chain.startswith("int8") for s in found.sections)
    one, two = memory_for(MIXED, BLOCK, None), memory_for(MIXED, BLOCK, None)
    deliver(header, frame, one, 0)
    deliver(found, out, two, 0)
    left, right = (read(v, MIXED, 0, 0, BLOCK) for v in (one, two))
    assert all(same_bits(left[key], right[key]) for key in left), "lost more on the way"


def test_transcoding_counts_refusals() -> None:
    space = one_layer("float32")
    k = sample("float32", (2, BLOCK, 32))
    k[0, 0, 0] = float("nan")
    frame, _, label = new_frame(Pipeline(space), views.dense([(k, k)]))
    pipeline = Pipeline(space, "int8")
    out = memoryview(bytearray(pipeline.max_bytes(0)))
    done = pipeline.transcode(opened(frame, space, label), frame, out)
    assert done == Encoded(pipeline.max_bytes(0), 2 * k.numel() * 4, True, 2)


# ------------------------------------------------------------------------- refusals


def test_views_that_do_not_fit_are_refused_and_untouched() -> None:
    space = one_layer("bfloat16")
    good = sample("bfloat16", (2, BLOCK, 32))
    frame, _, label = new_frame(Pipeline(space), views.dense([(good, good)]))
    header = opened(frame, space, label)
    for wrong in (
        good[:1],
        good[..., :31],
        good.half(),
        good.view(torch.int16),
        good[:, : BLOCK - 1],
    ):
        with pytest.raises(LayoutError):
            new_frame(Pipeline(space), views.dense([(good, wrong)]))
        first = torch.zeros_like(good)
        with pytest.raises(LayoutError):
            deliver(header, frame, views.dense([(first, wrong.clone())]), 0)
        assert not bool(first.any()), "written before the view was checked"


def test_f017_an_expanded_view_is_refused_and_the_others_untouched() -> None:
    space = one_layer("float32")
    good = sample("float32", (2, BLOCK, 32))
    frame, _, label = new_frame(Pipeline(space), views.dense([(good, good[:1].expand_as(good))]))
    header = opened(frame, space, label)
    first, second = torch.zeros_like(good), torch.zeros_like(good[:1]).expand_as(good)
    with pytest.raises(LayoutError, match="share memory"):
        deliver(header, frame, views.dense([(first, second)]), 0)
    assert not bool(first.any())


class _Lying(View):
    def __init__(self, given: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.given = given

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        return self.given


@pytest.mark.parametrize("cuts", [[(0, 8)], [(0, 8), (9, 16)], [(0, 8), (4, 12)], [], [(0, 20)]])
def test_views_that_lie_are_refused(cuts: list[tuple[int, int]]) -> None:
    space = one_layer("bfloat16")
    k = sample("bfloat16", (2, 32, 32))
    with pytest.raises(LayoutError):
        new_frame(Pipeline(space), _Lying([(a, k[:, a:b]) for a, b in cuts]))


def test_buffers_that_are_too_small_are_refused() -> None:
    space = one_layer("bfloat16")
    for chain in CHAINS:
        pipeline = Pipeline(space, chain)
        out = memoryview(bytearray(pipeline.max_bytes(0) - 1))
        with pytest.raises(CapacityError):
            pipeline.encode(label_for(space), memory_for(space.layout, BLOCK, 1), 0, out)


def test_parts_that_do_not_exist_are_refused() -> None:
    space = one_layer("bfloat16")
    with pytest.raises(LayoutError, match="group 1"):
        Pipeline(space).max_bytes(1)
    with pytest.raises(LayoutError, match="17"):
        Pipeline(space).max_bytes(0, BLOCK + 1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("raw", "raw"),
        ("zstd", "zstd"),
        ("raw+zstd", "zstd"),
        (" int8 + zstd ", "int8+zstd"),
        ("int8", "int8"),
    ],
)
def test_chains_have_one_name(text: str, name: str) -> None:
    assert parse_chain(text).name == name
    assert Pipeline(one_layer("bfloat16"), text).chain == name


@pytest.mark.parametrize(
    "text",
    ["", "+", "zstd+", "zstdd", "zstd+int8", "raw+int8", "zstd+lz4", "zstd+zstd", "zstd,lz4"],
)
def test_chains_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"zstd|chain"):
        parse_chain(text)


def test_importing_loads_no_torch() -> None:
    core = [f"tierkv.{name}" for name in ("pipeline", "sections", "chains")]
    codecs = [f"tierkv_codecs.{name}" for name in ("raw", "lz4", "zstd", "int8")]
    code = f"import sys, {', '.join(core + codecs)}; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


# ------------------------------------------------------------------------- in three steps


def _by_moves(pipeline: Pipeline, view: View, group: int, tokens: int, **how: Any) -> bytes:
    """A frame whose raw sections were copied one by one, as a device does it."""
    label = label_for(pipeline.space, group=group, tokens=tokens)
    raw = memoryview(bytearray(b"\xdb" * pipeline.max_bytes(group, tokens)))
    target = torch.frombuffer(raw, dtype=torch.uint8)
    every = pipeline.moves(label, view, 0, target)
    layers = [layer.index for layer in pipeline.space.layout.groups[group].layers]
    moves = [m for layer in layers for m in pipeline.moves(label, view, 0, target, layer)]
    assert [m.target.data_ptr() for m in moves] == [m.target.data_ptr() for m in every]
    for move in moves:
        copy_move(move)
    if pipeline.chain == "raw":
        done = pipeline.seal(label, raw, **how)
        return bytes(raw[: done.nbytes])
    out = memoryview(bytearray(b"\xdb" * pipeline.max_bytes(group, tokens)))
    done = pipeline.encode_gathered(label, raw, out, **how)
    return bytes(out[: done.nbytes])


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_gathered_elsewhere_makes_the_same_frame(chain: str, folded: bool) -> None:
    space = mixed_space()
    pipeline = Pipeline(space, chain)
    for group in range(4):
        for tokens in (0, 5, BLOCK):
            view = memory_for(MIXED, BLOCK, 4)
            label = label_for(space, group=group, tokens=tokens)
            out = memoryview(bytearray(b"\xdb" * pipeline.max_bytes(group, tokens)))
            done = pipeline.encode(label, view, 0, out, folded=folded)
            frame = out[: done.nbytes]
            assert _by_moves(pipeline, view, group, tokens, folded=folded) == bytes(frame)
            assert opened(frame, space, label).folded is folded


def test_a_header_can_be_made_from_checksums_alone() -> None:
    space = mixed_space()
    pipeline = Pipeline(space)
    for group in range(4):
        frame, _, label = new_frame(pipeline, memory_for(MIXED, BLOCK, 4), group=group)
        header = opened(frame, space, label)
        assert pipeline.header(label, header.digests, folded=False) == header
        spans = pipeline.spans(label)
        assert [(low, high) for low, _, high in spans] == [
            (s.offset, s.end) for s in header.sections
        ]
        assert [end - low for low, end, _ in spans] == [s.nbytes for s in header.sections]


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1023])
@pytest.mark.parametrize("kind", ["contiguous", "strided", "pages"])
def test_sections_longer_than_a_tile_are_whole(kind: str, tokens: int) -> None:
    space = Space(Identity("m", "r"), Layout.uniform(1, 1, 513, "int16"), 1023)
    shape = (1, 1023, 513)
    k, v = (torch.randint(-(2**15), 2**15, shape, dtype=torch.int16) for _ in "kv")
    if kind == "contiguous":
        view: View = views.dense([(k, v)])
    elif kind == "strided":
        wide = [torch.stack((t, t), dim=-1)[..., 0] for t in (k, v)]
        view = views.dense([(wide[0], wide[1])])
    else:
        pages = [t.reshape(1, 33, 31, 513).transpose(0, 1).contiguous() for t in (k, v)]
        view = views.paged([(pages[0], pages[1])], range(33))
    frame, _, label = new_frame(Pipeline(space), view, tokens=tokens)
    header = opened(frame, space, label)
    pieces = [frame[s.offset : s.end] for s in header.sections]
    assert tuple(digests(pieces, folded=False)) == header.digests
    into = (torch.zeros_like(k), torch.zeros_like(v))
    deliver(header, frame, views.dense([into]), 0)
    assert torch.equal(into[0][:, :tokens], k[:, :tokens])
    assert torch.equal(into[1][:, :tokens], v[:, :tokens])
    assert not bool(into[0][:, tokens:].any())


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_moves_out_of_pages_are_one_a_page(order: Any) -> None:
    space = Space(Identity("m", "r"), Layout.uniform(2, 2, 8, "bfloat16"), BLOCK)
    page = BLOCK // 4
    shape = (9, 2, page, 8) if order == "HND" else (9, page, 2, 8)
    pools = [
        (sample("bfloat16", shape, 2 * i), sample("bfloat16", shape, 2 * i + 1)) for i in range(2)
    ]
    view = views.paged(pools, [7, 2, 5, 0], order=order)
    pipeline = Pipeline(space)
    frame, _, label = new_frame(pipeline, view)
    target = torch.zeros(pipeline.max_bytes(0), dtype=torch.uint8)
    assert len(pipeline.moves(label, view, 0, target)) == 4 * 4
    assert _by_moves(pipeline, view, 0, BLOCK) == bytes(frame)
