"""What conversions do to values: bounds, NaN, every bit pattern, what does not shrink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.compression_world import (
    AFTER_50,
    BLOCK,
    KINDS,
    LAYOUT,
    SPACE,
    chains,
    charges,
    near,
    realistic,
)
from tests.engine.rig import load, running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
Rule = tierkv.CompressionPolicy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
async def test_nan_and_inf_stay_lossless_and_are_counted(
    kind: str, value: float, tmp_path: Path
) -> None:
    ids = kit.tokens(6, seed=10)
    kv = realistic(LAYOUT, len(ids), seed=10)
    kv.layers[1]["v"][2, 3, 5] = value  # in block 0
    async with (
        running(kind, tmp_path, space=SPACE, compression=AFTER_50) as rig,
        rig.engine.session("a", fidelity="lossy") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert chains(session)[:3] == ["int8,raw", "int8", "raw"]
        assert rig.engine.runtime.behind.recoder.refused == 1
        page = rig.engine.metrics.scrape().decode()
        assert f'tierkv_recoding_refused_sections_total{{tier="{kind}"}} 1.0' in page
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        mine, theirs = kv.layers[1]["v"][:, :BLOCK], back.layers[1]["v"][:, :BLOCK]
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("dim", [1, 63, 80, 96, 112])
async def test_f023_f024_odd_heads_and_constant_channels(dim: int, tmp_path: Path) -> None:
    layout = tierkv.Layout.uniform(layers=1, heads=16, dim=dim, dtype="float16")
    space = tierkv.Space(tierkv.Identity("m", "rev1"), layout, block_tokens=BLOCK)
    ids = kit.tokens(5, seed=17)
    kv = realistic(layout, len(ids), seed=17)
    kv.layers[0]["k"][:, :, 0] = 300.0
    kv.layers[0]["v"][:] = -0.25
    async with running("host", tmp_path, space=space, compression=Rule("int8", sinks=1)) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(ids, kv.view)
            await session.flush()
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert torch.equal(back.layers[0]["v"], kv.layers[0]["v"])
            for tensor in back.layers[0].values():
                assert tensor.isfinite().all()
            assert near(kv, back, tokens, 1 / 127)
        await rig.at_rest()


async def test_f027_every_bf16_pattern_survives_a_lossless_conversion(tmp_path: Path) -> None:
    layout = tierkv.Layout.uniform(layers=1, heads=8, dim=256, dtype="bfloat16")
    space = tierkv.Space(tierkv.Identity("m", "rev1"), layout, block_tokens=BLOCK)
    ids = kit.tokens(5, seed=11)
    kv = realistic(layout, len(ids), seed=11)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(2, 8, BLOCK, 256)
    for name, half in zip(("k", "v"), patterns, strict=True):
        kv.layers[0][name].view(torch.int16)[:, :BLOCK] = half
    # runs of each pattern, which compress, in the second block
    kv.layers[0]["k"][:, BLOCK : 2 * BLOCK] = kv.layers[0]["k"][:, :1]
    async with (
        running("host", tmp_path, space=space, compression=Rule("planes", after_steps=1)) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        await session.flush()
        assert "planes" in str(chains(session)[1])
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)


@pytest.mark.parametrize("layout", sorted(kit.LAYOUTS))
@pytest.mark.parametrize("kind", KINDS)
async def test_every_layout_is_converted_or_left_and_loads(
    layout: str, kind: str, tmp_path: Path
) -> None:
    space = kit.space(layout)
    ids = kit.tokens(6, seed=12)
    kv = kit.Memory(space.layout, len(ids), seed=12)
    async with running(kind, tmp_path, space=space, compression=AFTER_50) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(ids, kv.view)
            await session.flush()
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            if layout == "state":  # a recurrent state stays lossless
                assert torch.equal(kv.states[1]["ssm"], back.states[1]["ssm"])
            first = 80 if layout == "sliding" else 0
            for number, tensors in kv.layers.items():
                for name, tensor in tensors.items():
                    mine = tensor[:, first:].float()
                    error = (mine - back.layers[number][name][:, first:].float()).abs().max()
                    assert error <= mine.abs().max() / 100
        await rig.at_rest()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_coarser_chain_later_goes_on_top_of_the_first(kind: str, tmp_path: Path) -> None:
    rules = [Rule("int4", after_steps=100), AFTER_50]
    ids = kit.tokens(8, seed=13)
    kv = realistic(LAYOUT, len(ids), seed=13)
    async with running(kind, tmp_path, space=SPACE, compression=rules) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(ids[:70], kv.view)
            await session.flush()
            assert chains(session)[0] == "int8"
            before = charges(rig)
            await session.store(ids, kv.view, start=64)
            await session.flush()
            assert chains(session) == ["int4", "int8", "int8", "int8"] + ["raw"] * 4
            assert min(charges(rig)) < min(before)
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert near(kv, back, tokens, 1 / 5)
        await rig.at_rest()


async def test_what_does_not_shrink_stays_and_is_not_tried_again(tmp_path: Path) -> None:
    ids = kit.tokens(6, seed=14)
    kv = kit.Memory(LAYOUT, len(ids))
    noise = torch.Generator().manual_seed(0)
    for tensors in kv.layers.values():
        for tensor in tensors.values():
            tensor.view(torch.int16).random_(generator=noise)
    async with running(
        "host", tmp_path, space=SPACE, compression=Rule("lz4", after_steps=1)
    ) as rig:
        recoder = rig.engine.runtime.behind.recoder
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            await session.flush()
            assert (recoder.kept, recoder.converted) == (5, 0)
            await session.store(ids, kv.view)
            await session.flush()
            assert recoder.kept == 5
            assert chains(session) == ["raw"] * 6
            tokens, back = await load(session, ids)
            assert tokens == len(ids)
            assert back.same(kv, tokens)
        await rig.at_rest()
