"""Device memory in chunks: no page belongs to two, none is reused early, none is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.errors import ClosedError
from tierkv.frame import PAGE
from tierkv.testing.accelerator import SimDevice
from tierkv.testing.resident import HeldEvent
from tierkv_backends.device.pool import DevicePool, PoolBuffer

_PAGES = 64


def pool(
    pages: int = _PAGES, chunk: int = 16, capacity: int = 1 << 30
) -> tuple[DevicePool, SimDevice]:
    device = SimDevice("sim:0", capacity=capacity, manual=True)
    return DevicePool(device, pages * PAGE, chunk * PAGE), device


def span(buffer: PoolBuffer) -> tuple[int, int]:
    memory = buffer.tensor
    return memory.data_ptr(), memory.data_ptr() + memory.numel()


def take(from_: DevicePool, pages: int) -> PoolBuffer:
    buffer = from_.allocate(pages * PAGE)
    assert buffer is not None
    return buffer


def test_memory_is_asked_for_when_it_is_needed() -> None:
    memory, device = pool()
    assert (memory.held, memory.chunks, device.counters.allocations) == (0, 0, 0)
    first = take(memory, 3)
    assert (memory.held, memory.chunks) == (15 * PAGE, 1), "a multiple of the frame, in a chunk"
    take(memory, 3)
    assert memory.chunks == 1
    assert memory.used == 6 * PAGE
    first.release()
    first.release()
    assert memory.used == 3 * PAGE
    with pytest.raises(ClosedError, match="was released"):
        _ = first.tensor


def test_a_frame_larger_than_a_chunk_gets_one_of_its_own() -> None:
    memory, _ = pool(chunk=4)
    large = take(memory, 40)
    assert large.tensor.numel() == 40 * PAGE
    assert memory.allocate((_PAGES - 40 + 1) * PAGE) is None
    take(memory, _PAGES - 40)


def test_empty_chunks_make_way_for_a_larger_frame() -> None:
    memory, _ = pool(chunk=16)
    small = [take(memory, 8) for _ in range(8)]
    assert memory.chunks == 4
    for buffer in small[2:]:
        buffer.release()
    assert memory.held == 32 * PAGE, "one empty chunk is kept for the next frames"
    take(memory, 48)
    assert memory.held == 64 * PAGE
    assert memory.chunks == 2


def test_a_refused_chunk_is_counted_and_the_next_try_is_free() -> None:
    memory, device = pool()
    with device.fail_allocations():
        assert memory.allocate(PAGE) is None
        assert memory.allocate(PAGE) is None
    assert memory.failures == 2
    assert memory.held == 0
    take(memory, 1)


def test_a_device_that_is_full_leaves_the_pool_small() -> None:
    memory, device = pool(capacity=20 * PAGE)
    kept = [take(memory, 8), take(memory, 8)]
    assert memory.allocate(8 * PAGE) is None
    assert (memory.failures, memory.chunks, device.available()) == (1, 1, 4 * PAGE)
    kept[0].release()
    take(memory, 8)


def test_chunks_above_a_lowered_limit_go_back_as_they_empty() -> None:
    memory, device = pool(chunk=8)
    buffers = [take(memory, 4) for _ in range(16)]
    assert memory.resize(16 * PAGE) == 64 * PAGE, "frames stand in the way"
    assert memory.allocate(PAGE) is None
    for buffer in buffers[:6]:
        buffer.release()
    assert memory.held == 40 * PAGE
    event = HeldEvent()
    for buffer in buffers[6:14]:
        buffer.release(event)
    assert memory.waiting == 32 * PAGE
    assert memory.allocate(PAGE) is None
    event.done = True
    assert memory.allocate(8 * PAGE) is not None
    assert memory.held <= 16 * PAGE
    used = device.capacity - device.available()
    assert used == memory.held, "what was given back is the device's again"
    assert memory.resize(64 * PAGE) <= 16 * PAGE
    take(memory, 40)


def test_released_memory_is_spoiled_by_a_device_that_checks() -> None:
    memory, device = pool()
    first = take(memory, 1)
    seen = first.tensor
    seen.fill_(1)
    event = HeldEvent()
    first.release(event)
    take(memory, 1)
    assert bool((seen == 1).all()), "work may still read it"
    event.done = True
    again = take(memory, 1)
    assert again.tensor.data_ptr() == seen.data_ptr()
    assert bool((seen == 0xDD).all())
    assert device.counters.hazards == 0


class Broken(HeldEvent):
    def query(self) -> bool:
        raise RuntimeError("the device fell off the bus")


def test_memory_behind_work_of_unknown_outcome_is_never_reused() -> None:
    memory, _ = pool(pages=4, chunk=4)
    take(memory, 4).release(Broken())
    assert memory.waiting == 4 * PAGE
    assert memory.allocate(PAGE) is None


class PoolMachine(RuleBasedStateMachine):
    """Random frames, releases, refusals and limits, against a list of what is out."""

    @initialize(chunk=st.integers(1, 40))
    def start(self, chunk: int) -> None:
        self.pool, self.device = pool(chunk=chunk, capacity=50 * PAGE)
        self.limit = _PAGES
        self.out: list[PoolBuffer] = []
        self.held: list[tuple[HeldEvent, tuple[int, int]]] = []

    @rule(pages=st.integers(1, 24), refuse=st.booleans())
    def allocate(self, pages: int, refuse: bool) -> None:
        failing: dict[str, Any] = {"when": lambda *_: refuse}
        with self.device.fail_allocations(**failing):
            buffer = self.pool.allocate(pages * PAGE)
        if buffer is not None:
            buffer.tensor.fill_(7)
            self.out.append(buffer)

    @rule(data=st.data(), wait=st.booleans())
    def release(self, data: st.DataObject, wait: bool) -> None:
        if self.out:
            buffer = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            event = HeldEvent()
            if wait:
                self.held.append((event, span(buffer)))
            buffer.release(event if wait else None)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.held:
            event, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            event.done = True

    @rule(pages=st.integers(0, _PAGES))
    def resize(self, pages: int) -> None:
        self.limit = pages
        assert self.pool.resize(pages * PAGE) == self.pool.held

    @invariant()
    def no_page_is_in_two_hands(self) -> None:
        spans = sorted([span(b) for b in self.out] + [s for _, s in self.held])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(bool((b.tensor == 7).all()) for b in self.out), "it was spoiled or reused"

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.pending()  # takes in what is done
        out = sum(b.tensor.numel() for b in self.out)
        waiting = sum(stop - start for _, (start, stop) in self.held)
        assert self.pool.waiting == waiting
        assert self.pool.used == out + waiting
        assert self.pool.held <= max(self.limit * PAGE, self.device.capacity)
        assert self.device.capacity - self.device.available() == self.pool.held
        assert sum(chunk.empty for chunk in self.pool._chunks) <= 1
        if self.pool.held > self.limit * PAGE:
            assert self.pool.used, "empty chunks above the limit are kept"

    def teardown(self) -> None:
        for event, _ in getattr(self, "held", []):
            event.done = True
        for buffer in getattr(self, "out", []):
            buffer.release()
        if hasattr(self, "pool"):
            assert self.pool.resize(0) == 0, "memory is lost"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3), chunk=st.integers(1, 64))
def test_what_fits_by_count_fits_for_frames_of_one_size(sizes: list[int], chunk: int) -> None:
    for pages in sizes:
        memory, _ = pool(chunk=chunk)
        for _ in range(_PAGES // pages):
            take(memory, pages)
        assert memory.allocate(pages * PAGE) is None
