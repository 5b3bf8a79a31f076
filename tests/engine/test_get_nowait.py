"""One block in place: leased, not copied, found wherever in RAM it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests import kit
from tests.engine.device_rig import make_tiers, on_device
from tests.engine.rig import running
from tierkv.decisions.types import EvictReason
from tierkv.errors import ClosedError, IntegrityError, LayoutError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.rig import Rig

pytestmark = pytest.mark.anyio
SPACE = kit.space()
FRAME = 12 * 1024
IDS = kit.tokens(3, seed=1)
KV = kit.Memory(SPACE.layout, 48, seed=1)


def same(held: object, block: int) -> bool:
    """Whether a block that is looked at in place is the one that was stored."""
    return all(
        torch.equal(held.tensor(layer, name), tensor[:, 16 * block : 16 * block + 16])  # type: ignore[attr-defined]
        for layer, tensors in KV.layers.items()
        for name, tensor in tensors.items()
    )


async def evict_all(rig: Rig) -> None:
    """Store until nothing of before is in the first tier."""
    for seed in range(50, 53):
        async with rig.engine.session(f"other-{seed}") as other:
            kv = kit.Memory(SPACE.layout, 48, seed=seed)
            await other.store(kit.tokens(3, seed=seed), kv.view)


async def test_c2_a_held_block_stays_where_it_is_until_it_is_released(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE, capacity=4 * FRAME) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            held = session.get_nowait(2)
            assert held is not None
            assert held.tokens == 16
            await evict_all(rig)
            held.verify()
            assert same(held, 2)
            session.destroy()  # nor does it go with its session
            assert same(held, 2)
            held.release()
            held.release()
            with pytest.raises(ClosedError):
                held.tensor(0, "k")
        await rig.at_rest()


async def test_a_damaged_block_is_told_and_taken_back(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            with session.get_nowait(0) as held:  # type: ignore[union-attr]
                held.tensor(0, "k")[0, 0, 0] += 1.0
                with pytest.raises(IntegrityError):
                    held.verify()
                with pytest.raises(LayoutError):
                    held.tensor(9, "k")
            back = kit.Memory(SPACE.layout, 48)
            async with session.match(IDS) as match:
                assert (await match.load(into=back.view)).tokens == 0
            assert session.get_nowait(0) is None
            assert session.get_nowait(3) is None, "the history is not that long"
        await rig.at_rest()


async def test_what_a_device_holds_too_is_found_in_ram_behind_it(tmp_path: Path) -> None:
    tiers = make_tiers("device+host", tmp_path)
    async with on_device(tiers) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await rig.engine.runtime.behind.drain()
            assert rig.parts(0) == rig.parts(1), "both tiers hold it"
            for block in range(3):
                with session.get_nowait(block) as held:  # type: ignore[union-attr]
                    assert same(held, block)
        await rig.clean()


async def test_what_is_on_a_medium_only_is_none(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await rig.engine.runtime.behind.drain()
            rig.cool()
            assert session.get_nowait(0) is None
        with pytest.raises(ClosedError):
            session.get_nowait(0)
        await rig.at_rest()


@pytest.mark.parametrize("at", [0, 24, 30, 45, 70, 100, 140, 230])
async def test_a_header_that_is_not_its_own_is_refused(at: int, tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            with session.get_nowait(0) as held:  # type: ignore[union-attr]
                assert same(held, 0), "from here on it is known what others must be like"
            with session.get_nowait(1) as held:  # type: ignore[union-attr]
                frame = held._frame()
                frame[at] ^= 1
                with pytest.raises(IntegrityError):
                    held.tensor(0, "k")
                frame[at] ^= 1
                assert same(held, 1)
                assert held.tokens == 16
                held.verify()
                frame[4000] ^= 1  # says nothing of where a tensor is
                assert same(held, 1)
                with pytest.raises(IntegrityError):
                    held.verify()
                frame[4000] ^= 1
        await rig.at_rest()


async def test_two_hold_one_block_and_counts_agree(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE, capacity=4 * FRAME) as rig:
        decisions = rig.engine.core.decisions
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            one, two = session.get_nowait(0), session.get_nowait(0)
            async with session.match(IDS):
                three = session.get_nowait(0)
                assert decisions.leases() == 4
                decisions.check()
                one.release()  # type: ignore[union-attr]
                one.release()  # type: ignore[union-attr]
            decisions.check()
            assert decisions.leases() == 2
            await evict_all(rig)
            assert same(two, 0)
            two.release()  # type: ignore[union-attr]
            three.release()  # type: ignore[union-attr]
            assert decisions.leases() == 0
            decisions.check()
        await rig.at_rest()


async def test_what_a_holder_saw_taken_back_is_freed_at_the_end(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            used = rig.engine.core.decisions.used(0)
            held = session.get_nowait(2)
            assert held is not None
            core = rig.engine.core
            core.lost(held._part, 0, held._found[2], EvictReason.FAILED)
            assert core.decisions.used(0) == used, "its bytes stay for the lease"
            held.release()
            assert core.decisions.used(0) < used
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("looked", [False, True])
async def test_c2_nothing_is_lent_by_an_engine_that_is_closed(looked: bool, tmp_path: Path) -> None:
    async with (
        running("host", tmp_path, space=SPACE) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view)
        held = session.get_nowait(0)
        assert held is not None
        if looked:  # what it keeps for the next look is refused, too
            assert same(held, 0)
        await rig.engine.aclose()
        for look in (
            lambda: held.tensor(0, "k"),
            lambda: held.tensor(9, "k"),
            lambda: held.tokens,
            held.verify,
            lambda: session.get_nowait(0),
        ):
            with pytest.raises(ClosedError, match="engine is closed"):
                look()
        held.release()
        held.release()
        with pytest.raises(ClosedError, match="released"):
            held.tensor(0, "k")


@pytest.mark.every_loop
async def test_c8_what_was_taken_back_can_be_released_after_closing(tmp_path: Path) -> None:
    async with (
        running("host", tmp_path, space=SPACE) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view)
        held = session.get_nowait(2)
        assert held is not None
        core = rig.engine.core
        core.lost(held._part, 0, held._found[2], EvictReason.FAILED)
        await rig.engine.aclose()
        held.release()  # which frees its bytes at last
        assert core.decisions.leases() == 0
        core.decisions.check()
