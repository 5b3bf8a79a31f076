"""What the CUDA device submits for a batch of copies, on the fake."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.device.batches import check_any_batch
from tests.device.fake_cuda import (
    FakeCudaDevice,
    FakeRuntime,
    device_bytes,
    noise,
    pinned,
)
from tierkv.abc import Move
from tierkv.device import batched
from tierkv.device.cuda_copies import SCRATCH_BYTES
from tierkv.device.plan import BULK_BYTES
from tierkv.errors import LayoutError
from tierkv.views import over

# --------------------------------------------------------------------------- copies


def test_a_frame_out_of_small_pieces_crosses_in_one_copy() -> None:
    runtime = FakeRuntime()
    device = FakeCudaDevice(runtime=runtime)
    pools = [device_bytes(device, noise(8192)) for _ in range(12)]
    frame = pinned(device, 12 * 8192)
    parts = frame.view(12, 8192)
    device.copy([Move(parts[i], pool) for i, pool in enumerate(pools)], device.stores)
    assert frame.tolist() == [x for pool in pools for x in pool.tolist()]
    ((_, _, size),) = [copy for batch in runtime.batches for copy in batch]
    assert size == frame.numel()
    # and back
    for pool in pools:
        pool.zero_()
    runtime.batches.clear()
    device.copy([Move(pool, parts[i]) for i, pool in enumerate(pools)], device.loads)
    assert [size for batch in runtime.batches for _, _, size in batch] == [frame.numel()]
    assert frame.tolist() == [x for pool in pools for x in pool.tolist()]


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("full", [False, True])
def test_strided_pieces_pass_through_scratch(to_host: bool, full: bool) -> None:
    runtime = FakeRuntime()
    device = FakeCudaDevice(runtime=runtime)
    cache = device_bytes(device, noise(4 * 64 * 32 * 2)).view(torch.bfloat16).view(64, 4, 32)
    frame = pinned(device, cache.numel() * 2).view(torch.bfloat16).view(4, 4, 16, 32)
    expected = cache.view(4, 16, 4, 32).transpose(1, 2).clone()
    pages = [cache[16 * i : 16 * i + 16].transpose(0, 1) for i in range(4)]  # an NHD page each
    device.full = full  # no memory for scratch: slower, not wrong
    if to_host:
        device.copy([Move(frame[i], page) for i, page in enumerate(pages)], device.stores)
    else:
        frame.copy_(expected)
        cache.zero_()
        device.copy([Move(page, frame[i]) for i, page in enumerate(pages)], device.loads)
    there = cache.view(4, 16, 4, 32).transpose(1, 2)
    for found in (frame, there):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    sizes = [size for batch in runtime.batches for _, _, size in batch]
    assert sizes == ([] if full else [frame.numel() * 2])


@pytest.mark.parametrize("missing", [None, 2])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("to_host", [True, False])
def test_pages_shorter_than_a_block_cross_together(
    to_host: bool, layout: str, missing: int | None
) -> None:
    runtime = FakeRuntime()
    device = FakeCudaDevice(runtime=runtime)
    heads, dim, page, pages = 4, 32, 16, 4
    pool = device_bytes(device, noise(8 * heads * dim * page * 2)).view(torch.int16)
    shape = (8, heads, page, dim) if layout == "HND" else (8, page, heads, dim)
    where = pool.view(shape) if layout == "HND" else pool.view(shape).transpose(1, 2)
    section = pinned(device, heads * pages * page * dim * 2).view(torch.int16)
    section.copy_(noise(section.numel() * 2).view(torch.int16))
    block = section.view(heads, pages * page, dim)
    order = [5, 0, 7, 2]
    expected, right = block.clone(), where.clone()
    moves = []
    for number, at in enumerate(order):
        if number == missing:
            continue
        piece = block.narrow(1, number * page, page)
        moves.append(Move(piece, where[at]) if to_host else Move(where[at], piece))
        if to_host:
            expected.narrow(1, number * page, page).copy_(where[at])
        else:
            right[at] = piece
    device.copy(moves, device.stores if to_host else device.loads)
    assert torch.equal(block, expected)
    assert torch.equal(where, right)
    sizes = [size for batch in runtime.batches for _, _, size in batch]
    if missing is None:
        assert sizes == [section.numel() * 2]


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_does_what_copies_one_by_one_do(seed: int) -> None:
    device = FakeCudaDevice(runtime=FakeRuntime() if seed % 2 else None)
    check_any_batch(device, seed)
    device.close()


def test_more_than_the_scratch_goes_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.device.cuda_copies.SCRATCH_BYTES", 20_000)
    monkeypatch.setattr("tierkv.device.cuda.SCRATCH_BYTES", 20_000)
    runtime = FakeRuntime()
    device = FakeCudaDevice(runtime=runtime)
    pools = [device_bytes(device, noise(8192)) for _ in range(7)]
    frame = pinned(device, 7 * 8192)
    moves = [Move(frame.view(7, 8192)[i], pool) for i, pool in enumerate(pools)]
    device.copy(moves, device.stores)
    assert frame.tolist() == [x for pool in pools for x in pool.tolist()]
    sizes = [size for batch in runtime.batches for _, _, size in batch]
    assert sizes == [16384, 16384, 16384, 8192]
    assert SCRATCH_BYTES == 32 << 20


def test_copies_are_cut_at_registrations_and_only_pinned_ones_are_batched() -> None:
    runtime = FakeRuntime()
    device = FakeCudaDevice(runtime=runtime)
    size = BULK_BYTES
    memory = memoryview(bytearray(6 * size))
    for low in (1, 2, 4):  # chunks 1 and 2 touch; 0, 3 and 5 are not registered
        assert device.pin(memory[low * size : (low + 1) * size])
    host = over(memory, "uint8", (6 * size,))
    there = device_bytes(device, noise(6 * size))
    device.copy([Move(host, there)], device.stores)
    assert torch.equal(host, there)
    (batch,) = runtime.batches
    starts = [(target - host.data_ptr()) // size for target, _, _ in batch]
    assert (starts, {n for _, _, n in batch}) == ([1, 2, 4], {size})


def test_a_batched_call_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(error=801)
    device = FakeCudaDevice(runtime=runtime)
    there, host = device_bytes(device, noise(100_000)), pinned(device, 100_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            host.zero_()
            device.copy([Move(host, there)], device.stores)
            assert torch.equal(host, there)
    assert [r.message for r in caplog.records] == ["cuda:0: no batched copies from now on: 801"]
    assert runtime.forgotten == 1
    assert "one copy a piece" in repr(device)


def test_bindings_of_another_kind_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Newer(FakeRuntime):
        def cudaMemcpyBatchAsync(self, *args: Any) -> tuple[int, int]:
            raise TypeError("takes 6 positional arguments")

    device = FakeCudaDevice(runtime=Newer())
    there, host = device_bytes(device, noise(100_000)), pinned(device, 100_000)
    device.copy([Move(host, there)], device.stores)
    assert torch.equal(host, there)
    assert "no batched copies from now on: TypeError" in caplog.text


def test_the_default_stream_takes_no_batches() -> None:
    runtime = FakeRuntime()
    device = FakeCudaDevice(runtime=runtime)
    there, host = device_bytes(device, noise(100_000)), pinned(device, 100_000)
    device.copy([Move(host, there)], device.current())
    assert torch.equal(host, there)
    assert runtime.batches == []


def test_copies_run_on_the_stream_that_is_named() -> None:
    device = FakeCudaDevice()
    there = device_bytes(device, noise(64))
    host = torch.zeros(64, dtype=torch.uint8)
    device.copy([Move(host, there)], device.stores)  # gets scratch memory
    device.fake.entered.clear()
    device.copy([Move(host, there)], device.stores)
    device.folds([there], device.loads)
    # the device first: leaving a stream of another device makes that one current
    assert device.fake.entered == [0, device._stores.raw, 0, device._loads.raw]


def test_a_copy_between_host_memories_is_refused() -> None:
    device = FakeCudaDevice()
    with pytest.raises(LayoutError, match="not this device's"):
        device.copy([Move(torch.zeros(4), torch.zeros(4))], device.stores)


# --------------------------------------------------------------------------- the batched call


def test_the_batched_call_needs_bindings_and_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(FakeRuntime):
        versions = (12_040, 12_090)

        def cudaDriverGetVersion(self) -> tuple[int, int]:
            return 0, self.versions[0]

        def cudaRuntimeGetVersion(self) -> tuple[int, int]:
            return 0, self.versions[1]

    class New(Old):
        versions = (13_000, 12_080)

    found: dict[str, object] = {}

    def find(name: str) -> object:
        assert name == "cuda.bindings.runtime"
        if "module" not in found:
            raise ImportError(name)
        return found["module"]

    monkeypatch.setattr("tierkv.device.batched.importlib.import_module", find)
    assert batched.find_batched_copy() is None
    found["module"] = Old()
    assert batched.find_batched_copy() is None
    found["module"] = New()
    assert isinstance(batched.find_batched_copy(), batched.BatchedCopy)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert batched.find_batched_copy() is None
