"""What only a GPU can show of the CUDA device; skipped where there is none."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.device.batches import check_any_batch
from tierkv.abc import Move
from tierkv.device.cuda import CudaDevice
from tierkv.device.fold import fold, fold_digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_any_batch_does_what_copies_one_by_one_do(kernel: bool, batched: bool) -> None:
    device = CudaDevice("cuda:0")
    device.ready()
    if not kernel:
        device._copies.kernel = None
    if not batched:
        device._copies._batched = None
    before = device._copies.mode
    for seed in range(40):
        check_any_batch(device, seed)
    assert device._copies.mode == before, "something was given up: see the log"
    device.close()


def test_batches_of_several_threads_do_not_mix() -> None:
    device = CudaDevice("cuda:0")
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for seed in range(10):
                check_any_batch(device, 100 * number + seed)
        except Exception as error:  # noqa: BLE001 - told below
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    device.close()


def test_long_sections_have_the_checksums_of_the_host() -> None:
    device = CudaDevice("cuda:0")
    data = torch.randint(0, 256, ((64 << 20) + 4096,), dtype=torch.uint8)
    there = device.allocate(data.numel())
    assert there is not None
    device.copy([Move(there, data)], device.loads)
    sizes = [64, 64, 4096, 40 << 20, len(data) - 4096 - 128 - (40 << 20)]
    pieces, at = [], 0
    for size in sizes:
        pieces.append((at, at + size))
        at += size
    numbers = device.folds([there[a:b] for a, b in pieces], device.loads)
    device.loads.record().synchronize()
    plain = data.numpy().data
    assert fold_digests(numbers) == [fold(plain[a:b]) for a, b in pieces]
    device.close()


def test_no_memory_is_none_and_costs_the_model_nothing() -> None:
    device = CudaDevice("cuda:0")
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    del kept  # torch keeps it for the model
    before = torch.cuda.memory_reserved(0)
    assert device.allocate(1 << 50) is None
    assert torch.cuda.memory_reserved(0) == before
    device.close()


def test_a_capture_of_the_model_goes_on() -> None:
    device = CudaDevice("cuda:0")
    device.ready()
    data, out = torch.ones(1 << 20, device="cuda:0"), torch.zeros(1 << 20, device="cuda:0")
    stop = threading.Event()
    wrong: list[str] = []

    def work() -> None:
        try:
            while not stop.is_set():
                check_any_batch(device, 1)
        except Exception as error:  # noqa: BLE001 - told below
            wrong.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out.copy_(data).mul_(2)
                event = device.current().record()  # refused: it would become part of the graph
            with pytest.raises(Exception, match="capturing a CUDA graph"):
                event.query()
            graph.replay()
    finally:
        stop.set()
        thread.join()
    torch.cuda.synchronize()
    assert wrong == []
    assert bool((out == 2).all())
    device.close()
