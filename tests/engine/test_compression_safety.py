"""Conversion in place beside readers, faults, cancellation and close: one form or the other."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import kit
from tests.engine.compression_world import (
    AFTER_50,
    BLOCK,
    KINDS,
    LAYOUT,
    SPACE,
    chains,
    charges,
    idle,
    near,
    realistic,
)
from tests.engine.rig import Rig, load, running
from tierkv.decisions.types import EvictReason
from tierkv.errors import BackendError
from tierkv.mover.onboard import upload
from tierkv.mover.shrinking import encode
from tierkv.testing.clock import VirtualClock
from tierkv.testing.faults import Failing, Gated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
IDS = kit.tokens(6, seed=1)  # 96 tokens: blocks 0 and 1 have more than 50 behind them
KV = realistic(LAYOUT, len(IDS), seed=1)
OLD = 2


class Gate:
    """Holds the thread that encodes."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    async def wait(self) -> None:
        """Until the thread is there."""
        async with asyncio.timeout(30):
            while not self.entered.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.001)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate()

    def slowly(*args: Any) -> None:
        held.entered.set()
        assert held.open.wait(60)
        encode(*args)

    monkeypatch.setattr("tierkv.mover.converting.encode", slowly)
    yield held
    held.open.set()


async def until(rig: Rig, true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            rig.engine.runtime.behind.recoder.kick()
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
async def test_f038_a_reader_finishes_on_what_it_leased(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock(10.0)
    async with running(kind, tmp_path, space=SPACE, compression=AFTER_50, clock=clock) as rig:
        recoder = rig.engine.runtime.behind.recoder
        async with rig.engine.session("a") as session, rig.engine.session("b") as reader:
            await session.store(IDS[:48], KV.view)
            async with reader.match(IDS[:32]) as match:
                await session.store(IDS, KV.view, start=48)
                await idle(rig)
                assert recoder.converted == 0
                await session.flush()  # waits for nobody who reads
                back = kit.Memory(LAYOUT, 32)
                assert (await match.load(into=back.view)).tokens == 32
                assert back.same(KV, 32)
                assert not reader.derived
            clock.advance(1.0)
            await session.flush()
            assert chains(session)[:3] == [None, None, "raw"]
            assert recoder.converted == OLD
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_a_reader_that_comes_while_it_is_encoded_finds_the_old_one(
    kind: str, tmp_path: Path, gate: Gate
) -> None:
    async with running(kind, tmp_path, space=SPACE, compression=AFTER_50) as rig:
        recoder = rig.engine.runtime.behind.recoder
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await gate.wait()
            async with session.match(IDS) as match:
                assert match.tokens == len(IDS)
                gate.open.set()
                await until(rig, lambda: recoder.put_off == OLD)
                back = kit.Memory(LAYOUT, len(IDS))
                assert (await match.load(into=back.view)).tokens == len(IDS)
                assert back.same(KV, len(IDS))
            assert chains(session) == ["raw"] * 6
        await rig.at_rest()


async def test_memory_lent_without_a_copy_stays_as_it_is(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS[:48], KV.view)
            held = session.get_nowait(0)
            assert held is not None
            with held:
                await session.store(IDS, KV.view, start=48)
                await session.flush()
                assert chains(session)[:2] == ["raw", None]
                assert torch.equal(held.tensor(0, "k"), KV.layers[0]["k"][:, :BLOCK])
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_forgotten_while_it_is_encoded_stays_forgotten(
    kind: str, tmp_path: Path, gate: Gate
) -> None:
    async with running(kind, tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            await gate.wait()
            core = rig.engine.core
            core.free(core.decisions.forget(core.decisions.known(), EvictReason.REMOVED, 0.0))
            assert (await load(session, IDS))[0] == 0
            gate.open.set()
            await idle(rig)
            assert core.decisions.entries(0) == 0
            await session.store(IDS, KV.view)
            await session.flush()
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
        await rig.at_rest()


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_c8_closing_while_one_is_encoded(kind: str, tmp_path: Path, gate: Gate) -> None:
    async with (
        running(kind, tmp_path, space=SPACE, compression=AFTER_50) as rig,
        rig.engine.session("a") as session,
    ):
        await session.store(IDS, KV.view)
        await gate.wait()
        waiter = rig.engine.workers.spawn(rig.engine.flush, name="flush")
        asyncio.get_running_loop().call_later(0.02, gate.open.set)
    assert waiter.done()
    assert rig.engine.core.staging.used == 0
    assert rig.engine.core.decisions.leases() == 0


@pytest.mark.every_loop
async def test_c1_a_cancelled_flush_leaves_the_conversion_alone(tmp_path: Path, gate: Gate) -> None:
    async with running("host", tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            await gate.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await session.flush()
            gate.open.set()
            await session.flush()
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
        await rig.at_rest()


@pytest.mark.every_loop
async def test_flush_waits_for_what_is_being_copied_and_then_converts_it(tmp_path: Path) -> None:
    slow = Gated("write")
    async with running(
        "host+nvme", tmp_path, space=SPACE, compression=AFTER_50, faults={"nvme": [slow]}
    ) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            async with asyncio.timeout(30):
                await slow.arrived()
            await idle_but_copies(rig)
            assert chains(session)[0] == "raw", "what is copied is not exchanged"
            asyncio.get_running_loop().call_later(0.01, slow.open_gate)
            flushed = await session.flush()
            assert flushed.durable == 6
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
        await rig.at_rest()


async def idle_but_copies(rig: Rig) -> None:
    recoder = rig.engine.runtime.behind.recoder
    recoder.kick()
    await recoder.settled([])


@pytest.mark.every_loop
@pytest.mark.parametrize("slower", ["nvme", "file"])
async def test_frames_that_shrink_while_they_wait_to_be_copied_are_copied(
    slower: str, tmp_path: Path
) -> None:
    slow = Gated("write")
    async with running(
        f"device+{slower}", tmp_path, space=SPACE, compression=AFTER_50, faults={slower: [slow]}
    ) as rig:
        behind = rig.engine.runtime.behind
        async with rig.engine.session("x") as other:  # what holds up those behind it
            for seed in (8, 9):
                await other.store(kit.tokens(3, seed=seed), KV.view)
                await until(rig, lambda: not len(behind._queue))
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            await idle_but_copies(rig)
            assert len(behind._queue) == 6
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
            slow.open_gate()
            flushed = await rig.engine.flush()
            assert flushed.missing == 0
            rig.cool()
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert near(KV, back, tokens, 1 / 127)
        await rig.at_rest()
        assert all(
            line.endswith(" 0.0")
            for line in rig.engine.metrics.scrape().decode().splitlines()
            if line.startswith("tierkv_corruption_total")
        )


# --------------------------------------------------------------------------- faults


async def test_a_damaged_block_is_found_and_the_others_are_converted(
    tmp_path: Path, gate: Gate
) -> None:
    async with running("host", tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            await gate.wait()
            core = rig.engine.core
            part = next(p for p, _, _ in core.decisions.parts(0))
            memory = core.levels[0].memory
            assert memory is not None
            held = memory.borrow(part, core.decisions.state(part, 0.0).generation)
            assert held is not None
            held.memory[-1] ^= 1
            gate.open.set()
            await session.flush()
            found = chains(session)
            assert found.count("int8") == OLD - 1
            page = rig.engine.metrics.scrape().decode()
            assert 'tierkv_corruption_total{kind="checksum",tier="host"} 1.0' in page
        await rig.at_rest()


async def test_a_full_tier_is_converted_without_evicting(tmp_path: Path) -> None:
    raw = 36864
    async with running(
        "host",
        tmp_path,
        space=SPACE,
        capacity=6 * raw,
        compression=AFTER_50,
        options={"high": 1.0, "low": 1.0},
    ) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            assert (await session.store(IDS, KV.view)).stored == 6
            await session.flush()
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert near(KV, back, tokens, 1 / 127)
        assert sum(charges(rig)) < 6 * raw
        await rig.at_rest()


async def test_memory_that_cannot_be_had_costs_no_copy(tmp_path: Path) -> None:
    none = Failing("write", times=OLD)
    none.active = False
    async with running(
        "host", tmp_path, space=SPACE, compression=AFTER_50, faults={"host": [none]}
    ) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS[:48], KV.view)
            await session.store(IDS, KV.view, start=48)
            none.active = True
            await session.flush()
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert near(KV, back, tokens, 1 / 127)
        await rig.at_rest()


async def test_too_little_staging_memory_leaves_frames_as_they_are(tmp_path: Path) -> None:
    async with running("host", tmp_path, space=SPACE, compression=AFTER_50, staging="16KiB") as rig:
        async with rig.engine.session("a") as session:
            await session.store(IDS, KV.view)
            await session.flush()
            assert chains(session) == ["raw"] * 6
            assert rig.engine.runtime.behind.recoder.kept == OLD
        await rig.at_rest()


@pytest.mark.every_loop
async def test_staging_memory_that_does_not_come_back_holds_up_no_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.mover.converting._STAGING_S", 0.01)
    async with running(
        "host", tmp_path, space=SPACE, compression=AFTER_50, staging="256KiB"
    ) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            held = rig.engine.core.staging.acquire_nowait(128 << 10, background=True)
            assert held is not None
            await session.store(IDS, KV.view)
            await session.flush()
            assert chains(session) == ["raw"] * 6
            held.release()
            await session.flush()
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
        await rig.at_rest()


async def test_a_device_that_fails_keeps_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def fails(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise BackendError("device", "the bus is down")
        return await upload(*args, **options)

    monkeypatch.setattr("tierkv.mover.converting.upload", fails)
    clock = VirtualClock(10.0)
    async with running("device", tmp_path, space=SPACE, compression=AFTER_50, clock=clock) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            await idle(rig)
            assert calls
            tokens, back = await load(session, IDS)
            assert tokens == len(IDS)
            assert back.same(KV, tokens)
            clock.advance(10)
            await idle(rig)
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
        await rig.at_rest()


@pytest.mark.every_loop
async def test_c4_a_loop_that_fails_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        encode(*args)

    monkeypatch.setattr("tierkv.mover.converting.encode", fails)
    async with running("host", tmp_path, space=SPACE, compression=AFTER_50) as rig:
        async with rig.engine.session("a", fidelity="lossy") as session:
            await session.store(IDS, KV.view)
            await session.flush()
            await session.flush()
            assert chains(session) == ["int8"] * OLD + ["raw"] * 4
            page = rig.engine.metrics.scrape().decode()
            assert 'tierkv_worker_restarts_total{worker="compression"} 1.0' in page
        await rig.at_rest()
