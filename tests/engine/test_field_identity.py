"""Cases from the field: other identity, other bytes, other owner. Never another's KV.

Each case walks every combination of tiers, in the same process and after a restart.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import COMBINATIONS, is_durable, load, running
from tierkv.blocks import AdapterId, Identity, Media
from tierkv.decisions.types import MissReason
from tierkv.errors import LayoutError
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.testing.faults import Corrupting

if TYPE_CHECKING:
    from pathlib import Path

    from tierkv import Engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


BLOCKS = 3
LORA_A = AdapterId("a", "v1")


def _space(layout: Layout = kit.LAYOUTS["full"], block: int = 16, **identity: object) -> Space:
    return Space(replace(Identity("m", "rev1"), **identity), layout, block_tokens=block)  # type: ignore[arg-type]


def _layout(dtype: str, packing: str = "") -> Layout:
    specs = tuple(TensorSpec(name, dtype, (2, 8), packing) for name in ("k", "v"))
    return Layout((Group(GroupKind.FULL, tuple(Layer(i, specs) for i in range(3))),))


BASE = _space()
OTHERS: dict[str, Space] = {
    "f005-adapter": _space(adapters=(LORA_A,)),
    "f006-adapter-version": _space(adapters=(AdapterId("a", "v2"),)),
    "f006-adapter-scale": _space(adapters=(AdapterId("a", "v1", scale=0.5),)),
    "f007-dtype": _space(_layout("bfloat16")),
    "f008-revision": _space(weights="rev2"),
    "f009-model": _space(model="n"),
    "f013-packing": _space(_layout("float32", packing="interleaved")),
    "shard": _space(shard=(0, 2)),
    "context-policy": _space(context_policy="sliding-document:4096"),
    "extra": _space(extra=(("rope", "yarn"),)),
    "block-size": _space(block=8),
}


async def _hit(engine: Engine, space: Space, ids: list[int], kv: kit.Memory, **who: Any) -> None:
    async with engine.session("x", space=space, **who) as session:
        tokens, back = await load(session, ids)
        assert tokens == len(ids)
        assert back.same(kv, tokens)


async def _miss(engine: Engine, space: Space, ids: list[int], **who: Any) -> None:
    async with engine.session("x", space=space, **who) as session:
        async with session.match(ids) as match:
            assert match.tokens == 0
            assert match.reason is MissReason.NEVER_STORED
        assert all(report.tier is None for report in session.explain(ids))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f005_to_f009_and_f013_another_identity_is_a_miss(
    kinds: str, name: str, tmp_path: Path
) -> None:
    other = OTHERS[name]
    ids = kit.tokens(BLOCKS)
    mine = kit.Memory(BASE.layout, len(ids), seed=1)
    theirs = kit.Memory(other.layout, len(ids), seed=2)
    async with running(kinds, tmp_path, space=BASE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, mine.view)
        await _miss(rig.engine, other, ids)
        if name == "f005-adapter":  # and between adapters as well
            for variant in ("f006-adapter-version", "f006-adapter-scale"):
                await _miss(rig.engine, OTHERS[variant], ids)
        async with rig.engine.session("a", space=other) as session:
            await session.store(ids, theirs.view)
        await rig.engine.flush()
        await _hit(rig.engine, BASE, ids, mine)
        await _hit(rig.engine, other, ids, theirs)
        await rig.at_rest()
    if not is_durable(kinds):
        return
    async with running(kinds, tmp_path, space=BASE) as rig:
        await _hit(rig.engine, other, ids, theirs)
        await _hit(rig.engine, BASE, ids, mine)


@pytest.mark.parametrize("name", [n for n in OTHERS if n != "block-size"])
async def test_after_a_restart_another_identity_is_a_miss(name: str, tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS)
    mine = kit.Memory(BASE.layout, len(ids), seed=1)
    async with running("nvme", tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        await session.store(ids, mine.view)
    async with running("host+nvme", tmp_path, space=OTHERS[name]) as rig:
        await _miss(rig.engine, OTHERS[name], ids)
        await _hit(rig.engine, BASE, ids, mine)


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f009_f010_tenants_and_salts_never_share(kinds: str, tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS)
    owners: list[dict[str, Any]] = [
        {"tenant": "a"},
        {"tenant": "b"},
        {"tenant": "a", "salt": b"s"},
        {},
    ]
    kvs = [kit.Memory(BASE.layout, len(ids), seed=i + 1) for i in range(len(owners))]
    async with running(kinds, tmp_path, space=BASE) as rig:
        for owner, kv in zip(owners, kvs, strict=True):
            await _miss(rig.engine, BASE, ids, **owner)
            assert await (await rig.engine.prefetch(tokens=ids, **owner)).wait() == 0
            async with rig.engine.session("x", **owner) as session:
                assert (await session.store(ids, kv.view)).stored == BLOCKS
        for owner, kv in zip(owners, kvs, strict=True):
            await _hit(rig.engine, BASE, ids, kv, **owner)
        await rig.engine.flush()
    if not is_durable(kinds):
        return
    async with running(kinds, tmp_path, space=BASE) as rig:
        for owner, kv in zip(owners, kvs, strict=True):
            await _hit(rig.engine, BASE, ids, kv, **owner)
        await _miss(rig.engine, BASE, ids, tenant="c")
        await _miss(rig.engine, BASE, ids, tenant="b", salt=b"s")


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f011_another_image_behind_the_same_placeholders(kinds: str, tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(BASE.layout, len(ids), seed=1)
    cat, dog = (Media(20, hashlib.sha256(x).digest()) for x in (b"cat", b"dog"))
    async with running(kinds, tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        await session.store(ids, kv.view, media=[cat])
        for media, expected in (([cat], 48), ([dog], 16), ([], 16)):
            async with session.match(ids, media=media) as match:
                assert match.tokens == expected  # block 0 has no image in it


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f002_a_hit_leaves_no_sentinel(kinds: str, tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(BASE.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        await session.store(ids, kv.view)
        await session.flush()
        for _ in range(2):
            rig.cool()
            _, back = await load(session, ids)
            for layer in back.layers.values():
                assert not any(bool((t == 77.0).any()) for t in layer.values())


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f014_what_was_given_and_what_was_returned_share_nothing(
    kinds: str, tmp_path: Path
) -> None:
    ids = kit.tokens(BLOCKS)
    kv, same = (kit.Memory(BASE.layout, len(ids), seed=1) for _ in range(2))
    async with running(kinds, tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        await session.store(ids, kv.view)
        for layer in kv.layers.values():
            for tensor in layer.values():
                tensor.fill_(-1)  # the caller may overwrite its tensors as soon as store returns
        for _ in range(3):
            tokens, back = await load(session, ids)
            assert back.same(same, tokens)
            for layer in back.layers.values():
                for tensor in layer.values():
                    tensor.fill_(-2)


@pytest.mark.parametrize("kinds", ["nvme", "host+nvme"])
async def test_f016_a_restored_session_reports_what_it_really_has(
    kinds: str, tmp_path: Path
) -> None:
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(BASE.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        await session.store(ids, kv.view)
        assert (await session.flush()).durable == BLOCKS
    async with running(kinds, tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        async with session.match(ids) as match:
            promised = match.tokens
            back = kit.Memory(BASE.layout, len(ids))
            result = await match.load(into=back.view)
        assert promised == result.tokens == sum(result.by_tier.values()) == len(ids)
        assert back.same(kv, len(ids))


async def test_f017_damage_in_a_middle_layer_leaves_the_view_untouched(tmp_path: Path) -> None:
    space = _space(Layout.uniform(12, 1, 8, "float32"))
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    fault = Corrupting(0.66, times=1)  # about layer 7 of 12, in every block
    async with (
        running("nvme", tmp_path, space=space, faults={"nvme": [fault]}) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(ids, kv.view)
        tokens, back = await load(session, ids)
        assert tokens == 0
        assert back.untouched()


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f019_one_more_token_writes_nothing(kinds: str, tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS + 1)
    kv = kit.Memory(BASE.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=BASE) as rig, rig.engine.session("a") as session:
        await session.store(ids[:48], kv.view)
        await session.flush()
        writes = rig.calls(kinds.rpartition("+")[2], "write")
        used = rig.engine.stats().used
        for length in range(49, 64):
            result = await session.store(ids[:length], kv.view, start=48)
            assert result.blocks == ()
        await session.flush()
        assert rig.calls(kinds.rpartition("+")[2], "write") == writes
        assert rig.engine.stats().used == used


@pytest.mark.parametrize("kinds", COMBINATIONS)
async def test_f020_a_match_holds_what_it_promised(kinds: str, tmp_path: Path) -> None:
    """Whatever is stored, expired or forgotten meanwhile: the leased prefix loads as promised."""
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(BASE.layout, len(ids), seed=1)
    async with running(kinds, tmp_path, space=BASE, capacity="96KiB") as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            async with session.match(ids) as match:
                for seed in range(2, 8):  # a flood
                    flood = kit.tokens(BLOCKS, seed=seed)
                    more = kit.Memory(BASE.layout, len(flood), seed=seed)
                    async with rig.engine.session("flood") as other:
                        await other.store(flood, more.view)
                await rig.engine.reset()  # and everything is forgotten
                back = kit.Memory(BASE.layout, len(ids))
                result = await match.load(into=back.view)
            assert result.tokens == match.tokens == len(ids)
            assert back.same(kv, len(ids))
            async with session.match(ids) as match:
                assert match.tokens == 0
                assert match.reason is MissReason.REMOVED
        await rig.at_rest()


async def test_f020_bytes_that_vanish_behind_our_back_shorten_the_prefix(tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS)
    kv = kit.Memory(BASE.layout, len(ids), seed=1)
    async with running("nvme", tmp_path, space=BASE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view)
            async with session.match(ids) as match:
                gone = [(p.part, p.generation) for p in match._found.parts if p.block == 1]
                await rig.backends["nvme"].inner.delete(gone)
                back = kit.Memory(BASE.layout, len(ids))
                result = await match.load(into=back.view)
            assert (result.tokens, result.reason) == (16, MissReason.FAILED)
            assert back.same(kv, 16)
            assert back.untouched(16)
            assert (await session.store(ids, kv.view, start=32)).skipped == 0
            assert (await load(session, ids))[0] == len(ids)
        await rig.at_rest()


async def test_f026_strided_and_expanded_tensors_are_stored_by_value(tmp_path: Path) -> None:
    ids = kit.tokens(2)
    base = torch.arange(2 * 8 * 64, dtype=torch.float32)
    k = base.view(8, 2, 64).permute(1, 2, 0)[:, ::2]  # [heads, tokens, dim], strided
    v = torch.arange(32, dtype=torch.float32).view(1, 32, 1).expand(2, 32, 8)
    view = tierkv.views.dense({i: {"k": k, "v": v} for i in range(3)})
    async with running("host+nvme", tmp_path, space=BASE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, view)
            _, back = await load(session, ids)
        for layer in back.layers.values():
            assert torch.equal(layer["k"], k)
            assert torch.equal(layer["v"], v)


async def test_views_that_do_not_fit_are_refused_before_anything_happens(tmp_path: Path) -> None:
    ids = kit.tokens(BLOCKS)
    other = kit.Memory(_layout("float16"), len(ids), seed=1)
    short = kit.Memory(BASE.layout, 20, seed=1)
    async with running("host+nvme", tmp_path, space=BASE) as rig:
        async with rig.engine.session("a") as session:
            for memory in (other, short):
                with pytest.raises(LayoutError):
                    await session.store(ids, memory.view)
            kv = kit.Memory(BASE.layout, len(ids), seed=1)
            await session.store(ids, kv.view)
            async with session.match(ids) as match:
                with pytest.raises(LayoutError):
                    await match.load(into=other.view)
                with pytest.raises(LayoutError):
                    await match.load(into=short.view)
        await rig.at_rest()
