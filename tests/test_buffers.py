"""Arena and staging window."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from tierkv.buffers import Arena, ArenaBuffer, Staging, StagingHeldError
from tierkv.errors import CapacityError, ClosedError
from tierkv.workers import Workers

if TYPE_CHECKING:
    from tierkv.abc import Buffer

pytestmark = pytest.mark.every_loop
PAGE = 4096


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def take(arena: Arena, nbytes: int) -> ArenaBuffer:
    buffer = arena.allocate(nbytes)
    assert buffer is not None
    return buffer


def test_buffers_are_aligned_writable_and_apart() -> None:
    arena = Arena(1 << 20)
    buffers = [take(arena, n) for n in (1, 4095, 4096, 4097, 50_000, 100_000)]
    for number, buffer in enumerate(buffers):
        assert address(buffer.memory) % PAGE == 0
        assert len(buffer.memory) == buffer.nbytes
        assert len(buffer.padded) % PAGE == 0
        assert 0 <= len(buffer.padded) - buffer.nbytes < PAGE
        buffer.padded[:] = bytes([number]) * len(buffer.padded)
    for number, buffer in enumerate(buffers):
        assert set(buffer.padded) == {number}


def test_less_than_a_page_is_lost_in_a_buffer() -> None:
    for nbytes in range(1, 2_000_000, 3137):
        assert 0 <= Arena.charge(nbytes) - nbytes < PAGE


def test_charge_is_what_a_buffer_takes() -> None:
    arena = Arena(8 << 20)
    for nbytes in (1, 5000, 70_000, 300_000, 1 << 20):
        before = arena.used
        buffer = take(arena, nbytes)
        assert arena.used - before == arena.charge(nbytes)
        buffer.release()
        assert arena.used == before


@pytest.mark.parametrize("nbytes", [PAGE, 5 * PAGE, 9 * PAGE, 33 * PAGE, 500_000])
def test_one_size_fills_the_arena(nbytes: int) -> None:
    arena = Arena(8 << 20)
    count = 0
    while arena.allocate(nbytes) is not None:
        count += 1
    assert count == arena.capacity // arena.charge(nbytes)


def test_smaller_frames_take_less_room() -> None:
    """Compressed frames (int8 against bf16) really let more blocks in: at least 1.7 times."""

    def fill(nbytes: int) -> int:
        arena = Arena(64 << 20)
        count = 0
        while arena.allocate(nbytes) is not None:
            count += 1
        return count

    raw, int8 = 1_478_656, 757_760
    assert fill(int8) >= 1.7 * fill(raw)


def test_a_change_of_sizes_wears_out() -> None:
    arena = Arena(4 << 20)
    for nbytes in (PAGE, 3 * PAGE, 10 * PAGE, 300_000, PAGE):
        held = []
        while (buffer := arena.allocate(nbytes)) is not None:
            held.append(buffer)
        assert arena.used >= 0.9 * arena.capacity
        for buffer in held:
            buffer.release()
        assert arena.used == 0
    whole = take(arena, arena.capacity)
    whole.release()


def test_mixed_sizes_do_not_fragment_it() -> None:
    rng = random.Random(3)
    arena = Arena(32 << 20)
    held: list[ArenaBuffer] = []
    shares = []
    for _ in range(6000):
        nbytes = rng.randint(90_000, 375_000)
        buffer = arena.allocate(nbytes)
        if buffer is None:  # full: the share of real bytes tells how much was lost
            shares.append(sum(b.nbytes for b in held) / arena.capacity)
            for _ in range(8):
                held.pop(rng.randrange(len(held))).release()
        else:
            held.append(buffer)
    assert len(shares) > 100
    assert sorted(shares)[len(shares) // 20] >= 0.85


def test_release_is_idempotent_and_ends_access() -> None:
    arena = Arena(1 << 20)
    buffer = take(arena, 10_000)
    buffer.release()
    other = take(arena, 10_000)
    buffer.release()
    assert arena.used == arena.charge(10_000)
    for name in ("memory", "padded"):
        with pytest.raises(ClosedError, match="released"):
            getattr(buffer, name)
    other.release()


def test_released_memory_is_poisoned_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    arena = Arena(1 << 20)
    buffer = take(arena, 5000)
    memory = buffer.memory
    memory[:] = bytes(5000)
    buffer.release()
    assert set(memory) == {0xDB}


def test_touch_keeps_contents_and_ends() -> None:
    arena = Arena(8 << 20)
    buffer = take(arena, 100_000)
    buffer.memory[:] = b"\x11" * 100_000
    assert arena.touch(3 << 20) == 3 << 20
    assert arena.touch(100 << 20) == 5 << 20
    assert arena.touch(1) == 0
    assert set(buffer.memory) == {0x11}


def test_impossible_arenas_are_refused() -> None:
    with pytest.raises(CapacityError, match="at least"):
        Arena(100)
    with pytest.raises(CapacityError, match="cannot map"):
        Arena(1 << 60)
    assert Arena(1 << 20).allocate(2 << 20) is None


def test_threads_share_an_arena() -> None:
    arena = Arena(4 << 20)
    wrong: list[int] = []

    def churn(mark: int) -> None:
        rng = random.Random(mark)
        held: list[ArenaBuffer] = []
        for _ in range(400):
            buffer = arena.allocate(rng.randint(1, 60_000))
            if buffer is not None:
                np.frombuffer(buffer.padded, np.uint8).fill(mark)
                held.append(buffer)
            if held and (buffer is None or rng.random() < 0.5):
                old = held.pop(rng.randrange(len(held)))
                if not (np.frombuffer(old.padded, np.uint8) == mark).all():
                    wrong.append(mark)
                old.release()
        for buffer in held:
            buffer.release()

    threads = [threading.Thread(target=churn, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.used == 0


def test_import_loads_no_torch() -> None:
    code = "import sys, tierkv.buffers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------- staging


@pytest.mark.anyio
async def test_staging_serves_in_order_of_arrival() -> None:
    staging = Staging(16 * PAGE)
    first = staging.acquire_nowait(16 * PAGE)
    assert first is not None
    order: list[int] = []

    async def want(number: int, pages: int) -> None:
        buffer = await staging.acquire(pages * PAGE)
        order.append(number)
        buffer.release()

    workers = Workers()
    await workers.start()
    jobs = [workers.spawn(want, number, pages) for number, pages in enumerate((16, 1, 8, 1))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert staging.waiting == 4
    assert staging.acquire_nowait(PAGE) is None
    first.release()
    for job in jobs:
        await job.wait()
    await workers.aclose()
    assert order == [0, 1, 2, 3]
    assert staging.used == 0


@pytest.mark.anyio
async def test_staging_nobody_overtakes_a_waiter() -> None:
    staging = Staging(16 * PAGE)
    held = staging.acquire_nowait(8 * PAGE)
    assert held is not None
    waiter = asyncio.ensure_future(staging.acquire(12 * PAGE))  # noqa: TID251 - a waiter to test
    await asyncio.sleep(0)
    assert staging.acquire_nowait(PAGE) is None, "there is room, but somebody waits"
    held.release()
    (await waiter).release()
    buffer = staging.acquire_nowait(PAGE)
    assert buffer is not None
    buffer.release()


@pytest.mark.anyio
@pytest.mark.parametrize("granted", [False, True])
async def test_staging_cancelled_waiter_holds_nothing(granted: bool) -> None:
    staging = Staging(16 * PAGE)
    held = staging.acquire_nowait(16 * PAGE)
    assert held is not None
    waiter = asyncio.ensure_future(staging.acquire(16 * PAGE))  # noqa: TID251 - a waiter to test
    behind = asyncio.ensure_future(staging.acquire(PAGE))  # noqa: TID251 - a waiter to test
    await asyncio.sleep(0)
    if granted:  # cancelled in the same turn in which it gets its buffer
        held.release()
        staging._serve()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    held.release()
    (await behind).release()
    await asyncio.sleep(0)
    assert staging.used == staging.waiting == 0


@pytest.mark.anyio
async def test_staging_released_from_a_thread() -> None:
    staging = Staging(4 * PAGE)
    held = staging.acquire_nowait(4 * PAGE)
    assert held is not None
    thread = threading.Timer(0.02, held.release)
    thread.start()
    async with asyncio.timeout(30):
        buffer = await staging.acquire(4 * PAGE)
    thread.join()
    buffer.release()
    buffer.release()
    assert staging.used == 0


@pytest.mark.anyio
async def test_staging_refuses_what_never_fits() -> None:
    staging = Staging(4 * PAGE)
    with pytest.raises(CapacityError, match="never fit"):
        await staging.acquire(5 * PAGE)
    with pytest.raises(CapacityError, match="never fit"):
        staging.acquire_nowait(5 * PAGE)
    assert staging.limit == 4 * PAGE


@pytest.mark.anyio
async def test_background_users_hold_at_most_half_and_come_last() -> None:
    staging = Staging(16 * PAGE)
    first = staging.acquire_nowait(6 * PAGE, background=True)
    assert first is not None
    assert staging.background_used == 6 * PAGE
    assert staging.acquire_nowait(3 * PAGE, background=True) is None, "it would be more than half"
    second = staging.acquire_nowait(2 * PAGE, background=True)
    assert second is not None
    wanted = staging.acquire_nowait(8 * PAGE)
    assert wanted is not None, "the other half is there for what is waited for"
    order = []

    async def user(name: str, pages: int, background: bool) -> None:
        buffer = await staging.acquire(pages * PAGE, background=background)
        order.append(name)
        await asyncio.sleep(0)
        buffer.release()

    async with anyio.create_task_group() as group:
        group.start_soon(user, "copy", 4, True)
        await asyncio.sleep(0)
        group.start_soon(user, "load", 12, False)
        await asyncio.sleep(0)
        assert staging.waiting == 2
        second.release()
        await asyncio.sleep(0.001)
        assert order == [], "there is room for the copy, but the load goes first"
        assert staging.acquire_nowait(PAGE, background=True) is None
        first.release()
        wanted.release()
    assert order == ["load", "copy"]
    assert staging.used == staging.background_used == staging.waiting == 0


async def _until_granted(staging: Staging, pages: int) -> None:
    buffer = await staging.acquire(pages * PAGE, background=True)
    buffer.release()
    buffer.release()  # idempotent: the share is given back once


@pytest.mark.anyio
async def test_a_piece_larger_than_the_share_is_given_out_alone() -> None:
    staging = Staging(16 * PAGE)
    held = staging.acquire_nowait(PAGE, background=True)
    assert held is not None
    waiter = asyncio.ensure_future(_until_granted(staging, 12))  # noqa: TID251 - a waiter to test
    await asyncio.sleep(0)
    assert staging.waiting == 1
    assert staging.acquire_nowait(PAGE) is not None, "what is waited for does not stand behind it"
    held.release()
    await asyncio.wait_for(waiter, 30)
    assert staging.background_used == 0
    cancelled = staging.acquire_nowait(8 * PAGE, background=True)
    assert cancelled is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await staging.acquire(PAGE, background=True)
    cancelled.release()
    assert staging.background_used == staging.waiting == 0
    assert len(staging.whole) == staging.limit


@pytest.mark.anyio
async def test_who_waits_for_memory_that_a_hanging_tier_holds_is_let_go() -> None:
    """P3: only then, and only who somebody waits for: a queue for memory alone is no fault."""
    staging = Staging(4 * PAGE)
    hangs: list[bool] = []
    staging.patience, staging.held_up = 0.005, lambda: bool(hangs)
    held = await staging.acquire(4 * PAGE)
    async with asyncio.timeout(60), anyio.create_task_group() as group:
        background: list[Buffer] = []

        async def wait_behind() -> None:
            background.append(await staging.acquire(PAGE, background=True))

        group.start_soon(wait_behind)
        told: list[Exception] = []
        until_told = anyio.Event()

        async def wait() -> None:
            try:
                await staging.acquire(PAGE)
            except StagingHeldError as error:
                told.append(error)
                until_told.set()

        group.start_soon(wait)
        await asyncio.sleep(0.03)
        assert staging.waiting == 2
        assert not told
        hangs.append(True)
        await until_told.wait()
        assert staging.waiting == 1
        held.release()
    background[0].release()
    assert (staging.used, staging.waiting) == (0, 0)
