"""A real model answers from the store what it answers from its own in-memory cache."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

import tierkv
from tierkv_adapters.hf import attach

if TYPE_CHECKING:
    from pathlib import Path

    from tests.identity.conftest import Lab
    from tierkv_adapters.hf import AsyncHandle, GenerateResult
    from tierkv_adapters.hf.demo.reference import Memory

pytestmark = [pytest.mark.anyio, pytest.mark.model]

BLOCK = 64


def host(capacity: int | str = "256MiB", codec: str | None = None) -> tierkv.Tier:
    return tierkv.Tier("host", capacity, codec=codec)


def nvme(path: Path, codec: str | None = None) -> tierkv.Tier:
    return tierkv.Tier("nvme", "512MiB", path=str(path), codec=codec)


def on(model: str, other: str) -> pytest.MarkDecorator:
    """On this model, and as a stress test on the other one."""
    labs = [model, pytest.param(other, marks=pytest.mark.stress)]
    return pytest.mark.parametrize("lab", labs, indirect=True)


def _each_pair() -> list[object]:
    """All of them; those without which every two still meet somewhere are stress tests."""
    found: list[object] = []
    for number, lab in enumerate(("smollm2", "gemma3")):
        for tier, kind in enumerate(("host", "nvme")):
            for codec, chain in enumerate(("raw", "lz4", "zstd")):
                needed = (number + tier + (codec == 2)) % 2 == 0
                marks = () if needed else pytest.mark.stress
                found.append(pytest.param(lab, kind, chain, marks=marks))
    return found


@pytest.mark.parametrize(("lab", "kind", "chain"), _each_pair(), indirect=["lab"])
async def test_each_codec_through_each_tier(
    lab: Lab, told: tuple[Memory, list[int]], kind: str, chain: str, tmp_path: Path
) -> None:
    memory, output = copy.copy(told[0]), told[1]
    tier = host(codec=chain) if kind == "host" else nvme(tmp_path, chain)
    async with tierkv.open(tiers=[tier]) as engine:
        with attach(lab.model, engine) as kv:
            first = await lab.ask(kv, lab.prompt(140), session="chat")
            assert first.reused_tokens == 0
            assert first.output_ids == output

            more = [*first.output_ids, *lab.words(20, seed=1)]
            second = await lab.ask(kv, more, session="chat")
            lab.check(second, memory, reused=2 * BLOCK, tier=kind)
            assert kv.status().restores_failed == 0


@on("gemma3", "smollm2")
async def test_eviction_in_between(
    lab: Lab, told: tuple[Memory, list[int]], tmp_path: Path
) -> None:
    memory = copy.copy(told[0])
    async with tierkv.open(tiers=[host(4 * lab.block_bytes), nvme(tmp_path)]) as engine:
        with attach(lab.model, engine) as kv:
            await lab.ask(kv, lab.prompt(140), session="a")
            await engine.flush()
            await lab.ask(kv, lab.prompt(200, seed=7), session="b")
            await engine.flush()

            back = await lab.ask(kv, [*lab.prompt(140), *lab.words(9, seed=3)], session="a")

    assert back.by_tier.get("nvme", 0) >= BLOCK, "nothing had left memory"
    lab.check(back, memory, reused=2 * BLOCK)


@on("smollm2", "gemma3")
async def test_eviction_for_good(lab: Lab, told: tuple[Memory, list[int]]) -> None:
    memory, output = copy.copy(told[0]), told[1]
    async with tierkv.open(tiers=[host(4 * lab.block_bytes)]) as engine:
        with attach(lab.model, engine) as kv:
            await lab.ask(kv, lab.prompt(140), session="a")
            await lab.ask(kv, lab.prompt(200, seed=7), session="b")

            back = await lab.ask(kv, lab.prompt(140), session="a")

    # whatever is left of it, from the front: the rest is computed
    assert back.reused_tokens < 2 * BLOCK
    if back.reused_tokens:
        lab.check(back, memory, reused=back.reused_tokens)
    assert back.output_ids == output


@on("gemma3", "smollm2")
async def test_restart_in_between(lab: Lab, told: tuple[Memory, list[int]], tmp_path: Path) -> None:
    memory = copy.copy(told[0])
    tiers = [host(), nvme(tmp_path)]
    async with tierkv.open(tiers=tiers) as engine:
        with attach(lab.model, engine) as kv:
            first = await lab.ask(kv, lab.prompt(140), session="chat")
        assert (await engine.flush()).missing == 0

    async with tierkv.open(tiers=tiers) as engine:
        with attach(lab.model, engine) as kv:
            more = [*first.output_ids, *lab.words(12, seed=4)]
            lab.check(await lab.ask(kv, more, session="chat"), memory, reused=128, tier="nvme")
            again = await lab.ask(kv, more, session="chat")
            lab.check(again, memory, reused=128, tier="host")


@on("gemma3", "smollm2")
async def test_eight_sessions_at_once_share_a_prefix(
    lab: Lab, told: tuple[Memory, list[int]], tmp_path: Path
) -> None:
    answers: dict[int, GenerateResult] = {}

    async def one(kv: AsyncHandle, number: int) -> None:
        ids = [*lab.prompt(140), *lab.words(8 + number, seed=number)]
        answers[number] = await lab.ask(kv, ids, session=f"s{number}")

    async with tierkv.open(tiers=[host(), nvme(tmp_path)]) as engine:
        with attach(lab.model, engine) as kv:
            await lab.ask(kv, lab.prompt(140), session="first")
            stored = kv.status().blocks_stored
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(one, kv, number)
            assert stored == 2
            assert kv.status().blocks_stored == stored, "a shared block was stored twice"
        assert engine.stats().leases == 0

    for answer in answers.values():
        lab.check(answer, copy.copy(told[0]), reused=2 * BLOCK, tier="host")
    suffixes = {tuple(answer.output_ids[140:]) for answer in answers.values()}
    assert len(suffixes) == 8


async def test_f010_tenants_and_salts_share_nothing(smollm2: Lab, tmp_path: Path) -> None:
    lab, ids = smollm2, smollm2.prompt(140)
    async with tierkv.open(tiers=[host(), nvme(tmp_path)]) as engine:
        with attach(lab.model, engine) as kv:
            await lab.ask(kv, ids, session="chat", tenant="acme")
            await engine.flush()

            other = await lab.ask(kv, ids, session="chat", tenant="bolt")
            salted = await lab.ask(kv, ids, session="salted", tenant="acme", salt=b"x")
            own = await lab.ask(kv, ids, session="chat", tenant="acme")

    assert (other.reused_tokens, salted.reused_tokens) == (0, 0)
    assert own.reused_tokens == 2 * BLOCK
    assert own.output_ids == other.output_ids == salted.output_ids


async def test_f006_other_weights_share_nothing(smollm2: Lab, tmp_path: Path) -> None:
    lab, ids = smollm2, smollm2.prompt(140)
    weight = lab.model.model.layers[3].self_attn.k_proj.weight
    before = weight.detach().clone()
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(weight.shape[0], 2, generator=generator)
    rank = torch.randn(2, weight.shape[1], generator=generator)
    async with tierkv.open(tiers=[host(), nvme(tmp_path)]) as engine:
        with attach(lab.model, engine) as kv:
            plain = await lab.ask(kv, ids, session="chat")
            await engine.flush()
            try:
                with torch.no_grad():
                    weight += 0.05 * (low @ rank)  # what merging a LoRA of rank 2 does
                tuned = await lab.ask(kv, ids, session="chat")
                memory, output = lab.remember(ids)
                assert tuned.reused_tokens == 0
                assert tuned.output_ids == output
                lab.check(await lab.ask(kv, ids, session="chat"), memory, reused=2 * BLOCK)
            finally:
                with torch.no_grad():
                    weight.copy_(before)
            again = await lab.ask(kv, ids, session="chat")

    assert again.reused_tokens == 2 * BLOCK, "the old weights are back, and so is their KV"
    assert again.output_ids == plain.output_ids
    assert tuned.output_ids != plain.output_ids, "the change of weights changed nothing"


async def test_a_prefix_on_either_side_of_the_window(gemma3: Lab, tmp_path: Path) -> None:
    lab, ids = gemma3, gemma3.prompt(650)
    memory, output = lab.remember(ids)
    async with tierkv.open(tiers=[nvme(tmp_path)]) as engine:
        with attach(lab.model, engine) as kv:
            assert (await lab.ask(kv, ids, session="book")).output_ids == output
            for known, reused in ((640, 640), (600, 576), (512, 512), (200, 192)):
                other = [*ids[:known], *lab.words(10, seed=known)]
                result = await lab.ask(kv, other)
                lab.check(result, copy.copy(memory), reused=reused, tier="nvme")


async def test_nothing_exact_stands_on_a_lossy_load(smollm2: Lab, tmp_path: Path) -> None:
    lab, ids = smollm2, smollm2.prompt(220)
    tiers = [host(), nvme(tmp_path, "int8")]
    async with tierkv.open(tiers=tiers) as engine:
        with attach(lab.model, engine) as kv:
            await lab.ask(kv, ids[:140], session="chat")
        await engine.flush()

    async with tierkv.open(tiers=tiers) as engine:
        with attach(lab.model, engine) as kv:
            lossy = await lab.ask(kv, ids, session="lossy", fidelity="lossy")
            assert lossy.by_tier == {"nvme": 2 * BLOCK}
            await engine.flush()

            short = await lab.ask(kv, ids[:140], session="exact")
            memory, output = lab.remember(ids[:140])
            assert short.reused_tokens == 0, "int8 is no exact copy"
            assert short.output_ids == output
            # two exact blocks are there now; the third one stands on int8, and so is none
            exact = await lab.ask(kv, ids, session="exact")
            lab.check(exact, memory, reused=2 * BLOCK, tier="host")
            lab.check(await lab.ask(kv, ids, session="exact"), memory, reused=3 * BLOCK)
