"""Copies between a device tier and a medium that reaches the device's memory by itself."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

import tierkv
from tests import kit
from tests.engine.rig import Rig
from tests.engine.ways import FRAME, SPACE, copied_to, demote, loaded, store
from tierkv.abc import DirectIo, IoStatus, ReadRequest, WriteItem
from tierkv.decisions.types import EvictReason, MissReason
from tierkv.frame import decode_header, page_round
from tierkv.mover.copies import Copy
from tierkv.mover.copying import copy_batch
from tierkv.registry import resolve
from tierkv.sections import verify
from tierkv.testing.cancel import cancel_at_each_step
from tierkv.testing.faults import Failing, Faulty, Gated, Short, inject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import torch

    from tierkv.abc import Backend, Device, IoResult, StoredPart
    from tierkv.testing.faults import Fault

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop is enough for what does not depend on it."""
    return "asyncio", {"use_uvloop": False}


class _Pages:
    """A buffer that :meth:`Backend.write` takes, over a tensor."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.nbytes = nbytes
        self.padded = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
        self.memory = self.padded[:nbytes]

    def release(self) -> None:
        """Nothing to give back."""


class Pipe(DirectIo):
    """Direct I/O to CPU tensors, by way of the wrapped tier's own calls."""

    mode = "posix"

    def __init__(self, tier: Piped) -> None:
        self.tier = tier
        self.bytes_read = self.bytes_written = 0
        self.spoil = -1

    async def read_device(
        self, requests: Sequence[ReadRequest], into: Sequence[torch.Tensor]
    ) -> list[IoResult]:
        """Read into device memory."""
        memory = [memoryview(t.numpy()).cast("B") for t in into]  # type: ignore[arg-type]
        results = await super(Piped, self.tier).read(
            requests, [m[: q.length] for m, q in zip(memory, requests, strict=True)]
        )
        self.bytes_read += sum(q.length for q in requests)
        if self.spoil >= 0:
            into[0][self.spoil] ^= 4
        return results

    async def write_device(
        self, items: Sequence[tuple[StoredPart, torch.Tensor]]
    ) -> list[IoResult]:
        """Write out of device memory."""
        assert all(len(t) == page_round(s.nbytes) for s, t in items)
        self.bytes_written += sum(s.nbytes for s, _ in items)
        return await super(Piped, self.tier).write(
            [WriteItem(s, _Pages(t, s.nbytes)) for s, t in items]
        )


class Piped(Faulty):
    """A medium with a direct way to every device."""

    def __init__(self, inner: Backend, faults: Sequence[Fault] = ()) -> None:
        super().__init__(inner, faults)
        self.pipe: Pipe | None = Pipe(self)
        self.staged = 0

    def direct(self, device: Device) -> DirectIo | None:
        """The pipe, while there is one."""
        return self.pipe

    async def read(
        self, requests: Sequence[ReadRequest], into: Sequence[memoryview]
    ) -> list[IoResult]:
        """Count what comes by the other way."""
        self.staged += len(requests)
        return await super().read(requests, into)

    async def write(self, items: Sequence[WriteItem]) -> list[IoResult]:
        """Count what goes by the other way."""
        self.staged += len(items)
        return await super().write(items)


@asynccontextmanager
async def direct(
    path: Path, *faults: Fault, codec: str = "raw", device: str = "cpu", **settings: Any
) -> AsyncIterator[tuple[Rig, Piped]]:
    """A device tier over a medium that reaches it."""
    chain = [
        tierkv.Tier("device", 8 * FRAME, device=device),
        tierkv.Tier("nvme", "8MiB", path=str(path / "n"), write_through=False, codec=codec),
    ]
    top, low = (resolve("backends", tier.kind)(tier) for tier in chain)
    top, medium = inject(top), Piped(low, faults)
    async with tierkv.open(
        tiers=chain, backends=[top, medium], space=SPACE, tick=60, **settings
    ) as engine:
        yield Rig(engine, {"device": top, "nvme": medium}), medium


async def _bounce(rig: Rig, medium: Piped) -> list[StoredPart]:
    """Down through host memory and up again: then the device's frames are folded."""
    pipe, medium.pipe = medium.pipe, None
    while await demote(rig):
        await rig.settle()
    core = rig.engine.core
    parts = await copied_to(rig, 1)
    rig.engine.runtime.behind.promote(core.levels[1], parts, SPACE)
    await rig.settle()
    assert core.decisions.entries(0) == len(parts)
    medium.pipe = pipe
    return parts


async def _forget(rig: Rig, tier: int) -> None:
    """Drop everything from one tier, leaves first."""
    core = rig.engine.core
    while left := [(p, g) for p, g, _ in core.decisions.parts(tier)]:
        drops = core.decisions.dropped(left, tier, EvictReason.CAPACITY, core.clock())
        assert drops
        core.free(drops)
    await rig.engine.workers.spawn(core.purge, core.levels[tier]).wait()


async def test_folded_frames_go_down_and_up_without_host_memory(tmp_path: Path) -> None:
    async with direct(tmp_path) as (rig, medium):
        core = rig.engine.core
        await store(rig, 1)
        parts = await _bounce(rig, medium)
        await _forget(rig, 1)
        assert medium.pipe is not None
        medium.staged = 0
        while await demote(rig):
            await rig.settle()
        assert core.decisions.entries(0) == 0
        assert core.decisions.entries(1) == 4
        assert medium.pipe.bytes_written == sum(p.nbytes for p in parts)
        for part, generation, nbytes in list(core.decisions.parts(1)):
            memory = memoryview(bytearray(nbytes))
            request = ReadRequest(part, generation, 0, nbytes)
            (result,) = await medium.inner.read([request], [memory])
            assert result.status is IoStatus.OK
            header = decode_header(memory)
            assert header.folded
            verify(header, memory)
        rig.engine.runtime.behind.promote(core.levels[1], parts, SPACE)
        await rig.settle()
        assert core.decisions.entries(0) == 4
        assert medium.staged == 0
        assert medium.pipe.bytes_read >= medium.pipe.bytes_written
        assert core.staging.used == 0
        await _forget(rig, 1)
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


async def test_what_is_not_folded_goes_through_host_memory(tmp_path: Path) -> None:
    """Also in one batch with frames that are: each takes the way that it can."""
    async with direct(tmp_path) as (rig, medium):
        core = rig.engine.core
        await store(rig, 1)
        parts = await _bounce(rig, medium)  # its files are not folded
        await _forget(rig, 0)
        medium.staged = 0
        rig.engine.runtime.behind.promote(core.levels[1], parts, SPACE)
        await rig.settle()
        assert core.decisions.entries(0) == 4
        assert medium.staged == 4
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


async def test_another_codec_goes_through_host_memory(tmp_path: Path) -> None:
    async with direct(tmp_path, codec="zstd") as (rig, medium):
        assert medium.pipe is not None
        await store(rig, 1)
        while await demote(rig):
            await rig.settle()
        assert medium.pipe.bytes_written == 0
        assert rig.engine.core.decisions.entries(1) == 4
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


@pytest.mark.parametrize("where", [100, 5000, -1])
async def test_bytes_that_are_wrong_on_the_device_are_a_miss(where: int, tmp_path: Path) -> None:
    async with direct(tmp_path) as (rig, medium):
        core = rig.engine.core
        await store(rig, 1)
        parts = await _bounce(rig, medium)
        await _forget(rig, 1)
        if where < 0:  # in the device's own memory, before it is written
            resident = core.levels[0].resident
            assert resident is not None
            found = resident.borrow(parts[0].part, parts[0].generation)
            assert found is not None
            found.buffer.tensor[6000] ^= 1
        while await demote(rig):
            await rig.settle()
        assert medium.pipe is not None
        if where >= 0:
            medium.pipe.spoil = where
            rig.engine.runtime.behind.promote(core.levels[1], parts, SPACE)
            await rig.settle()
            assert core.decisions.entries(0) == 3
            medium.pipe.spoil = -1
        states = [core.decisions.state(p.part, core.clock()) for p in parts]
        assert sum(not s.tiers for s in states) == 1
        assert {s.reason for s in states if not s.tiers} == {MissReason.DAMAGED}
        assert await loaded(rig, 1) < 64
        await rig.at_rest()


@pytest.mark.parametrize("piped", [True, False])
async def test_a_medium_that_fails_leaves_the_part_where_it_is(piped: bool, tmp_path: Path) -> None:
    fault = Failing("write")
    fault.active = False
    async with direct(tmp_path, fault) as (rig, medium):
        await store(rig, 1)
        await _bounce(rig, medium)
        await _forget(rig, 1)
        medium.pipe = medium.pipe if piped else None
        fault.active = True
        assert await demote(rig)
        await rig.settle()
        assert rig.engine.core.decisions.entries(0) == 4
        fault.active = False
        assert await loaded(rig, 1) == 64
        await rig.at_rest()


@pytest.mark.parametrize("piped", [True, False])
async def test_closing_in_the_middle_gives_everything_back(piped: bool, tmp_path: Path) -> None:
    gate = Gated("write")
    gate.open_gate()
    async with direct(tmp_path, gate, close_timeout=0.05) as (rig, medium):
        await store(rig, 1)
        await _bounce(rig, medium)
        await _forget(rig, 1)
        gate.close_gate()
        seen = gate.seen
        medium.pipe = medium.pipe if piped else None
        demotes = await demote(rig)
        async with asyncio.timeout(30):
            await gate.arrived(seen + 1)
        report = await rig.engine.aclose()
        assert report.unwritten == len(demotes)
        core = rig.engine.core
        core.decisions.check()
        assert core.decisions.reserved(1) == 0
        assert core.staging.used == 0


@pytest.mark.parametrize("device", ["cpu", "sim:3"])
@pytest.mark.parametrize("up", [False, True])
async def test_a_direct_copy_cut_at_any_step_leaves_nothing_behind(
    device: str, up: bool, tmp_path: Path
) -> None:
    async with direct(tmp_path, device=device) as (rig, medium):
        core, turns = rig.engine.core, rig.engine.runtime.behind.turns
        await store(rig, 1)
        parts = await _bounce(rig, medium)
        await _forget(rig, 1)
        source, target = (1, 0) if up else (0, 1)
        if up:
            while await demote(rig):
                await rig.settle()
        assert core.decisions.entries(source) == 4
        medium.staged = 0

        async def copy() -> int:
            await _forget(rig, target)
            copies = [
                Copy(p.part, p.generation, p.nbytes, source, target, space=SPACE) for p in parts
            ]
            return await copy_batch(core, copies, turns)

        outcomes = set()
        async for step in cancel_at_each_step(copy):
            outcomes.add(step.outcome)
            await rig.at_rest()
            assert core.decisions.entries(source) == 4
            assert core.decisions.entries(target) in (0, 4)
        assert {"cancelled", "completed"} <= outcomes
        assert core.decisions.entries(target) == 4
        assert medium.staged == 0
        assert await loaded(rig, 1) == 64


@pytest.mark.parametrize("fault", ["error", "short"])
async def test_a_direct_read_that_fails_is_a_miss(fault: str, tmp_path: Path) -> None:
    what: Fault = Failing("read") if fault == "error" else Short()
    what.active = False
    async with direct(tmp_path, what) as (rig, medium):
        core = rig.engine.core
        await store(rig, 1)
        parts = await _bounce(rig, medium)
        await _forget(rig, 1)
        while await demote(rig):
            await rig.settle()
        what.active = True
        rig.engine.runtime.behind.promote(core.levels[1], parts, SPACE)
        await rig.settle()
        assert core.decisions.entries(0) == core.decisions.entries(1) == 0
        assert await loaded(rig, 1) == 0
        await rig.at_rest()


async def test_prefetch_brings_cold_parts_to_the_device(tmp_path: Path) -> None:
    async with direct(tmp_path) as (rig, medium):
        core = rig.engine.core
        await store(rig, 1)
        await _bounce(rig, medium)
        await _forget(rig, 1)
        while await demote(rig):
            await rig.settle()
        assert core.decisions.entries(0) == 0
        job = await rig.engine.prefetch(tokens=kit.tokens(4, seed=1))
        assert await job.wait() == 4
        assert core.decisions.entries(0) == 4
        assert core.staging.used == 0
        assert await (await rig.engine.prefetch(tokens=kit.tokens(4, seed=1))).wait() == 0
        assert await loaded(rig, 1) == 64
        await rig.at_rest()
