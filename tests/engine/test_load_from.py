"""Loads from a token on: what is before it is in place, and is neither read nor written."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import Rig, running, usable
from tierkv.abc import View
from tierkv.decisions.types import MissReason
from tierkv.errors import ClosedError, CodecError, LayoutError
from tierkv.layout import Layout
from tierkv.mover.scattering import Order, write
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Slow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio
BLOCKS = 8
SIZE = kit.BLOCK
IDS = kit.tokens(BLOCKS)
KINDS = ("host", "nvme", "file", "host+nvme")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


class FromOn(View):
    """The caller's memory from one token on: what is before it is backed by nothing."""

    def __init__(self, memory: kit.Memory, start: int) -> None:
        self.memory = memory
        self.start = start
        self.asked: list[tuple[int, int]] = []

    def pieces(
        self, layer: int, tensor: str, start: int, stop: int
    ) -> Sequence[tuple[int, torch.Tensor]]:
        """Slices of the caller's tensor; nothing before ``start``."""
        if start < self.start:
            raise LayoutError(f"token {start} of layer {layer} has no memory")
        self.asked.append((start, stop))
        return ((start, self.memory.layers[layer][tensor].narrow(1, start, stop - start)),)

    def state(self, layer: int, tensor: str) -> torch.Tensor:
        """The whole tensor of a recurrent layer."""
        return self.memory.states[layer][tensor]


@asynccontextmanager
async def stored(
    kinds: str, path: Path, *, layout: str = "full", ids: list[int] = IDS, **settings: Any
) -> AsyncIterator[tuple[Rig, tierkv.Session, kit.Memory]]:
    """An engine with one stored conversation in its slowest tier alone."""
    space = kit.space(layout)
    kv = kit.Memory(space.layout, len(ids), seed=1)
    async with running(kinds, path, space=space, **settings) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, kv.view, tail=len(ids) % SIZE != 0)
            await session.flush()
            rig.cool()
            yield rig, session, kv
        await rig.at_rest()


def in_place(kv: kit.Memory, start: int) -> kit.Memory:
    """A caller's memory in which the first ``start`` tokens (and a state) are there already."""
    mine = kit.Memory(kv.layout, kv.length)
    for index, layer in kv.layers.items():
        for name, tensor in layer.items():
            mine.layers[index][name][:, :start] = tensor[:, :start]
    return mine


# --------------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("start", [0, 1, 5, BLOCKS])
@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("kinds", KINDS)
async def test_every_kind_of_group_from_a_block_on(
    kinds: str, layout: str, start: int, tmp_path: Path
) -> None:
    async with stored(kinds, tmp_path, layout=layout) as (rig, session, kv):
        first = start * SIZE
        mine = in_place(kv, first)
        before = rig.engine.core.bytes_copied
        async with session.match(IDS) as match:
            assert match.tokens == len(IDS)  # what is looked up does not depend on it
            result = await match.load(mine.view, start=first)
        assert (result.tokens, result.reason) == (len(IDS), None)
        assert sum(result.by_tier.values()) == len(IDS) - first or layout in ("sliding", "state")
        if start < BLOCKS:
            assert mine.same(kv, len(IDS))
        else:
            assert rig.engine.core.bytes_copied == before
            assert mine.layers.keys() == kv.layers.keys()


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("kinds", KINDS)
async def test_nothing_before_the_start_is_touched(kinds: str, layout: str, tmp_path: Path) -> None:
    async with stored(kinds, tmp_path, layout=layout) as (_, session, kv):
        first = 3 * SIZE
        mine = kit.Memory(kv.layout, len(IDS))  # sentinels everywhere
        view = FromOn(mine, first)
        async with session.match(IDS) as match:
            with pytest.raises(LayoutError):
                await match.load(view)  # token 0 has no memory
            result = await match.load(view, start=first)
        assert result.tokens == len(IDS)
        assert min(start for start, _ in view.asked) >= first
        for index, layer in mine.layers.items():
            for name, tensor in layer.items():
                assert bool((tensor[:, :first] == torch.tensor(77.0).to(tensor.dtype)).all())
                low = max(first, len(IDS) - 23) if layout == "sliding" and index == 0 else first
                assert torch.equal(tensor[:, low:], kv.layers[index][name][:, low:])
        for index, named in mine.states.items():
            assert all(torch.equal(t, kv.states[index][name]) for name, t in named.items())


@pytest.mark.parametrize("start", [0, 2, 3])
@pytest.mark.parametrize("kinds", ["host", "nvme"])
async def test_a_private_tail_is_loaded_from_a_block_on(
    kinds: str, start: int, tmp_path: Path
) -> None:
    ids = kit.tokens(3.5)
    async with stored(kinds, tmp_path, ids=ids) as (_, session, kv):
        mine = in_place(kv, start * SIZE)
        async with session.match(ids) as match:
            result = await match.load(mine.view, start=start * SIZE)
        assert result.tokens == len(ids) == 56
        assert sum(result.by_tier.values()) == 56 - start * SIZE
        assert mine.same(kv, 56)


@pytest.mark.parametrize("chain", ["lz4", "planes", "int8"])
async def test_codec_chains(chain: str, tmp_path: Path) -> None:
    async with stored("nvme", tmp_path, compression=chain) as (rig, _, kv):
        lossy = chain == "int8"
        async with rig.engine.session("b", fidelity="lossy" if lossy else "exact") as session:
            mine = kit.Memory(kv.layout, len(IDS))
            async with session.match(IDS) as match:
                result = await match.load(mine.view, start=4 * SIZE)
            assert (result.tokens, result.by_tier) == (len(IDS), {"nvme": 4 * SIZE})
        for index, layer in mine.layers.items():
            for name, tensor in layer.items():
                assert bool((tensor[:, : 4 * SIZE] == 77.0).all())
                wanted = kv.layers[index][name][:, 4 * SIZE :]
                near = torch.allclose(tensor[:, 4 * SIZE :], wanted, atol=0.05)
                assert near if lossy else torch.equal(tensor[:, 4 * SIZE :], wanted)


@pytest.mark.parametrize("kinds", KINDS)
async def test_into_a_device_and_into_a_view_that_the_engine_owns(
    kinds: str, tmp_path: Path
) -> None:
    sim = SimDevice("sim:31")
    async with stored(kinds, tmp_path) as (rig, session, kv):
        mine = in_place(kv, 2 * SIZE)
        owned = tierkv.views.dense(mine.layers, owned=True)
        async with session.match(IDS) as match:
            assert (await match.load(owned, start=2 * SIZE)).tokens == len(IDS)
        assert mine.same(kv, len(IDS))
        rig.cool()
        rig.engine.core.devices.add(sim)
        mine = in_place(kv, 2 * SIZE)
        async with session.match(IDS) as match:
            assert (await match.load(mine.view, start=2 * SIZE)).tokens == len(IDS)
        assert mine.same(kv, len(IDS))
    sim.close()
    assert sim.failed is None


# --------------------------------------------------------------------------- results


@pytest.mark.parametrize("layout", kit.LAYOUTS)
async def test_a_match_shorter_than_the_start_touches_nothing(layout: str, tmp_path: Path) -> None:
    async with stored("host", tmp_path, layout=layout) as (_, session, kv):
        longer = IDS + kit.tokens(4, seed=5)
        mine = kit.Memory(kv.layout, len(longer))
        async with session.match(longer) as match:
            matched = match.tokens
            result = await match.load(FromOn(mine, 10 * SIZE), start=10 * SIZE)
        assert matched <= len(IDS)
        assert (result.tokens, result.by_tier, result.reason) == (10 * SIZE, {}, None)
        assert mine.untouched()


@pytest.mark.parametrize("start", [-SIZE, 1, SIZE - 1, 9 * SIZE, "16", 1.5])
async def test_a_start_inside_a_block_or_outside_the_prompt_is_refused(
    start: Any, tmp_path: Path
) -> None:
    async with stored("host", tmp_path) as (_, session, kv):
        mine = kit.Memory(kv.layout, len(IDS))
        async with session.match(IDS) as match:
            with pytest.raises(LayoutError, match="start must be"):
                await match.load(mine.view, start=start)
        assert mine.untouched()
        with pytest.raises(ClosedError):
            await match.load(mine.view, start=SIZE)
        with pytest.raises(LayoutError, match="start must be"):
            session.match(IDS, start=start)


@pytest.mark.parametrize("layout", ["full", "sliding", "state", "latent"])
@pytest.mark.parametrize("damaged", [0, 2, 3, 5, 7])
async def test_damage_before_the_start_does_not_matter(
    damaged: int, layout: str, tmp_path: Path
) -> None:
    async with stored("host", tmp_path, layout=layout) as (rig, session, kv):
        core = rig.engine.core
        memory = core.levels[0].memory
        assert memory is not None
        hit = 0
        for part, generation, _ in list(core.decisions.parts(0)):
            if part.startswith(session.state.chain.keys[damaged]):
                buffer = memory.borrow(part, generation)
                assert buffer is not None
                buffer.memory[4096] ^= 0xFF  # the first byte behind the header
                hit += 1
        assert hit
        mine = in_place(kv, 3 * SIZE)
        async with session.match(IDS) as match:
            result = await match.load(mine.view, start=3 * SIZE)
        if damaged < 3:
            assert (result.tokens, result.reason) == (len(IDS), None)
            assert mine.same(kv, len(IDS))
            return
        assert result.reason is MissReason.DAMAGED
        if layout in ("full", "latent", "sliding"):
            assert result.tokens == damaged * SIZE
            assert mine.same(kv, result.tokens)
        else:  # the only state is that of the last block: nothing shorter can be loaded
            assert result.tokens == 3 * SIZE
            assert mine.states[1]["ssm"].eq(77.0).all()


async def test_a_state_that_may_be_overwritten_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was before the start is there still, but the state at its end is not."""
    monkeypatch.setitem(kit.LAYOUTS, "state first", Layout(kit.LAYOUTS["state"].groups[::-1]))

    def failing(order: Order, view: View) -> None:
        (part,) = order.parts
        if part.found.block == BLOCKS - 1 and part.found.group == 1:
            raise CodecError("planted: found out while it is decoded")
        write(order, view)

    async with stored("nvme", tmp_path, layout="state first", compression="lz4") as found:
        _, session, kv = found
        monkeypatch.setattr("tierkv.mover.landing.write", failing)
        for start, tokens in ((3, 0), (BLOCKS, BLOCKS)):  # behind it, nothing is loaded
            mine = in_place(kv, start * SIZE)
            async with session.match(IDS) as match:
                result = await match.load(mine.view, start=start * SIZE)
            assert result.tokens == tokens * SIZE
            if tokens == 0:
                assert result.reason is MissReason.DAMAGED
                assert not mine.states[1]["ssm"].eq(77.0).all()
                await session.store(IDS, kv.view)


# --------------------------------------------------------------------------- cost and deadlines


async def test_only_what_is_loaded_costs(tmp_path: Path) -> None:
    slow = Slow(0.005, "read")
    async with stored("nvme", tmp_path, faults={"nvme": [slow]}) as (rig, session, kv):
        core, fingerprint = rig.engine.core, session.space.fingerprint
        for _ in range(4):  # 1 ms a block of about 3 KiB, as the engine believes
            core.decisions.sample(0, "read", 10_000_000, 1000.0, core.clock())
        session.computed(1_000_000, 1.0)
        assert core.decisions.costs.speed(fingerprint)
        async with session.match(IDS) as match:
            assert match.worth == 0
            mine = in_place(kv, 2 * SIZE)
            result = await match.load(mine.view, start=2 * SIZE)
            assert (result.tokens, result.reason) == (2 * SIZE, MissReason.SLOWER)
            assert "6 blocks" in result.rule
            assert mine.untouched(2 * SIZE)
            whole = await match.load(mine.view)
            assert (whole.tokens, whole.reason) == (0, MissReason.SLOWER)
            assert "8 blocks" in whole.rule
            nothing = await match.load(mine.view, start=8 * SIZE)
            assert (nothing.tokens, nothing.reason, nothing.rule) == (8 * SIZE, None, "")


async def test_a_deadline_counts_what_is_left_to_load(tmp_path: Path) -> None:
    async with stored("nvme", tmp_path) as (rig, session, kv):
        core = rig.engine.core
        nbytes = sum(n for _, _, n in core.decisions.parts(0))
        for _ in range(4):  # all of it takes 80 s, as the engine believes
            core.decisions.sample(0, "read", nbytes, 80.0, core.clock())
        async with session.match(IDS) as match:
            mine = in_place(kv, 4 * SIZE)
            most = await match.load(mine.view, start=4 * SIZE, deadline="60s")
            assert (most.tokens, most.reason) == (len(IDS), None)  # 40 s, not 80
            rest = await match.load(mine.view, deadline="60s")
            assert rest.reason is MissReason.DEADLINE
            assert 4 * SIZE <= rest.tokens < len(IDS)
            again = await match.load(mine.view, start=2 * SIZE)  # weighed by itself
            assert (again.tokens, again.reason) == (len(IDS), None)
        assert mine.same(kv, len(IDS))


# --------------------------------------------------------------------------- batches, cancels


async def test_load_many_with_a_start_each(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path) as (rig, session, kv), rig.engine.session("b") as two:
        await two.store(IDS, kv.view)
        rig.cool()
        mine = [in_place(kv, 3 * SIZE), kit.Memory(kv.layout, len(IDS))]
        async with rig.engine.match_many([(session, IDS), (two, IDS)]) as (a, b):
            results = await rig.engine.load_many([(a, mine[0].view, 3 * SIZE), (b, mine[1].view)])
            with pytest.raises(LayoutError, match="start"):
                await rig.engine.load_many([(a, mine[0].view, 3)])
            with pytest.raises(LayoutError, match=r"\(match, view, start\)"):
                await rig.engine.load_many([(a, mine[0].view, 3 * SIZE, 1)])  # type: ignore[list-item]
        assert [r.tokens for r in results] == [len(IDS), len(IDS)]
        assert [sum(r.by_tier.values()) for r in results] == [5 * SIZE, 8 * SIZE]
        assert all(memory.same(kv, len(IDS)) for memory in mine)


@pytest.mark.parametrize("kinds", KINDS)
async def test_cancelled_at_each_step(kinds: str, tmp_path: Path) -> None:
    views: list[kit.Memory] = []
    async with stored(kinds, tmp_path) as (rig, session, kv):

        async def once() -> int:
            rig.cool()
            views.append(kit.Memory(kv.layout, len(IDS)))
            async with session.match(IDS) as match:
                return (await match.load(FromOn(views[-1], 5 * SIZE), start=5 * SIZE)).tokens

        async for run in cancel_at_each_step(once):
            await rig.at_rest()
            for layer in views[-1].layers.values():
                assert all(bool((t[:, : 5 * SIZE] == 77.0).all()) for t in layer.values())
            if run.outcome == "completed":
                assert run.value == len(IDS)
        await usable(rig, session.space)


async def test_what_follows_a_start_is_derived_in_a_lossy_session(tmp_path: Path) -> None:
    """Nobody knows how the KV before the start came about; an exact session never reads lossy."""
    async with stored("host", tmp_path) as (rig, exact, kv):
        mine = in_place(kv, 2 * SIZE)
        async with exact.match(IDS) as match:
            await match.load(mine.view, start=2 * SIZE)
            assert exact.derived == ""
        async with rig.engine.session("b", fidelity="lossy") as lossy:
            async with lossy.match(IDS) as match:
                await match.load(mine.view)
                assert lossy.derived == ""
            async with lossy.match(IDS) as match:
                await match.load(mine.view, start=len(IDS))
                assert lossy.derived != ""
                longer = IDS + kit.tokens(1, seed=3)
                more = kit.Memory(kv.layout, len(longer), seed=2)
                await lossy.store(longer, more.view, start=len(IDS))
        async with exact.match(longer) as match:
            assert (match.tokens, match.reason) == (len(IDS), MissReason.FIDELITY)
