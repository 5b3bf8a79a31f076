"""Round trips from view to frame to view: every kind of layout, dtype, memory order, chain."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tierkv import views
from tierkv.blocks import Identity
from tierkv.chains import parse_chain
from tierkv.layout import DTYPE_BYTES, Group, GroupKind, Layer, Layout, Space
from tierkv.pipeline import Pipeline
from tierkv.sections import deliver
from tierkv.testing.codecs import same_bits, sample
from tierkv.testing.parts import (
    BLOCK,
    MIXED,
    memory_for,
    mixed_space,
    new_frame,
    one_layer,
    opened,
    read,
)

CHAINS = ["raw", "lz4", "zstd", "int8", "int8+lz4", "int8+zstd"]
LOSSLESS = ["raw", "lz4", "zstd"]


# ------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("group", range(4))
def test_every_group_kind_comes_back(chain: str, group: int) -> None:
    space = mixed_space()
    source, target = (
        memory_for(MIXED, 3 * BLOCK, 1),
        memory_for(MIXED, 3 * BLOCK, None),
    )
    frame, encoded, label = new_frame(Pipeline(space, chain), source, BLOCK, group=group)
    deliver(opened(frame, space, label), frame, target, BLOCK)
    wanted, found = (read(v, MIXED, group, BLOCK, BLOCK) for v in (source, target))
    for key, value in wanted.items():
        if encoded.lossless:
            assert same_bits(value, found[key]), key
        else:
            codec = parse_chain("int8").packer
            assert codec is not None
            bound = codec.error_bound(value, key[1])
            assert bool(((found[key].double() - value.double()).abs() <= bound).all()), key
    if MIXED.groups[group].per_token:
        for rest in (0, 2 * BLOCK):
            others = read(target, MIXED, group, rest, BLOCK).values()
            assert not any(bool(t.any()) for t in others), "wrote outside its block"


@pytest.mark.parametrize("chain", CHAINS)
def test_f015_a_partial_block_holds_only_its_tokens(chain: str) -> None:
    space = mixed_space()
    source, target = memory_for(MIXED, BLOCK, 1), memory_for(MIXED, BLOCK, None)
    frame, encoded, label = new_frame(Pipeline(space, chain), source, tokens=5)
    header = opened(frame, space, label)
    assert header.tokens == 5
    assert encoded.raw_bytes == MIXED.groups[0].raw_bytes(5)
    deliver(header, frame, target, 0)
    assert all(not bool(t.any()) for t in read(target, MIXED, 0, 5, BLOCK - 5).values())
    assert all(bool(t.any()) for t in read(target, MIXED, 0, 0, 5).values())


@pytest.mark.parametrize("chain", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_f027_f034_every_dtype_bit_for_bit(chain: str, dtype: str) -> None:
    # 65,536 patterns where two bytes have as many, all 256 where one byte has
    space = one_layer(dtype, heads=4, dim=256, block_tokens=64)
    kind: torch.dtype = getattr(torch, dtype)
    if dtype == "bool":
        k = torch.arange(65_536).view(4, 64, 256) % 3 == 0
    else:
        words = torch.arange(65_536 * DTYPE_BYTES[dtype] // 2, dtype=torch.int32).to(torch.int16)
        k = words.view(torch.uint8).view(kind).view(4, 64, 256)
    v = k.flip(0)
    frame, _, label = new_frame(Pipeline(space, chain), views.dense([(k, v)]))
    target = (torch.zeros_like(k), torch.zeros_like(v))
    deliver(opened(frame, space, label), frame, views.dense([target]), 0)
    assert same_bits(target[0], k)
    assert same_bits(target[1], v)


def _strided(kind: str) -> torch.Tensor:
    whole = sample("bfloat16", (16, 40, 40), 5)
    return {
        "transposed": whole[:BLOCK, :2, :32].transpose(0, 1),
        "every second channel": whole[:2, :BLOCK, :].repeat(1, 1, 2)[..., ::2][..., :32],
        "every second token": whole[:2, : 2 * BLOCK : 2, :32],
        "offset": whole[3:5, 5 : 5 + BLOCK, 7:39],
        "expanded": whole[:1, :BLOCK, :32].expand(2, -1, -1),
        "fortran": whole[:2, :BLOCK, :32].permute(2, 1, 0).contiguous().permute(2, 1, 0),
    }[kind]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(
    "kind",
    ["transposed", "every second channel", "every second token", "offset", "expanded", "fortran"],
)
def test_f026_logical_values_travel(chain: str, kind: str) -> None:
    space = one_layer("bfloat16")
    k = _strided(kind)
    straight = new_frame(Pipeline(space, chain), views.dense([(k.contiguous(), k.contiguous())]))
    frame, _, label = new_frame(Pipeline(space, chain), views.dense([(k, k)]))
    assert frame == straight[0], "memory order reached the bytes"
    room = torch.zeros(32, 2 * BLOCK, 2, dtype=torch.bfloat16)
    into = room.permute(2, 1, 0)[:, ::2]
    deliver(opened(frame, space, label), frame, views.dense([(into, into)]), 0)
    if chain in LOSSLESS:
        assert same_bits(into, k)
    into.zero_()
    assert not bool(room.any()), "wrote between the tokens"


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("page", [1, 4, 16, 48])
def test_paged_and_dense_frames_are_the_same(chain: str, order: str, page: int) -> None:
    space = one_layer("float16")
    pages = torch.randperm(48 // page, generator=torch.Generator().manual_seed(1)).tolist()
    k = sample("float16", (2, 48, 32), 3)
    pool = torch.zeros(len(pages) + 1, 2, page, 32, dtype=torch.float16)
    for index, number in enumerate(pages):
        pool[number] = k[:, index * page : (index + 1) * page]
    pool = pool if order == "HND" else pool.transpose(1, 2).contiguous()
    paged = views.paged([(pool, pool)], pages, order=order)  # type: ignore[arg-type]
    frame, _, label = new_frame(Pipeline(space, chain), paged, BLOCK)
    assert frame == new_frame(Pipeline(space, chain), views.dense([(k, k)]), BLOCK)[0]
    kept = pool.clone()
    pool.zero_()
    deliver(opened(frame, space, label), frame, paged, BLOCK)
    pieces = paged.pieces(0, "k", BLOCK, 2 * BLOCK)
    if chain in LOSSLESS:
        assert same_bits(torch.cat([p for _, p in pieces], 1), k[:, BLOCK : 2 * BLOCK])
    for _, piece in pieces:
        piece.zero_()
    assert not bool(pool.any()), "wrote outside its tokens"
    assert bool(kept.any())


@hypothesis.given(st.data())
def test_any_layout_comes_back(data: st.DataObject) -> None:
    dtypes = st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "bool"])
    sizes = st.integers(0, 5)
    layers = tuple(
        Layer.kv(i, data.draw(sizes), data.draw(sizes), data.draw(dtypes), data.draw(sizes))
        for i in range(data.draw(st.integers(1, 3)))
    )
    block = data.draw(st.integers(1, 9))
    tokens = data.draw(st.integers(0, block))
    start = data.draw(st.integers(0, 4))
    layout = Layout((Group(GroupKind.FULL, layers),))
    space = Space(Identity("m", "r"), layout, block)
    source, target = memory_for(layout, start + block, 7), memory_for(layout, start + block, None)
    pipeline = Pipeline(space, data.draw(st.sampled_from(CHAINS)))
    frame, encoded, label = new_frame(pipeline, source, start, tokens=tokens)
    assert encoded.nbytes <= pipeline.max_bytes(0, tokens)
    deliver(opened(frame, space, label), frame, target, start)
    wanted, found = (read(v, layout, 0, start, tokens) for v in (source, target))
    if encoded.lossless:
        assert all(same_bits(wanted[key], found[key]) for key in wanted)


def test_f014_frames_share_nothing_with_the_caller() -> None:
    space = one_layer("bfloat16")
    k = sample("bfloat16", (2, BLOCK, 32))
    kept = k.clone()
    frame, _, label = new_frame(Pipeline(space), views.dense([(k, k)]))
    k.zero_()
    target = torch.empty_like(kept)
    deliver(opened(frame, space, label), frame, views.dense([(target, target)]), 0)
    target.add_(1)
    again = torch.empty_like(kept)
    deliver(opened(frame, space, label), frame.toreadonly(), views.dense([(again, again)]), 0)
    assert same_bits(again, kept)
