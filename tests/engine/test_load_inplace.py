"""Views that the engine owns: what the medium can write there itself is copied once, not twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

import tierkv
from tests import kit
from tests.engine.rig import running
from tierkv.decisions.types import MissReason
from tierkv.errors import LoadIncomplete
from tierkv.layout import Group, GroupKind, Layer, Layout, Space, TensorSpec
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Corrupting, Failing, Gated, Hanging, Short

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.rig import Rig

pytestmark = pytest.mark.anyio
BLOCK = 16
HEADS, DIM, LAYERS = 4, 64, 2  # float32: a section is 16 KiB
PAGES = 6
SPACE = Space(
    tierkv.Identity("paged", "r"), Layout.uniform(LAYERS, HEADS, DIM, "float32"), block_tokens=BLOCK
)
SECTION = HEADS * BLOCK * DIM * 4
PAYLOAD = LAYERS * 2 * SECTION


def _aligned(shape: tuple[int, ...], shift: int = 0) -> torch.Tensor:
    count = int(np.prod(shape))
    raw = np.zeros(count * 4 + 8192, np.uint8)
    at = -raw.ctypes.data % 4096 + shift
    return torch.from_numpy(raw[at : at + count * 4]).view(torch.float32).view(shape)


class Pool:
    """Pages of whole blocks, aligned as a medium wants them (or shifted by some bytes)."""

    def __init__(self, seed: int | None = None, shift: int = 0, odd: str = "") -> None:
        shape = (PAGES, HEADS, BLOCK, DIM)
        generator = torch.Generator().manual_seed(seed or 0)
        self.pools: dict[int, dict[str, torch.Tensor]] = {}
        for layer in range(LAYERS):
            for name in "kv":
                tensor = _aligned(shape, shift if name in (odd or "kv") else 0)
                if seed is None:
                    tensor.fill_(77.0)
                else:
                    tensor.copy_(torch.randn(shape, generator=generator))
                self.pools.setdefault(layer, {})[name] = tensor

    def view(self, owned: bool = True, pages: int = PAGES) -> tierkv.abc.View:
        return tierkv.views.paged(self.pools, list(range(pages)), owned=owned)

    def bytes(self) -> bytes:
        return b"".join(t.numpy().tobytes() for x in self.pools.values() for t in x.values())

    def same(self, other: Pool, pages: int = PAGES) -> bool:
        return all(
            torch.equal(t[:pages], other.pools[layer][name][:pages])
            for layer, x in self.pools.items()
            for name, t in x.items()
        )


IDS = kit.tokens(PAGES, block=BLOCK)
KV = Pool(seed=1)


async def _load(session: tierkv.Session, pool: Pool, owned: bool = True, **options: Any) -> Any:
    async with session.match(IDS) as match:
        return await match.load(into=pool.view(owned), **options)


@pytest.mark.parametrize(("owned", "copies"), [(True, 1), (False, 2)], ids=["owned", "the callers"])
async def test_bytes_copied_per_byte_delivered(owned: bool, copies: int, tmp_path: Path) -> None:
    async with running("nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            before, calls = rig.engine.core.bytes_copied, rig.calls("nvme", "read")
            back = Pool()
            result = await _load(session, back, owned)
            assert result.tokens == len(IDS)
            assert back.same(KV)
            assert rig.calls("nvme", "read") == calls + 1
            copied = rig.engine.core.bytes_copied - before
            headers = 4096 * PAGES * copies
            assert PAGES * PAYLOAD * copies <= copied <= PAGES * PAYLOAD * copies + headers
        await rig.at_rest()


@pytest.mark.parametrize("odd", ["k", "v", "kv"])
async def test_sections_that_do_not_fit_take_the_long_way(odd: str, tmp_path: Path) -> None:
    async with running("nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            before, calls = rig.engine.core.bytes_copied, rig.calls("nvme", "read")
            back = Pool(shift=64, odd=odd)
            assert (await _load(session, back)).tokens == len(IDS)
            assert back.same(KV)
            assert rig.calls("nvme", "read") == calls + 1
            share = (rig.engine.core.bytes_copied - before) / (PAGES * PAYLOAD)
            assert (1.4 < share < 1.8) if len(odd) == 1 else (share >= 2)
        await rig.at_rest()


async def test_a_private_tail_and_a_longer_page_take_the_long_way(tmp_path: Path) -> None:
    ids = IDS[: BLOCK * 3 + 5]
    async with running("nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(ids, KV.view(pages=4), tail=True)
            back = Pool()
            async with session.match(ids) as match:
                assert match.tokens == len(ids)
                assert (await match.load(into=back.view())).tokens == len(ids)
            assert back.same(KV, 3)
            for layer, named in back.pools.items():
                for name, tensor in named.items():
                    assert torch.equal(tensor[3, :, :5], KV.pools[layer][name][3, :, :5])
        await rig.at_rest()


async def test_frames_of_another_chain_and_the_same_length_are_read_whole(tmp_path: Path) -> None:
    """Zeros compress: the frame is shorter, and nothing of it is what a raw one would be."""
    zeros = Pool()
    for named in zeros.pools.values():
        for tensor in named.values():
            tensor.zero_()
    async with running("nvme", tmp_path, space=SPACE, compression="zstd") as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, zeros.view())
            back = Pool()
            assert (await _load(session, back)).tokens == len(IDS)
            assert back.same(zeros)
        await rig.at_rest()


async def test_a_frame_that_only_looks_raw_is_found_out(tmp_path: Path) -> None:
    """Each section compresses by a few bytes: the frame takes as many pages as a raw one."""
    almost = Pool()
    for named in almost.pools.values():
        for tensor in named.values():
            bits = torch.randint(-(2**31), 2**31 - 1, tensor.shape, dtype=torch.int64)
            tensor.view(torch.int32).copy_(bits)
            tensor[:, 0, :3] = 0
    async with running("nvme", tmp_path, space=SPACE, compression="zstd") as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, almost.view())
            found = [p.nbytes for p in (await _parts(session))]
            assert found == [4096 + PAYLOAD] * PAGES
            calls = rig.calls("nvme", "read")
            back = Pool()
            assert (await _load(session, back)).tokens == len(IDS)
            assert back.bytes() == almost.bytes()
            assert rig.calls("nvme", "read") == calls + 2  # in place, then whole frames
            again = Pool()
            async with session.match(IDS) as match:
                assert [x async for x in match.layers(into=again.view())] == [0, 1]
            assert again.bytes() == almost.bytes()
            # layer 1 was looked for where a raw frame has it, and read once more
            assert rig.calls("nvme", "read") == calls + 5
        await rig.at_rest()


async def _parts(session: tierkv.Session) -> Any:
    async with session.match(IDS) as match:
        return match._found.parts


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda: Corrupting(0.6), MissReason.DAMAGED),
        (lambda: Failing("read"), MissReason.FAILED),
        (Short, MissReason.DAMAGED),
    ],
    ids=["corrupt", "failing", "short"],
)
async def test_f003_nothing_bad_is_reported(fault: Any, reason: MissReason, tmp_path: Path) -> None:
    made = fault()
    made.active = False
    async with running("nvme", tmp_path, space=SPACE, faults={"nvme": [made]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            made.active = True
            result = await _load(session, Pool())
            assert (result.tokens, result.reason, result.by_tier) == (0, reason, {})
            made.active = False
            await session.store(IDS, KV.view())
            back = Pool()
            assert (await _load(session, back)).tokens == len(IDS)
            assert back.same(KV)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_f044_cancelled_while_a_thread_writes_the_view(tmp_path: Path) -> None:
    """The call ends when the thread does: until then the view is being written."""
    hanging = Hanging("read", times=1)
    async with running("nvme", tmp_path, space=SPACE, faults={"nvme": [hanging]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            back = Pool()
            order: list[str] = []

            async def cut() -> None:
                try:
                    await _load(session, back)
                finally:
                    order.append("ended")

            async with asyncio.timeout(60), anyio.create_task_group() as group:
                group.start_soon(cut)
                await anyio.to_thread.run_sync(hanging._entered.wait)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    for _ in range(50):
                        await asyncio.sleep(0)
                    order.append("released")
                    hanging.release()
            assert order == ["released", "ended"]
            before = back.bytes()
            await rig.at_rest()
            assert back.bytes() == before
            fresh = Pool()
            assert (await _load(session, fresh)).tokens == len(IDS)
            assert fresh.same(KV)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_cancelled_at_each_step(tmp_path: Path) -> None:
    pools: list[Pool] = []
    async with (
        running("nvme", tmp_path, space=SPACE) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view())

        async def once() -> int:
            pools.append(Pool())
            return int((await _load(session, pools[-1])).tokens)

        async for run in cancel_at_each_step(once):
            before = pools[-1].bytes()
            await rig.at_rest()
            assert pools[-1].bytes() == before, f"written after {run}"
            if run.outcome == "completed":
                assert run.value == len(IDS)
                assert pools[-1].same(KV)


@pytest.mark.every_loop
async def test_with_a_deadline_the_view_is_left_alone(tmp_path: Path) -> None:
    """A read that may not be waited for must not write where somebody else may be by then."""
    gate = Gated("read")
    async with running("nvme", tmp_path, space=SPACE, faults={"nvme": [gate]}) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            back = Pool()
            before = back.bytes()
            result = await _load(session, back, deadline=0.05)
            assert (result.tokens, result.reason) == (0, MissReason.DEADLINE)
            gate.open_gate()
            await rig.at_rest()
            assert back.bytes() == before
        await rig.at_rest()


async def _promoted(rig: Rig, session: tierkv.Session) -> None:
    calls = rig.calls("nvme", "read")
    for _ in range(2):
        back = Pool()
        assert (await _load(session, back)).tokens == len(IDS)
        assert back.same(KV)
    assert rig.calls("nvme", "read") == calls + 1


async def test_below_a_memory_tier_parts_are_promoted_instead(tmp_path: Path) -> None:
    async with running("host+nvme", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            await session.flush()
            rig.cool()
            await _promoted(rig, session)
        await rig.at_rest()


def test_one_head_is_contiguous_in_a_dense_view_too() -> None:
    """Latent layouts have one head: their blocks are whole runs of memory in any dense view."""
    from tierkv.mover.inplace import Place, fits

    spec = TensorSpec("latent", "float32", (1, 256))
    space = Space(
        tierkv.Identity("m", "r"), Layout((Group(GroupKind.LATENT, (Layer(0, (spec,)),)),)), BLOCK
    )
    from tierkv.blocks import BlockKey, part_id
    from tierkv.decisions.types import FoundPart
    from tierkv.pipeline import Pipeline

    view = tierkv.views.dense({0: {"latent": _aligned((1, 64, 256))}}, owned=True)
    nbytes = Pipeline(space).max_bytes(0)
    key = BlockKey(bytes(32))
    found = FoundPart(part_id(key, 0), 1, 0, 0, 1, nbytes)
    assert fits(Place(found, nbytes, space, key, view, BLOCK, BLOCK))
    shifted = tierkv.views.dense({0: {"latent": _aligned((1, 64, 256), 64)}}, owned=True)
    assert not fits(Place(found, nbytes, space, key, shifted, BLOCK, BLOCK))


def _spoil(rig: Rig, match: Any, block: int) -> None:
    """Flip a bit of the last section of one leased frame in the host tier's memory."""
    (part,) = [p for p in match._found.parts if p.block == block]
    memory = rig.engine.core.levels[0].memory
    assert memory is not None
    held = memory.borrow(part.part, part.generation)
    assert held is not None
    held.memory[4096 + PAYLOAD - 1] ^= 1


@pytest.mark.parametrize("owned", [True, False])
async def test_damage_in_ram(owned: bool, tmp_path: Path) -> None:
    """What is reported is right; a caller's view has nothing of the bad block, ours may have."""
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            back = Pool()
            async with session.match(IDS) as match:
                _spoil(rig, match, 2)
                result = await match.load(into=back.view(owned))
            assert (result.tokens, result.reason) == (2 * BLOCK, MissReason.DAMAGED)
            assert back.same(KV, 2)
            for named in back.pools.values():
                for tensor in named.values():
                    assert bool((tensor[3:] == 77.0).all())
                    assert owned or bool((tensor[2] == 77.0).all())
        await rig.at_rest()


@pytest.mark.parametrize("owned", [True, False])
async def test_a_byte_from_ram_is_copied_once_in_either_kind_of_view(
    owned: bool, tmp_path: Path
) -> None:
    async with running("host", tmp_path, space=SPACE) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            before = rig.engine.core.bytes_copied
            back = Pool()
            assert (await _load(session, back, owned)).tokens == len(IDS)
            assert back.same(KV)
            copied = rig.engine.core.bytes_copied - before
            assert PAGES * PAYLOAD <= copied <= PAGES * (PAYLOAD + 4096)
        await rig.at_rest()


@pytest.mark.every_loop
async def test_a_tier_that_hangs_ends_the_load_all_the_same(tmp_path: Path) -> None:
    hanging = Hanging("read", times=1)
    async with running(
        "nvme", tmp_path, space=SPACE, faults={"nvme": [hanging]}, tier_timeout="100ms"
    ) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view())
            # not a result: whoever recomputed into this view could find it overwritten later
            async with asyncio.timeout(60):
                with pytest.raises(LoadIncomplete, match="may write into the view"):
                    await _load(session, Pool())
            hanging.release()
            await rig.settle()
        await rig.at_rest()
