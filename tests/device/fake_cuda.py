"""What `torch.cuda` offers, on CPU memory: enough to run the CUDA device's own logic.

Copies happen when they are submitted. So it shows what is submitted, where and in which pieces,
what is held and what is let go - not that the order between streams is right (the simulated
accelerator shows that for users), and nothing about a driver.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tierkv.abc import Move
from tierkv.device.batched import BatchedCopy
from tierkv.device.cuda import CudaDevice
from tierkv.device.plan import Run
from tierkv.views import over

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeStream:
    def __init__(self, device: int | None = None, handle: int | None = None) -> None:
        self.cuda_stream = id(self) if handle is None else handle
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        FakeEvent.check()
        self.waited.append(event)


class FakeEvent:
    held: list[FakeEvent] | None = None
    """While it is a list: events recorded go into it and are not done."""
    made = 0
    queries = 0
    broken = ""
    """What every call fails with, as all of CUDA does after a fault."""

    def __init__(self) -> None:
        FakeEvent.made += 1
        self.done = True

    @staticmethod
    def check() -> None:
        if FakeEvent.broken:
            raise RuntimeError(FakeEvent.broken)

    def record(self, stream: FakeStream) -> None:
        self.check()
        self.done = FakeEvent.held is None
        if FakeEvent.held is not None:
            FakeEvent.held.append(self)

    def query(self) -> bool:
        FakeEvent.queries += 1
        self.check()
        return self.done

    def synchronize(self) -> None:
        self.check()
        self.done = True


class FakeCuda:
    """The module."""

    Event, Stream = FakeEvent, FakeStream
    OutOfMemoryError = RuntimeError

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        self.default = FakeStream(handle=0)
        self._thread = threading.local()
        self.registered: dict[int, int] = {}
        self.refuse = 0
        self.free = 1 << 30
        self.capturing = False
        self.entered: list[FakeStream | int] = []
        """Streams and (numbers of) devices that were made current."""
        FakeEvent.held, FakeEvent.made, FakeEvent.queries, FakeEvent.broken = None, 0, 0, ""

    def is_available(self) -> bool:
        return self.gpus > 0

    def device_count(self) -> int:
        return self.gpus

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        FakeEvent.check()
        self.entered.append(index)
        yield

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.entered.append(stream)
        before, self._thread.current = self.current_stream(0), stream
        try:
            yield
        finally:
            self._thread.current = before

    def current_stream(self, index: int) -> FakeStream:
        found: FakeStream = getattr(self._thread, "current", self.default)
        return found

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def mem_get_info(self, index: int) -> tuple[int, int]:
        FakeEvent.check()
        return self.free, 2 << 30

    def memory_reserved(self, index: int) -> int:
        return 3 << 20

    def memory_allocated(self, index: int) -> int:
        return 1 << 20

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuse:
            return self.refuse
        if address in self.registered:
            return 712
        self.registered[address] = nbytes
        return 0

    def _unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class FakeRuntime:
    """What is used of `cuda.bindings.runtime`."""

    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="stream")

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.batches: list[list[tuple[int, int, int]]] = []
        self.forgotten = 0

    def cudaMemcpyAttributes(self) -> SimpleNamespace:
        return SimpleNamespace(srcAccessOrder=None)

    def cudaGetLastError(self) -> tuple[int]:
        self.forgotten += 1
        return (self.error,)

    def cudaMemcpyBatchAsync(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[SimpleNamespace],
        first: list[int],
        attribute_count: int,
        stream: int,
    ) -> tuple[int, int]:
        assert len(targets) == len(sources) == len(sizes) == count > 0
        assert [a.srcAccessOrder for a in attributes] == ["stream"]
        assert (first, attribute_count) == ([0], 1)
        assert stream, "CUDA refuses the default stream"
        if self.error:
            return self.error, 0
        batch = list(zip(targets, sources, sizes, strict=True))
        self.batches.append(batch)
        like = torch.zeros(1, dtype=torch.uint8)
        for target, source, size in batch:
            there, here = Run(target, source, size, Move(like, like)).tensors()
            there.copy_(here)
        return 0, 0


class FakeCudaDevice(CudaDevice):
    """The CUDA device over the fake; its memory is what it allocated."""

    def __init__(
        self, name: str = "cuda:0", cuda: FakeCuda | None = None, runtime: FakeRuntime | None = None
    ) -> None:
        self.spans: list[tuple[int, int]] = []
        self.fake = cuda or FakeCuda()
        self.full = False
        batched = None if runtime is None else BatchedCopy(runtime)
        super().__init__(name, cuda=self.fake, batched=batched)

    def _fresh(self, nbytes: int) -> torch.Tensor | None:
        return None if self.full else super()._fresh(nbytes)

    def owns(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(low <= at < high for low, high in self.spans)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        found = super().allocate(nbytes)
        if found is not None:
            self.spans.append((found.data_ptr(), found.data_ptr() + max(nbytes, 1)))
        return found


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.int64).to(torch.uint8)


def pinned(device: CudaDevice, nbytes: int) -> torch.Tensor:
    memory = memoryview(bytearray(nbytes))
    assert device.pin(memory)
    return over(memory, "uint8", (nbytes,))


def device_bytes(device: FakeCudaDevice, data: torch.Tensor) -> torch.Tensor:
    there = device.allocate(data.numel())
    assert there is not None
    return there.copy_(data)
