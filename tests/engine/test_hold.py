"""Standing leases: leading blocks in RAM, verified, and there until they are released."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests import kit
from tests.engine.rig import Rig, load, running
from tierkv.decisions.types import EvictReason, SkipReason
from tierkv.testing.faults import Corrupting, Failing, Hanging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tierkv.blocks import BlockKey

pytestmark = pytest.mark.anyio
SPACE = kit.space()
BLOCKS = 8
IDS = kit.tokens(BLOCKS)
FRAME = 12 * 1024


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


@asynccontextmanager
async def stored(
    kinds: str, path: Path, *, layout: str = "full", warm: bool = False, **settings: Any
) -> AsyncIterator[tuple[Rig, list[BlockKey], kit.Memory]]:
    """An engine with one stored conversation, in its slowest tier alone unless it is warm."""
    space = kit.space(layout)
    kv = kit.Memory(space.layout, len(IDS), seed=1)
    async with running(kinds, path, space=space, **settings) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, kv.view)
            await session.flush()
            keys = list(session.state.chain.keys)
        if not warm:
            rig.cool()
        yield rig, keys, kv
        await rig.at_rest()


def where(rig: Rig, ids: Sequence[int] = IDS) -> list[str | None]:
    """The fastest tier of each block."""
    return [report.tier for report in rig.engine.explain(ids)]


def chill(rig: Rig, tier: int = 0) -> None:
    """Drop from a tier what may go: what the next one holds, and nobody has leased."""
    core = rig.engine.core
    slower = {part for part, _, _ in core.decisions.parts(tier + 1)}
    left = [(p, g) for p, g, _ in core.decisions.parts(tier) if p in slower]
    while drops := core.decisions.dropped(left, tier, EvictReason.CAPACITY, core.clock()):
        core.free(drops)
        gone = {drop.part for drop in drops}
        left = [(p, g) for p, g in left if p not in gone]


def break_frames(rig: Rig, keys: Sequence[BlockKey], blocks: Sequence[int], tier: int = 0) -> None:
    """Flip a byte behind the header of every part of these blocks that is in RAM."""
    core = rig.engine.core
    memory = core.levels[tier].memory
    assert memory is not None
    for part, generation, _ in list(core.decisions.parts(tier)):
        if any(part.startswith(keys[block]) for block in blocks):
            buffer = memory.borrow(part, generation)
            assert buffer is not None
            buffer.memory[4096] ^= 0xFF


async def other(rig: Rig, seed: int, blocks: int = BLOCKS) -> tuple[int, int]:
    """Store something else: how many blocks were stored, and skipped."""
    ids, kv = kit.tokens(blocks, seed=seed), kit.Memory(SPACE.layout, blocks * 16, seed=2)
    async with rig.engine.session(f"other{seed}") as session:
        done = await session.store(ids, kv.view)
        return done.stored, done.skipped


# --------------------------------------------------------------------------- what is held


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("kinds", ["host", "host+nvme", "host+file", "device+host+nvme"])
async def test_a_hold_brings_verifies_and_keeps(kinds: str, layout: str, tmp_path: Path) -> None:
    async with stored(kinds, tmp_path, layout=layout) as (rig, keys, kv):
        hold = await rig.engine.hold(None, keys)
        assert (hold.blocks, hold.held, rig.engine.stats().leases) == (BLOCKS, True, 1)
        host = next(x for x in rig.engine.core.levels if x.name == "host")
        in_ram = {part for part, _, _ in rig.engine.core.decisions.parts(host.index)}
        assert set(hold.parts) <= in_ram
        reads = {name: rig.calls(name, "read") for name in rig.backends}
        async with rig.engine.session("b") as session:
            async with session.match(IDS) as match:
                assert {p.part for p in match._found.parts} == set(hold.parts)
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert back.same(kv, tokens)
        if "device" not in kinds:
            assert {name: rig.calls(name, "read") for name in rig.backends} == reads
        hold.release()
        hold.release()
        assert (hold.held, rig.engine.stats().leases) == (False, 0)


async def test_below_a_device_it_is_ram_that_is_filled(tmp_path: Path) -> None:
    async with stored("device+host+nvme", tmp_path) as (rig, keys, _):
        core = rig.engine.core
        await rig.settle()
        chill(rig, 1)
        assert [len(list(core.decisions.parts(tier))) for tier in (1, 2)] == [0, BLOCKS]
        hold = await rig.engine.hold(None, keys)
        assert hold.blocks == BLOCKS
        assert {part for part, _, _ in core.decisions.parts(1)} == set(hold.parts)
        hold.release()


async def test_what_is_held_stays_whatever_else_comes(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path, capacity=12 * FRAME) as (rig, keys, _):
        hold = await rig.engine.hold(None, keys)
        assert hold.blocks == BLOCKS
        for seed in range(1, 8):
            await other(rig, seed, 12)
        assert where(rig) == ["host"] * BLOCKS
        assert rig.engine.resize("host", 4 * FRAME) >= 4 * FRAME  # not even then
        for _ in range(3):
            rig.engine.core.decisions.tick(rig.engine.core.clock())
        assert where(rig) == ["host"] * BLOCKS
        rig.engine.resize("host", 12 * FRAME)
        hold.release()
        for seed in range(10, 14):
            await other(rig, seed, 12)
        assert where(rig) == ["nvme"] * BLOCKS


async def test_it_counts_as_a_use(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path, capacity=12 * FRAME, policy="lru") as found:
        rig, keys, _ = found
        for seed in (1, 2):
            await other(rig, seed, 4)
            await rig.engine.flush()
        with await rig.engine.hold(None, keys) as hold:
            assert hold.blocks == BLOCKS
        await other(rig, 3, 4)
        assert where(rig) == ["host"] * BLOCKS  # what was used before gave way
        assert where(rig, kit.tokens(4, seed=1)) == ["nvme"] * 4


async def test_holds_overlap_and_share(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path) as (rig, keys, _):
        all_of_it, part, none = (
            await rig.engine.hold(None, keys),
            await rig.engine.hold(None, keys[:3]),
            await rig.engine.hold(None, []),
        )
        assert [hold.blocks for hold in (all_of_it, part, none)] == [BLOCKS, 3, 0]
        assert rig.engine.stats().leases == 2
        assert not none.held
        all_of_it.release()
        chill(rig)
        assert where(rig) == ["host"] * 3 + ["nvme"] * (BLOCKS - 3)
        part.release()
        none.release()


async def test_what_is_there_is_all_that_is_held(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path) as (rig, keys, _):
        longer = rig.engine.session("long")
        async with longer:
            chain = longer.state.chain
            chain.follow(IDS + kit.tokens(4, seed=9))
            hold = await rig.engine.hold(None, chain.keys)
        assert (hold.blocks, len(hold.parts)) == (BLOCKS, BLOCKS)
        hold.release()
        strangers = await rig.engine.hold(None, keys, tenant="somebody else", salt=b"x")
        assert strangers.blocks == 0  # frames of another root: they are not these blocks
        assert where(rig) == ["host"] * BLOCKS  # and those whose they are still have them


async def test_tenant_and_salt_make_the_root(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        kv = kit.Memory(SPACE.layout, len(IDS), seed=1)
        async with rig.engine.session("a", tenant="t", salt=b"s") as session:
            await session.store(IDS, kv.view)
            await session.flush()
            keys = list(session.state.chain.keys)
        rig.cool()
        with await rig.engine.hold(SPACE, keys, tenant="t", salt=b"s") as hold:
            assert hold.blocks == BLOCKS
        await rig.at_rest()


@pytest.mark.parametrize("chain", ["lz4", "int8"])
async def test_compressed_blocks_are_held_as_they_are(chain: str, tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path, compression=chain) as (rig, keys, _):
        exact = await rig.engine.hold(None, keys)
        lossy = await rig.engine.hold(None, keys, fidelity="lossy")
        assert exact.blocks == (0 if chain == "int8" else BLOCKS)
        assert lossy.blocks == BLOCKS
        exact.release()
        lossy.release()


# --------------------------------------------------------------------------- damage and faults


@pytest.mark.parametrize("layout", kit.LAYOUTS)
@pytest.mark.parametrize("damaged", [(0,), (5,), (2, 4, 7), (7,)])
async def test_damage_in_ram_shortens_it_and_is_dropped(
    damaged: tuple[int, ...], layout: str, tmp_path: Path
) -> None:
    async with stored("host", tmp_path, layout=layout, verify_host=False) as (rig, keys, kv):
        break_frames(rig, keys, damaged)
        hold = await rig.engine.hold(None, keys)
        # the only state is that of the last block
        wanted = 0 if layout == "state" else min(damaged)
        if layout == "sliding" and damaged[0] == 2:
            wanted = 2
        assert (hold.blocks, hold.held) == (wanted, wanted > 0)
        assert rig.engine.stats().leases == int(wanted > 0)
        async with rig.engine.session("b") as session:
            tokens, back = await load(session, IDS)  # not verified again, and right all the same
            assert tokens == wanted * kit.BLOCK
            assert back.same(kv, tokens) or tokens == 0
        hold.release()
        async with rig.engine.session("a") as session:
            await session.store(IDS, kv.view)
        with await rig.engine.hold(None, keys) as again:
            assert again.blocks == BLOCKS


async def test_damage_on_the_way_shortens_it(tmp_path: Path) -> None:
    fault = Corrupting(times=1)
    fault.active = False
    async with stored("host+nvme", tmp_path, faults={"nvme": [fault]}) as (rig, keys, _):
        fault.active = True
        hold = await rig.engine.hold(None, keys)
        assert hold.blocks < BLOCKS
        assert where(rig)[: hold.blocks] == ["host"] * hold.blocks
        hold.release()


async def test_a_tier_that_fails_shortens_it(tmp_path: Path) -> None:
    fault = Failing("read")
    fault.active = False
    async with stored("host+nvme", tmp_path, faults={"nvme": [fault]}) as (rig, keys, _):
        with await rig.engine.hold(None, keys[:3]):
            chill(rig)  # three stay in RAM
            fault.active = True
            hold = await rig.engine.hold(None, keys)
            assert hold.blocks == 3
            hold.release()
        fault.active = False


async def test_a_hanging_tier_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    fault = Hanging("read")
    fault.active = False
    async with stored("host+nvme", tmp_path, faults={"nvme": [fault]}) as (rig, keys, _):
        with await rig.engine.hold(None, keys[:3]):
            chill(rig)
            fault.active = True
            async with asyncio.timeout(30):
                hold = await rig.engine.hold(None, keys, deadline="50ms")
            assert hold.blocks in (0, 3)  # 0: there was no time to verify on a busy machine
            hold.release()
            fault.release()
        await rig.settle()


async def test_a_hanging_tier_times_out_by_itself(tmp_path: Path) -> None:
    fault = Hanging("read")
    fault.active = False
    async with stored("host+nvme", tmp_path, faults={"nvme": [fault]}, tier_timeout="500ms") as (
        rig,
        keys,
        _,
    ):
        fault.active = True
        async with asyncio.timeout(30):
            hold = await rig.engine.hold(None, keys)
        assert (hold.blocks, rig.engine.stats().leases) == (0, 0)
        fault.active = False
        fault.release()
        await rig.settle()


async def test_no_time_at_all_holds_nothing(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path, warm=True) as (rig, keys, _):
        hold = await rig.engine.hold(None, keys, deadline=0)
        assert (hold.blocks, hold.held, rig.engine.stats().leases) == (0, False, 0)


# --------------------------------------------------------------------------- room


async def test_c7_memory_full_of_leased_blocks_ends_in_a_shorter_hold(tmp_path: Path) -> None:
    async with stored("host+nvme", tmp_path, capacity=10 * FRAME) as (rig, keys, _):
        assert (await other(rig, 1, 6))[0] == 6
        await rig.engine.flush()
        busy = rig.engine.session("other1")
        async with busy, busy.match(kit.tokens(6, seed=1)):
            async with asyncio.timeout(30):  # nobody waits for memory
                hold = await rig.engine.hold(None, keys)
            assert 0 < hold.blocks <= 4
            hold.release()
        # what did not come is where it was
        assert len(list(rig.engine.core.decisions.parts(1))) == BLOCKS + 6


async def test_k5_holds_make_nothing_else_impossible(tmp_path: Path) -> None:
    """Everything but what is held can be evicted; with all of RAM held, stores end, refused."""
    async with stored("host", tmp_path, capacity=12 * FRAME) as (rig, keys, _):
        holds = [await rig.engine.hold(None, keys) for _ in range(20)]
        assert all(hold.blocks == BLOCKS for hold in holds)
        for seed in range(1, 6):
            assert await other(rig, seed, 4) == (4, 0)
        async with asyncio.timeout(30):
            stored_, skipped = await other(rig, 7, 12)
        assert (stored_, skipped) == (4, 8)
        for hold in holds[1:]:
            hold.release()
        assert (await other(rig, 8, 12))[1] == 8  # one is enough to keep them
        holds[0].release()
        ids, kv = kit.tokens(12, seed=9), kit.Memory(SPACE.layout, 192, seed=2)
        async with rig.engine.session("last") as session:
            done = await session.store(ids, kv.view)
        assert [b.reason for b in done.blocks if b.reason is SkipReason.FULL] == []
        assert done.stored == 12


@pytest.mark.parametrize("warm", [True, False])
async def test_k6_a_wrong_tenant_condemns_no_good_copy(warm: bool, tmp_path: Path) -> None:
    """Keys are taken at their word; what they name may belong to somebody else."""
    async with stored("host+nvme", tmp_path, warm=warm) as (rig, keys, _):
        with await rig.engine.hold(None, keys, tenant="other") as hold:
            assert hold.blocks == 0
        with await rig.engine.hold(None, keys, salt=b"other") as hold:
            assert hold.blocks == 0
        with await rig.engine.hold(None, keys) as hold:
            assert hold.blocks == BLOCKS
        assert rig.engine.core.decisions.entries(1) == BLOCKS
